// Acceptance of drafts in a fake executor, by the oracle of the device's kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/ranks/executor.h"
#include "kernels/ref/drafts_ref.h"

namespace fp4moe {

class FakeMoves {
 public:
  // Calls run(group, batch) with the batch of each group, whose rows have moved.
  template <class Run>
  void run(std::span<const Batch> groups, const Run& run) {
    const bool is_target = groups[0].model == BatchModel::kTarget;
    if (is_target) ids_.clear(), num_drafts_.clear(), moved_.clear();
    for (size_t group = 0; group < groups.size(); ++group) {
      Batch batch = groups[group];
      std::vector<int32_t> ids(batch.token_ids.begin(), batch.token_ids.end());
      std::vector<int32_t> moves(ids.size()), first(ids.size()), drafts(ids.size());
      std::vector<int64_t> positions(batch.positions.begin(), batch.positions.end());
      std::vector<int64_t> features(batch.feature_rows.begin(), batch.feature_rows.end());
      std::vector<SequenceRows> sequences(batch.sequences.begin(), batch.sequences.end());
      EXPECT_TRUE(batch.moves.empty() || batch.moves.size() == sequences.size());
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto first_row = static_cast<size_t>(sequences[s].first_row);
        drafts[first_row] = static_cast<int32_t>(sequences[s].num_rows - 1);
        const RowsMove move = batch.moves.empty() ? RowsMove() : batch.moves[s];
        for (int64_t i = 0; move.row >= 0 && i < sequences[s].num_rows; ++i)
          moves[first_row + static_cast<size_t>(i)] =
              move_code(move.row + (move.follows ? kRight : 0), i < move.num_ids);
      }
      ref::move_rows({distances_.data(), moves.data(), ids.data(), positions.data(), first.data(),
                      features.empty() ? nullptr : features.data(), std::ssize(ids)});
      for (SequenceRows& rows : sequences) rows.first_position += moves[static_cast<size_t>(rows.first_row)];
      batch.token_ids = ids, batch.positions = positions, batch.feature_rows = features;
      batch.sequences = sequences, batch.moves = {};
      if (is_target) {
        ids_.insert(ids_.end(), ids.begin(), ids.end());
        num_drafts_.insert(num_drafts_.end(), drafts.begin(), drafts.end());
        moved_.insert(moved_.end(), moves.begin(), moves.end());
      }
      run(group, batch);
    }
  }

  // Returns the parameters with the random numbers of where the rows are.
  std::vector<SampleRowParams> moved(std::span<const SampleRowParams> rows) const {
    std::vector<SampleRowParams> params(rows.begin(), rows.end());
    if (rows.size() == moved_.size()) ref::move_randoms({params.data(), moved_.data(), std::ssize(params)});
    return params;
  }

  // id_of(~id): a kept draft, or -1.
  template <class IdOf>
  void accept(std::vector<SampledRow>& sampled, const IdOf& id_of) {
    EXPECT_EQ(sampled.size(), ids_.size()) << "not all rows have logits";
    std::vector<SampledRow> all = sampled;
    for (int32_t& id : ids_) {
      if (id >= 0 || ~id < Executor::kFirstDraft) continue;
      const int32_t draft = id_of(~id);
      id = ~static_cast<int32_t>(all.size());
      all.emplace_back().status = draft < 0 ? SampleStatus::kNoToken : SampleStatus::kOk;
      all.back().token_id = std::max(draft, 0);
    }
    distances_.assign(kRight + ids_.size(), 0);
    ref::accept_drafts({all.data(), sampled.data(), ids_.data(), num_drafts_.data(), moved_.data(),
                        std::ssize(sampled), distances_.data(), kRight});
  }

 private:
  static constexpr int64_t kRight = 10000;
  // The rows of the target's last step, over all groups.
  std::vector<int32_t> ids_, num_drafts_, moved_;
  std::vector<int32_t> distances_;
};

}  // namespace fp4moe
