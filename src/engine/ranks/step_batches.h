// StepBatches: owns the batches of one step, and serialises them for other processes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/ranks/draft_shape.h"
#include "fp4moe/status.h"
#include "model/model.h"

namespace fp4moe {

// Upper limits for one step.
struct StepLimits {
  int num_groups = 1;            // data-parallel groups, each with one batch per step
  int64_t max_batch_tokens = 0;  // rows of one batch
  int64_t max_logit_rows = 0;    // over all batches
  bool shares_head = false;      // all groups share the vocabulary of LM heads
  int64_t num_kv_pages = 0;      // per group
  int64_t num_window_pages = 0;  // the same, for window layers; 0: sequences have no second page table
  int64_t num_slots = 0;        // of states, per group, with slot 0; 0: batches have neither slots nor copies
  int64_t num_replay_rows = 0;  // of each slot: the most drafts of a sequence with a state
  int64_t max_table_pages = 0;  // entries in one kind of page tables of a batch; sequences may share pages
  int page_size = 0;
  int64_t vocab_size = 0;
  int64_t num_unknown_ids = 0;  // ids ~r with r below it are legal (Executor::samples())
  DraftShape draft;

  // Columns of a model's logits, and the number of ids that its batches may have.
  int64_t vocab_of(BatchModel model) const {
    return model == BatchModel::kDraft ? draft.vocab_size : vocab_size;
  }
  // A step copies at most as many states as its group's slots are read and written between two steps.
  int64_t max_state_copies() const { return 4 * num_slots; }
  int64_t num_ids_of(BatchModel model) const {
    return model == BatchModel::kDraft ? draft.num_input_ids : vocab_size;
  }
};

class StepBatches {
 public:
  // Copies the batches, which are all for the same model. The positions of a sequence's rows must be
  // consecutive.
  void assign(std::span<const Batch> groups);

  // The format is 32-bit words in host byte order: a header, then each group's data. decode() accepts
  // untrusted bytes: kDataLoss names a value that exceeds the limits or is inconsistent. Rows whose features
  // a batch continues must be rows of the pass before, which this object has decoded too.
  void encode(std::vector<uint8_t>& bytes) const;
  Status decode(std::span<const uint8_t> bytes, const StepLimits& limits);
  static int64_t max_bytes(const StepLimits& limits);

  // Returns a view of the group's batch, valid until the next assign() or decode().
  Batch batch(int group) const;
  BatchModel model() const { return model_; }
  int64_t num_logit_rows(int group) const;
  int64_t first_logit_row(int group) const;  // index within the step

 private:
  struct Group {
    std::vector<int32_t> token_ids, page_tables, window_tables;
    std::vector<int64_t> positions, logit_rows, feature_rows;
    std::vector<SequenceRows> sequences;
    std::vector<StateCopy> state_copies;
    int32_t* routed_experts = nullptr;  // not sent to other processes
  };
  Status decode_model(uint32_t bits, const StepLimits& limits);
  Status decode_group(std::span<const uint32_t>& words, const StepLimits& limits, Group& group) const;
  Status decode_feature_rows(std::span<const uint32_t> words, size_t index, Group& group) const;
  static Status decode_copies(std::span<const uint32_t> words, const StepLimits& limits, Group& group);
  static Status decode_sequences(std::span<const uint32_t> words, const StepLimits& limits, Group& group);
  static Status decode_drafts(std::span<const uint32_t> words, const StepLimits& limits,
                              SequenceRows& sequence);

  std::vector<Group> groups_;
  BatchModel model_ = BatchModel::kTarget;
  bool has_features_ = false, chains_ = false, moves_experts_ = false;
  std::vector<std::array<int64_t, 2>>
      last_rows_;  // [groups] rows of the last decoded pass of each BatchModel
};

}  // namespace fp4moe
