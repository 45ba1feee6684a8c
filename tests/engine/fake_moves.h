// Acceptance of drafts in a fake executor, by the oracle of the device's kernels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/ranks/executor.h"
#include "kernels/ref/drafts_ref.h"

namespace fp4moe {

// A batch whose rows have moved, with copies of what moves.
class MovedBatch {
 public:
  MovedBatch(const Batch& batch, const std::vector<int32_t>& distances, int64_t right)
      : batch_(batch),
        ids_(batch.token_ids.begin(), batch.token_ids.end()),
        positions_(batch.positions.begin(), batch.positions.end()),
        features_(batch.feature_rows.begin(), batch.feature_rows.end()),
        sequences_(batch.sequences.begin(), batch.sequences.end()),
        moves_(ids_.size()) {
    EXPECT_TRUE(batch.moves.empty() || batch.moves.size() == batch.sequences.size());
    for (size_t s = 0; s < batch.moves.size(); ++s) {
      const RowsMove& move = batch.moves[s];
      if (move.row < 0) continue;
      const auto first_row = static_cast<size_t>(sequences_[s].first_row);
      for (int64_t i = 0; i < sequences_[s].num_rows; ++i)
        moves_[first_row + static_cast<size_t>(i)] =
            move_code(move.follows ? right + move.row : move.row, i < move.num_ids);
    }
    std::vector<int32_t> first_position(ids_.size());
    ref::move_rows({distances.data(), moves_.data(), ids_.data(), positions_.data(), first_position.data(),
                    features_.empty() ? nullptr : features_.data(), std::ssize(ids_)});
    for (SequenceRows& rows : sequences_) {
      rows.first_position += moves_[static_cast<size_t>(rows.first_row)];
      EXPECT_EQ(rows.first_position, positions_[static_cast<size_t>(rows.first_row)]);
    }
    batch_.token_ids = ids_;
    batch_.positions = positions_;
    batch_.feature_rows = features_;
    batch_.sequences = sequences_;
    batch_.moves = {};
  }
  MovedBatch(const MovedBatch&) = delete;
  const Batch& batch() const { return batch_; }
  const std::vector<int32_t>& distances() const { return moves_; }  // of its rows

 private:
  Batch batch_;
  std::vector<int32_t> ids_;
  std::vector<int64_t> positions_, features_;
  std::vector<SequenceRows> sequences_;
  std::vector<int32_t> moves_;
};

class FakeMoves {
 public:
  // Calls run(group, batch) with the moved batch of each group.
  template <class Run>
  void run(std::span<const Batch> groups, const Run& run) {
    if (groups[0].model == BatchModel::kTarget) ids_.clear(), num_drafts_.clear(), moved_.clear();
    for (size_t group = 0; group < groups.size(); ++group) {
      const MovedBatch moved(groups[group], distances_, kRight);
      if (groups[0].model == BatchModel::kTarget) keep(moved);
      run(group, moved.batch());
    }
  }

  // The rows of the target's last step that sample, with the random numbers of where they are.
  std::vector<SampleRowParams> moved(std::span<const SampleRowParams> rows) const {
    std::vector<SampleRowParams> params(rows.begin(), rows.end());
    if (rows.size() == moved_.size()) ref::move_randoms({params.data(), moved_.data(), std::ssize(params)});
    return params;
  }
  // `id_of(~id)`: the kept draft, or -1.
  template <class IdOf>
  void accept(std::vector<SampledRow>& sampled, const IdOf& id_of) {
    const auto num_rows = static_cast<int64_t>(sampled.size());
    EXPECT_EQ(num_rows, std::ssize(ids_)) << "not all rows have logits";
    std::vector<SampledRow> all = sampled;
    std::vector<int32_t> ids = ids_;
    for (int32_t& id : ids) {
      if (id >= 0 || ~id < Executor::kFirstDraft) continue;
      const int32_t draft = id_of(~id);
      SampledRow row;
      row.status = draft < 0 ? SampleStatus::kNoToken : SampleStatus::kOk;
      row.token_id = std::max(draft, 0);
      id = ~static_cast<int32_t>(all.size());
      all.push_back(row);
    }
    distances_.assign(kRight + ids.size(), 0);
    ref::accept_drafts({all.data(), sampled.data(), ids.data(), num_drafts_.data(), moved_.data(), num_rows,
                        distances_.data(), kRight});
  }

 private:
  static constexpr int64_t kRight = 10000;

  void keep(const MovedBatch& moved) {
    const Batch& batch = moved.batch();
    ids_.insert(ids_.end(), batch.token_ids.begin(), batch.token_ids.end());
    moved_.insert(moved_.end(), moved.distances().begin(), moved.distances().end());
    for (const SequenceRows& rows : batch.sequences) {
      num_drafts_.push_back(static_cast<int32_t>(rows.num_rows - 1));
      num_drafts_.resize(ids_.size() - batch.token_ids.size() +
                         static_cast<size_t>(rows.first_row + rows.num_rows));
    }
  }

  // The rows of the target's last step, over all groups.
  std::vector<int32_t> ids_, num_drafts_, moved_;
  std::vector<int32_t> distances_;
};

}  // namespace fp4moe
