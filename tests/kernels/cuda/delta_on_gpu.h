// Runs gated_delta on a GPU, batch by batch, and on the oracle.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/graph.h"
#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/delta_case.h"
#include "support/compare.h"

namespace fp4moe {

struct Outputs {
  std::vector<float> out, recurrent, conv, replay;
  bool operator==(const Outputs& other) const {
    return same_bits(out, other.out) && same_bits(recurrent, other.recurrent) &&
           same_bits(conv, other.conv) && same_bits(replay, other.replay);
  }
};

// DeviceStates of a size, padded with sequences without rows.
class StateArrays {
 public:
  explicit StateArrays(size_t num_sequences) : size_(num_sequences) {}
  void write(const std::vector<SequenceRows>& batch) {
    const int64_t num_rows = batch.back().first_row + batch.back().num_rows;
    put(first_row_, batch, num_rows, [](const SequenceRows& s) { return s.first_row; });
    put(first_position_, batch, 0, [](const SequenceRows& s) { return s.first_position; });
    put(slots_, batch, 0, [](const SequenceRows& s) { return s.slot; });
    put(num_replayed_, batch, 0, [](const SequenceRows& s) { return s.num_replayed; });
    put(num_tentative_, batch, 0, [](const SequenceRows& s) { return s.num_tentative; });
  }
  DeviceStates view(int64_t max_rows) const {
    return {static_cast<int64_t>(size_), max_rows,      first_row_.data(),
            first_position_.data(),      slots_.data(), num_replayed_.data(),
            num_tentative_.data()};
  }

 private:
  template <class Value>
  void put(const DeviceArray<int32_t>& to, const std::vector<SequenceRows>& batch, int64_t padding,
           const Value& value) {
    std::vector<int32_t> values(size_ + 1, static_cast<int32_t>(padding));
    for (size_t i = 0; i < batch.size(); ++i) values[i] = static_cast<int32_t>(value(batch[i]));
    ASSERT_TRUE(
        device_memory().upload(to.data(), values.data(), std::ssize(values) * int64_t{sizeof(int32_t)}).ok());
  }
  const size_t size_;
  const int64_t entries_ = static_cast<int64_t>(size_) + 1;
  const DeviceArray<int32_t> first_row_{entries_}, first_position_{entries_}, slots_{entries_},
      num_replayed_{entries_}, num_tentative_{entries_};
};

class GatedDeltaCuda : public testing::Test {
 protected:
  void wait() {
    const Status status = current_stream().synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
  }

  // Runs batches of sequences one after the other. Sequences past the last of a batch have no rows, as in a
  // padded decode step. records: by graphs; consecutive batches of decode with drafts share one.
  Outputs run(const DeltaCase& c, const std::vector<std::vector<SequenceRows>>& batches, int64_t num_slots,
              DType dtype = DType::kF32, int64_t num_padding = 2, bool records = false) {
    Slots slots = c.slots(num_slots, num_replay_rows_);
    const DeviceArray<float> qkv(c.qkv), z(c.z), ba(c.ba), conv_weight(c.conv_weight), decay(c.decay),
        dt_bias(c.dt_bias), norm(c.norm_weight), recurrent(slots.recurrent), conv(slots.conv),
        replay(slots.replay);
    const DeviceArray<float> out_f32(dtype == DType::kF32 ? c.tokens * c.columns() : 0);
    const DeviceArray<bf16> out_bf16(dtype == DType::kBF16 ? c.tokens * c.columns() : 0);
    void* const out = dtype == DType::kF32 ? static_cast<void*>(out_f32.data()) : out_bf16.data();
    GatedDeltaArgs args = c.args(slots, {out, dtype, c.tokens, c.columns()});
    args.qkv = qkv.data(), args.z = z.data(), args.b = ba.data(), args.a = ba.data() + c.dims.value_heads;
    args.conv_weight = conv_weight.data(), args.decay = decay.data(), args.dt_bias = dt_bias.data();
    args.norm_weight = norm.data();
    args.slots = {recurrent.data(), conv.data(), num_slots, replay.data(), num_replay_rows_};
    const DeviceArray<uint8_t> workspace(
        ops_->gated_delta_workspace_bytes == nullptr ? 0 : ops_->gated_delta_workspace_bytes(args, c.tokens));
    args.workspace = workspace.data();
    size_t most = 0;
    for (const auto& batch : batches) most = std::max(most, batch.size());
    StateArrays states(most + static_cast<size_t>(num_padding));
    std::optional<Graph> graph;
    int64_t rows_of_graph = 0;
    for (const std::vector<SequenceRows>& batch : batches) {
      DeviceBatch on_device;
      int64_t max_rows = 1 + num_replay_rows_;
      for (const SequenceRows& s : batch) max_rows = std::max(max_rows, s.num_rows);
      on_device.num_rows = batch.back().first_row + batch.back().num_rows;
      on_device.states = states.view(max_rows);
      states.write(batch);
      args.device_batch = &on_device;
      const auto launch_once = [&] {
        ops_->gated_delta(args, pool_);
        return Status();
      };
      if (!records) {
        EXPECT_TRUE(launch_once().ok());
      } else {
        if (num_replay_rows_ == 0 || max_rows > 1 + num_replay_rows_ || max_rows != rows_of_graph) {
          Result<Graph> recorded = Graph::capture(stream_, launch_once);
          EXPECT_TRUE(recorded.ok());
          graph = std::move(*recorded);
        }
        rows_of_graph = max_rows;
        graph->launch(stream_);
      }
      wait();
    }
    return {dtype == DType::kF32 ? out_f32.values() : to_float(out_bf16.values()), recurrent.values(),
            conv.values(), replay.values()};
  }

