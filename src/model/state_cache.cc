#include "model/state_cache.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "kernels/gated_delta.h"

namespace fp4moe {

Shard key_head_shard(const DeltaConfig& delta, const RankLayout& layout) {
  return shard_blocks(delta.num_key_heads, 1, layout.attention_tp(), layout.attention_rank());
}

namespace {

int64_t value_heads_per_key_head(const DeltaConfig& delta) {
  return delta.num_value_heads / delta.num_key_heads;
}

// Elements of `num_key_heads` key heads and their value heads in a slot of one layer.
int64_t recurrent_elems(const DeltaConfig& delta, int64_t num_key_heads) {
  return num_key_heads * value_heads_per_key_head(delta) * delta.key_head_dim * delta.value_head_dim;
}

int64_t conv_channels(const DeltaConfig& delta, int64_t num_key_heads) {
  return num_key_heads * (2 * delta.key_head_dim + value_heads_per_key_head(delta) * delta.value_head_dim);
}

int64_t conv_elems(const DeltaConfig& delta, int64_t num_key_heads) {
  return conv_channels(delta, num_key_heads) * (delta.conv_width - 1);
}

int64_t replay_elems(const DeltaConfig& delta, int64_t num_key_heads) {
  return conv_channels(delta, num_key_heads) + 2 * num_key_heads * value_heads_per_key_head(delta);
}

int64_t num_state_layers(const ModelConfig& config) {
  return std::count(config.layer_has_state.begin(), config.layer_has_state.end(), true);
}

}  // namespace

int64_t StateCache::bytes_per_slot(const ModelConfig& config, const RankLayout& layout) {
  if (!config.has_state()) return 0;
  const int64_t key_heads = key_head_shard(config.delta, layout).count;
  return num_state_layers(config) *
         (recurrent_elems(config.delta, key_heads) + conv_elems(config.delta, key_heads)) *
         int64_t{sizeof(float)};
}

int64_t StateCache::bytes_per_replay_row(const ModelConfig& config, const RankLayout& layout) {
  if (!config.has_state()) return 0;
  return num_state_layers(config) * replay_elems(config.delta, key_head_shard(config.delta, layout).count) *
         int64_t{sizeof(float)};
}

Result<StateCache> StateCache::make(const ModelConfig& config, StateCounts counts, const RankLayout& layout,
                                    MemoryResource& memory) {
  const auto [num_slots, num_replay_rows] = counts;
  if (!config.has_state()) {
    if (num_slots != 0)
      return invalid_argument(std::to_string(num_slots) + " state slots for a model without states");
    return StateCache();
  }
  if (config.delta.num_key_heads % layout.attention_tp() != 0)
    return invalid_argument("linear_num_key_heads " + std::to_string(config.delta.num_key_heads) +
                            " cannot be shared by " + std::to_string(layout.attention_tp()) +
                            " ranks; legal: a divisor of it");
  if (num_replay_rows < 0 || num_replay_rows > kMaxReplayRows)
    return invalid_argument("state slots with " + std::to_string(num_replay_rows) +
                            " replay rows; legal: 0 to " + std::to_string(kMaxReplayRows));
  const int64_t replay_bytes = num_replay_rows * bytes_per_replay_row(config, layout);
  const int64_t slot_bytes = bytes_per_slot(config, layout) + replay_bytes;
  if (num_slots < 1 || num_slots > INT64_MAX / slot_bytes || num_slots > INT32_MAX)
    return invalid_argument("state pool of " + std::to_string(num_slots) + " slots of " +
                            std::to_string(slot_bytes) + " bytes is empty or too large");
  StateCache states;
  states.num_slots_ = num_slots;
  states.num_replay_rows_ = num_replay_rows;
  states.delta_ = config.delta;
  states.key_heads_ = key_head_shard(config.delta, layout);
  states.recurrent_elems_ = recurrent_elems(config.delta, states.key_heads_.count);
  states.conv_elems_ = conv_elems(config.delta, states.key_heads_.count);
  states.replay_elems_ = replay_elems(config.delta, states.key_heads_.count);
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    states.places_.push_back(config.has_state(layer) ? states.num_layers_++ : -1);
  FP4MOE_ASSIGN_OR_RETURN(states.buffer_, Buffer::make(num_slots * (slot_bytes - replay_bytes), memory));
  if (replay_bytes > 0) {
    FP4MOE_ASSIGN_OR_RETURN(states.replays_, Buffer::make(num_slots * replay_bytes, memory));
  }
  return states;
}

StateSlots StateCache::layer(int64_t layer) const {
  const int64_t place = places_.empty() ? -1 : places_[static_cast<size_t>(layer)];
  if (place < 0) return {};
  float* const recurrent = buffer_.as<float>() + place * layer_elems();
  StateSlots slots{recurrent, recurrent + num_slots_ * recurrent_elems_, num_slots_};
  if (num_replay_rows_ > 0) {
    slots.replay = replays_.as<float>() + place * num_slots_ * num_replay_rows_ * replay_elems_;
    slots.num_replay_rows = num_replay_rows_;
  }
  return slots;
}

void StateCache::check_slot(int32_t slot) const {
  FP4MOE_CHECK(slot >= 0 && slot < num_slots_,
               "state slot " + std::to_string(slot) + " of " + std::to_string(num_slots_));
}

StateCopyArgs StateCache::device_copy(const StateCopy& copy) const {
  check_slot(copy.from);
  check_slot(copy.to);
  return {.layers = buffer_.as<float>(),
          .num_layers = num_layers_,
          .layer_elems = layer_elems(),
          .first_elems = recurrent_elems_,
          .second_elems = conv_elems_,
          .num_slots = num_slots_,
          .from = copy.from,
          .to = copy.to};
}

void StateCache::copy_slots(std::span<const StateCopy> copies) const {
  for (const StateCopy& copy : copies) {
    check_slot(copy.from);
    check_slot(copy.to);
    if (copy.from == copy.to) continue;
    for (size_t layer = 0; layer < places_.size(); ++layer) {
      const StateSlots slots = this->layer(static_cast<int64_t>(layer));
      if (slots.recurrent == nullptr) continue;
      const auto move = [&copy](float* of, int64_t elems) {
        std::memcpy(of + copy.to * elems, of + copy.from * elems, static_cast<size_t>(elems) * sizeof(float));
      };
      move(slots.recurrent, recurrent_elems_);
      move(slots.conv, conv_elems_);
    }
  }
}

std::vector<StateCache::Range> StateCache::ranges() const {
  const int64_t taps = delta_.conv_width - 1, all_keys = delta_.num_key_heads;
  std::vector<Range> ranges;
  const auto add = [&](bool is_conv, int64_t key_head_elems, int64_t& first, int64_t& canonical) {
    ranges.push_back(
        {is_conv, first, key_heads_.count * key_head_elems, canonical + key_heads_.first * key_head_elems});
    first += key_heads_.count * key_head_elems;
    canonical += all_keys * key_head_elems;
  };
  int64_t first = 0, canonical = 0;
  add(false, recurrent_elems(delta_, 1), first, canonical);
  first = 0;
  add(true, delta_.key_head_dim * taps, first, canonical);
  add(true, delta_.key_head_dim * taps, first, canonical);
  add(true, value_heads_per_key_head(delta_) * delta_.value_head_dim * taps, first, canonical);
  return ranges;
}

std::vector<StateCache::Piece> StateCache::pieces(int32_t slot, int64_t first, int64_t num_bytes) const {
  check_slot(slot);
  const int64_t layer_bytes = int64_t{sizeof(float)} * (recurrent_elems(delta_, delta_.num_key_heads) +
                                                        conv_elems(delta_, delta_.num_key_heads));
  FP4MOE_CHECK(first >= 0 && num_bytes >= 0 && first <= num_layers_ * layer_bytes - num_bytes,
               std::to_string(num_bytes) + " bytes from " + std::to_string(first) + " of a state of " +
                   std::to_string(num_layers_ * layer_bytes));
  std::vector<Piece> pieces;
  for (size_t layer = 0; layer < places_.size(); ++layer) {
    const StateSlots slots = this->layer(static_cast<int64_t>(layer));
    if (slots.recurrent == nullptr) continue;
    for (const Range& range : ranges()) {
      float* const of_slot =
          range.is_conv ? slots.conv + slot * conv_elems_ : slots.recurrent + slot * recurrent_elems_;
      const int64_t start = places_[layer] * layer_bytes + range.canonical * int64_t{sizeof(float)};
      const int64_t begin = std::max(start, first);
      const int64_t end = std::min(start + range.count * int64_t{sizeof(float)}, first + num_bytes);
      if (begin >= end) continue;
      pieces.push_back(
          {reinterpret_cast<uint8_t*>(of_slot + range.first) + (begin - start), begin - first, end - begin});
    }
  }
  return pieces;
}

void StateCache::read_slot(int32_t slot, int64_t first, std::span<uint8_t> canonical) const {
  for (const Piece& piece : pieces(slot, first, std::ssize(canonical)))
    std::memcpy(canonical.data() + piece.offset, piece.data, static_cast<size_t>(piece.num_bytes));
}

void StateCache::write_slot(int32_t slot, int64_t first, std::span<const uint8_t> canonical) const {
  for (const Piece& piece : pieces(slot, first, std::ssize(canonical)))
    std::memcpy(piece.data, canonical.data() + piece.offset, static_cast<size_t>(piece.num_bytes));
}

}  // namespace fp4moe
