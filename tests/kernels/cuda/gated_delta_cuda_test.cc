// Compares gated_delta and mul_sigmoid on a GPU with the oracle, and checks that a row's bits depend neither
// on cuts nor on other sequences.
#include <algorithm>
#include <numeric>

#include "device/graph.h"
#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/delta_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Outputs {
  std::vector<float> out, recurrent, conv;
  bool operator==(const Outputs& other) const {
    return same_bits(out, other.out) && same_bits(recurrent, other.recurrent) && same_bits(conv, other.conv);
  }
};

class GatedDeltaCuda : public testing::Test {
 protected:
  void wait() {
    const Status status = current_stream().synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
  }

  // Runs batches of sequences one after the other. Sequences past the last of a batch have no rows, as in a
  // padded decode step.
  Outputs run(const DeltaCase& c, const std::vector<std::vector<SequenceRows>>& batches, int64_t num_slots,
              DType dtype = DType::kF32, int64_t num_padding = 2, bool records = false) {
    Slots slots = c.slots(num_slots);
    const DeviceArray<float> qkv(c.qkv), z(c.z), ba(c.ba), conv_weight(c.conv_weight), decay(c.decay),
        dt_bias(c.dt_bias), norm(c.norm_weight), recurrent(slots.recurrent), conv(slots.conv);
    const DeviceArray<float> out_f32(dtype == DType::kF32 ? c.tokens * c.columns() : 0);
    const DeviceArray<bf16> out_bf16(dtype == DType::kBF16 ? c.tokens * c.columns() : 0);
    void* const out = dtype == DType::kF32 ? static_cast<void*>(out_f32.data()) : out_bf16.data();
    GatedDeltaArgs args = c.args(slots, {out, dtype, c.tokens, c.columns()});
    args.qkv = qkv.data(), args.z = z.data(), args.b = ba.data(), args.a = ba.data() + c.dims.value_heads;
    args.conv_weight = conv_weight.data(), args.decay = decay.data(), args.dt_bias = dt_bias.data();
    args.norm_weight = norm.data();
    args.slots = {recurrent.data(), conv.data(), num_slots};
    for (const std::vector<SequenceRows>& batch : batches) {
      std::vector<int32_t> first_row, first_position, sequence_slots;
      for (const SequenceRows& s : batch) {
        first_row.push_back(static_cast<int32_t>(s.first_row));
        first_position.push_back(static_cast<int32_t>(s.first_position));
        sequence_slots.push_back(s.slot);
      }
      const auto count = batch.size() + static_cast<size_t>(num_padding);
      first_row.resize(count + 1, static_cast<int32_t>(batch.back().first_row + batch.back().num_rows));
      first_position.resize(count), sequence_slots.resize(count);
      const DeviceArray<int32_t> rows(first_row), positions(first_position), used_slots(sequence_slots);
      DeviceBatch on_device;
      on_device.num_sequences = static_cast<int64_t>(count);
      on_device.first_row = rows.data();
      on_device.first_position = positions.data();
      on_device.slots = used_slots.data();
      args.device_batch = &on_device;
      const auto launch_once = [&] {
        ops_.gated_delta(args, pool_);
        return Status();
      };
      if (records) {
        const Result<Graph> graph = Graph::capture(stream_, launch_once);
        EXPECT_TRUE(graph.ok());
        graph->launch(stream_);
      } else {
        EXPECT_TRUE(launch_once().ok());
      }
      wait();
    }
    return {dtype == DType::kF32 ? out_f32.values() : to_float(out_bf16.values()), recurrent.values(),
            conv.values()};
  }