  Outputs expected(const DeltaCase& c, const std::vector<std::vector<SequenceRows>>& batches,
                   int64_t num_slots) {
    Slots slots = c.slots(num_slots, num_replay_rows_);
    ActBuffer out(DType::kF32, c.tokens, c.columns());
    for (const std::vector<SequenceRows>& batch : batches) c.run(ref_dense_ops(), batch, slots, out, pool_);
    return {out.values(), slots.recurrent, slots.conv, slots.replay};
  }

  // Slots that no sequence has keep their NaN.
  static void expect_near(const std::vector<float>& actual, const std::vector<float>& expected, double most,
                          const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size());
    double squares = 0, difference = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(std::isnan(actual[i]), std::isnan(expected[i])) << what << ", element " << i;
      if (std::isnan(expected[i])) continue;
      squares += double{expected[i]} * expected[i];
      difference += (double{actual[i]} - expected[i]) * (double{actual[i]} - expected[i]);
    }
    EXPECT_LE(std::sqrt(difference), most * std::sqrt(squares)) << what;
  }

  const DenseOps* ops_ = cuda_dense_ops();
  int64_t num_replay_rows_ = 0;  // of each slot
  ThreadPool pool_{2};
  Stream stream_ = std::move(Stream::make()).value();
  StreamScope scope_{stream_};
};

inline std::vector<std::vector<SequenceRows>> cuts(const std::vector<int64_t>& pieces, int32_t slot) {
  std::vector<std::vector<SequenceRows>> batches;
  int64_t at = 0;
  for (const int64_t n : pieces) {
    batches.push_back({{.first_row = at, .num_rows = n, .first_position = at, .slot = slot}});
    at += n;
  }
  return batches;
}

// The heads of one of two ranks.
inline DeltaCase shard(const DeltaCase& c, int rank) {
  DeltaCase part({c.dims.key_heads / 2, c.dims.value_heads / 2, c.dims.dk, c.dims.dv}, c.tokens);
  const int64_t keys = int64_t{part.dims.key_heads} * part.dims.dk, heads = part.dims.value_heads;
  const auto channel = [&](int64_t i) {
    if (i < 2 * keys) return i / keys * 2 * keys + rank * keys + i % keys;
    return 4 * keys + rank * part.columns() + i - 2 * keys;
  };
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t i = 0; i < part.channels(); ++i)
      part.qkv[t * part.qkv_stride() + i] = c.qkv[t * c.qkv_stride() + channel(i)];
    for (int64_t i = 0; i < part.columns(); ++i)
      part.z[t * (part.columns() + 5) + i] = c.z[t * (c.columns() + 5) + rank * part.columns() + i];
    for (int64_t i = 0; i < 2 * heads; ++i)
      part.ba[t * part.ba_stride() + i] =
          c.ba[t * c.ba_stride() + i / heads * 2 * heads + rank * heads + i % heads];
  }
  for (int64_t i = 0; i < part.channels(); ++i)
    for (int tap = 0; tap < c.width; ++tap)
      part.conv_weight[i * c.width + tap] = c.conv_weight[channel(i) * c.width + tap];
  for (int64_t i = 0; i < heads; ++i)
    part.decay[i] = c.decay[rank * heads + i], part.dt_bias[i] = c.dt_bias[rank * heads + i];
  part.norm_weight = c.norm_weight;
  return part;
}

}  // namespace fp4moe
