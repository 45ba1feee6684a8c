// StateCache: the slots of all layers with states of one rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "io/config/model_config.h"
#include "kernels/batch.h"
#include "kernels/device_copy.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

// The key heads of this rank's shard of a gated delta net.
Shard key_head_shard(const DeltaConfig& delta, const RankLayout& layout);

struct StateCounts {
  StateCounts(int64_t slots, int64_t replay_rows = 0) : num_slots(slots), num_replay_rows(replay_rows) {}
  int64_t num_slots;
  int64_t num_replay_rows;  // per slot: the most drafts in one step
};

// A slot has, in every layer with a state, the state of one sequence: float32 on every device, so that a copy
// keeps the bits. Slot 0 is scrap. A group's ranks share the key heads, and each has the value heads and the
// channels of the convolution that belong to its key heads. The engine assigns slots. A slot's replay rows
// (kernels/batch.h) are neither copied with it nor part of its canonical form.
class StateCache {
 public:
  StateCache() = default;  // of a model without states
  // kInvalidArgument: slots for a model without states, none for one with states, or too many; key heads that
  // the group's ranks cannot share; more than kMaxReplayRows replay rows.
  static Result<StateCache> make(const ModelConfig& config, StateCounts counts, const RankLayout& layout = {},
                                 MemoryResource& memory = host_memory());
  // Returns the bytes of a slot in all layers, without replay rows; 0 for a model without states.
  static int64_t bytes_per_slot(const ModelConfig& config, const RankLayout& layout = {});
  // Returns the bytes of one replay row of one slot in all layers; 0 for a model without states.
  static int64_t bytes_per_replay_row(const ModelConfig& config, const RankLayout& layout = {});
  // Returns the number of slots for num_sequences sequences, in slots 1, 2, ..., and no snapshots; 0 for a
  // model without states.
  static int64_t slots_for(const ModelConfig& config, int64_t num_sequences) {
    return config.has_state() ? 1 + num_sequences : 0;
  }

  // Null data: the layer has no state.
  StateSlots layer(int64_t layer) const;
  // Returns the arguments of a kernel that executes the copy.
  StateCopyArgs device_copy(const StateCopy& copy) const;
  // Executes the copies in order. The slots must be in host memory, also for the functions below.
  void copy_slots(std::span<const StateCopy> copies) const;

  // Copy bytes from `first` on of a slot to and from canonical form, which does not depend on the sharding:
  // per layer with a state [Hv, dk, dv], then [C, conv_width - 1] with the channels of all q heads, all k
  // heads and all v heads; in all, bytes_per_slot() of a single rank. Only this rank's heads are copied.
  void read_slot(int32_t slot, int64_t first, std::span<uint8_t> canonical) const;
  void write_slot(int32_t slot, int64_t first, std::span<const uint8_t> canonical) const;
  // Consecutive bytes of a slot, which are `offset` bytes after `first` in the canonical form.
  struct Piece {
    uint8_t* data = nullptr;
    int64_t offset = 0, num_bytes = 0;
  };
  // Returns this rank's bytes among the num_bytes from `first` on of the canonical form.
  std::vector<Piece> pieces(int32_t slot, int64_t first, int64_t num_bytes) const;

  int64_t num_slots() const { return num_slots_; }
  int64_t num_bytes() const { return buffer_.num_bytes() + replays_.num_bytes(); }

 private:
  // Consecutive elements of a slot in one layer: [first, first + count) of its recurrent or conv part, which
  // are at `canonical` of the layer's canonical form.
  struct Range {
    bool is_conv = false;
    int64_t first = 0, count = 0, canonical = 0;
  };
  void check_slot(int32_t slot) const;
  std::vector<Range> ranges() const;
  int64_t layer_elems() const { return num_slots_ * (recurrent_elems_ + conv_elems_); }

  Buffer buffer_;   // [layers with a state]: recurrent of all slots, then conv of all slots
  Buffer replays_;  // [layers with a state, num_slots, num_replay_rows, replay_elems_]
  int64_t num_slots_ = 0, num_replay_rows_ = 0;
  int64_t recurrent_elems_ = 0, conv_elems_ = 0;  // of one slot in one layer
  int64_t replay_elems_ = 0;                      // of one replay row in one layer
  DeltaConfig delta_;
  Shard key_heads_;              // of this rank
  std::vector<int64_t> places_;  // [num_layers]: index among the layers with states, or -1
  int64_t num_layers_ = 0;       // with states
};

}  // namespace fp4moe