  Outputs expected(const DeltaCase& c, const std::vector<std::vector<SequenceRows>>& batches,
                   int64_t num_slots) {
    Slots slots = c.slots(num_slots);
    ActBuffer out(DType::kF32, c.tokens, c.columns());
    for (const std::vector<SequenceRows>& batch : batches) c.run(ref_dense_ops(), batch, slots, out, pool_);
    return {out.values(), slots.recurrent, slots.conv};
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

  const DenseOps& ops_ = *cuda_dense_ops();
  ThreadPool pool_{2};
  Stream stream_ = std::move(Stream::make()).value();
  StreamScope scope_{stream_};
};

std::vector<std::vector<SequenceRows>> cuts(const std::vector<int64_t>& pieces, int32_t slot) {
  std::vector<std::vector<SequenceRows>> batches;
  int64_t at = 0;
  for (const int64_t n : pieces) {
    batches.push_back({{.first_row = at, .num_rows = n, .first_position = at, .slot = slot}});
    at += n;
  }
  return batches;
}

constexpr Dims kDims[] = {{1, 1, 1, 1},     {2, 2, 16, 16},   {1, 4, 24, 40},  {2, 4, 40, 24},
                          {1, 2, 7, 81},    {2, 4, 128, 128}, {1, 8, 64, 128}, {1, 1, 256, 160},
                          {1, 2, 256, 256}, {3, 3, 200, 33},  {2, 2, 5, 256}};

TEST_F(GatedDeltaCuda, EveryShapeIsNearTheOracle) {
  for (const Dims& dims : kDims)
    for (const int width : {1, 2, 4, 8}) {
      const DeltaCase c(dims, 70, 1, width);
      const auto batches = cuts({1, 2, 40, 1, 26}, 1);
      const std::string what =
          std::to_string(dims.dk) + " x " + std::to_string(dims.dv) + ", width " + std::to_string(width);
      const Outputs actual = run(c, batches, 3), wanted = expected(c, batches, 3);
      expect_near(actual.out, wanted.out, 2e-5, what + ", out");
      expect_near(actual.recurrent, wanted.recurrent, 2e-5, what + ", recurrent");
      expect_near(actual.conv, wanted.conv, 0, what + ", conv");
      expect_near(run(c, batches, 3, DType::kBF16).out, wanted.out, 4e-3, what + ", bf16");
    }
}

TEST_F(GatedDeltaCuda, ExtremeDecays) {
  for (const float factor : {1e-7f, 100.0f}) {
    const DeltaCase c({2, 4, 128, 128}, 300, factor);
    const auto batches = cuts({300}, 0);
    expect_near(run(c, batches, 1).out, expected(c, batches, 1).out, 1e-4, std::to_string(factor));
  }
}

TEST_F(GatedDeltaCuda, BitsDependOnNeitherCutsNorOtherSequences) {
  for (const Dims& dims : {Dims{2, 4, 128, 128}, Dims{1, 2, 7, 81}}) {
    const DeltaCase c(dims, 130);
    const Outputs whole = run(c, cuts({130}, 0), 1);
    std::vector<int64_t> ones(130, 1);
    EXPECT_EQ(run(c, cuts(ones, 0), 1), whole);
    for (const int64_t cut : {1, 3, 63, 64, 65, 129})
      EXPECT_EQ(run(c, cuts({cut, 130 - cut}, 0), 1), whole) << cut;
    // Three sequences together, and each alone.
    const std::vector<SequenceRows> together = {{.first_row = 0, .num_rows = 50, .slot = 2},
                                                {.first_row = 50, .num_rows = 0, .slot = 1},
                                                {.first_row = 50, .num_rows = 1, .slot = 4},
                                                {.first_row = 51, .num_rows = 79, .slot = 3}};
    std::vector<std::vector<SequenceRows>> alone;
    for (const SequenceRows& s : together)
      if (s.num_rows > 0) alone.push_back({s});
    const Outputs crowd = run(c, {together}, 6);
    EXPECT_EQ(crowd, run(c, alone, 6, DType::kF32, 0));
    expect_near(crowd.out, expected(c, {together}, 6).out, 2e-5, "several sequences");
    EXPECT_EQ(crowd, run(c, {together}, 6, DType::kF32, 5, /*records=*/true));
  }
}

TEST_F(GatedDeltaCuda, OutputGatesAreThoseOfTheOracle) {
  for (const int64_t tokens : {0, 1, 5}) {
    constexpr int kHeads = 3, kDim = 200;
    Random random(static_cast<uint64_t>(tokens));
    const std::vector<bf16> x = to_bf16(random.normal(tokens * kHeads * kDim));
    const std::vector<float> gate = random.normal(tokens * 1300, 3);
    std::vector<bf16> wanted = x;
    const DeviceArray<bf16> device_x(x);
    const DeviceArray<float> device_gate(gate);
    MulSigmoidArgs args{{wanted.data(), DType::kBF16, tokens, kHeads * kDim},
                        gate.data() + kDim,
                        1300,
                        2 * kDim,
                        kHeads,
                        kDim};
    if (tokens == 0) args.gate = nullptr;
    ref_dense_ops().mul_sigmoid(args, pool_);
    args.x.data = device_x.data();
    args.gate = device_gate.data() + kDim;
    ops_.mul_sigmoid(args, pool_);
    wait();
    const std::vector<float> actual = to_float(device_x.values()), expected = to_float(wanted);
    for (size_t i = 0; i < actual.size(); ++i)
      EXPECT_NEAR(actual[i], expected[i], 8e-3 * std::abs(expected[i])) << i;
  }
}

}  // namespace
}  // namespace fp4moe
