// Compares gated_delta, by the recurrence and in chunks, and mul_sigmoid on a GPU with the oracle, and checks
// which cuts change bits; other sequences never do.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/delta_on_gpu.h"

namespace fp4moe {
namespace {

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

TEST_F(GatedDeltaCuda, BitsOfTheRecurrenceDependOnNeitherCutsNorOtherSequences) {
  ops_ = cuda_invariant_dense_ops();
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

// A head's columns are cut into 4, 2 or 1 blocks, depending on the number of sequences.
TEST_F(GatedDeltaCuda, StepsHaveTheSameBitsForEveryNumberOfSequences) {
  ops_ = cuda_invariant_dense_ops();
  for (const int64_t n : {2, 4, 7}) {
    const DeltaCase c({16, 32, 128, 128}, 4 * n);
    std::vector<SequenceRows> prompts, steps;
    for (int64_t i = 0; i < n; ++i) {
      const auto slot = static_cast<int32_t>(i + 1);
      prompts.push_back({.first_row = 3 * i, .num_rows = 3, .slot = slot});
      steps.push_back({.first_row = 3 * n + i, .num_rows = 1, .first_position = 3, .slot = slot});
    }
    std::vector<std::vector<SequenceRows>> apart = {prompts};
    for (const SequenceRows& step : steps) apart.push_back({step});
    const Outputs together = run(c, {prompts, steps}, n + 1, DType::kF32, 0);
    EXPECT_EQ(together, run(c, apart, n + 1, DType::kF32, 0)) << n;
    EXPECT_EQ(together, run(c, {prompts, steps}, n + 1, DType::kF32, 9)) << n;
    expect_near(together.out, expected(c, {prompts, steps}, n + 1).out, 2e-5, std::to_string(n));
  }
}

// Steps of decode: batches of all sequences, and the same rows one by one. Some sequences have no rows in a
// step, and some start anew.
struct Steps {
  std::vector<std::vector<SequenceRows>> together, apart;
  int64_t num_rows = 0;

  explicit Steps(int64_t num_sequences) {
    constexpr int64_t kSteps = 4;
    std::vector<int64_t> positions(static_cast<size_t>(num_sequences), 0);
    for (int64_t step = 0; step < kSteps; ++step) {
      together.emplace_back();
      for (int64_t i = 0; i < num_sequences; ++i) {
        int64_t& position = positions[static_cast<size_t>(i)];
        if ((i + step) % 7 == 0) position = 0;
        together.back().push_back({.first_row = num_rows,
                                   .num_rows = (i + step) % 5 == 0 ? 0 : 1,
                                   .first_position = position,
                                   .slot = static_cast<int32_t>(i + 1)});
        if (together.back().back().num_rows == 0) continue;
        apart.push_back({together.back().back()});
        ++num_rows, ++position;
      }
    }
  }
};

// Up to 8 sequences: fewer key heads of sequences than SMs, with a head in one block if it has others beside
// it. 40: more, so that an SM has several, one after the other.
TEST_F(GatedDeltaCuda, StepsOfManySequencesHaveTheSameBits) {
  ops_ = cuda_invariant_dense_ops();
  for (const int64_t n : {5, 7, 40}) {
    const Steps steps(n);
    const int64_t padding = n < 40 ? 1 : 9;
    for (const Dims& dims : {Dims{16, 32, 128, 128}, Dims{24, 24, 128, 128}, Dims{4, 32, 128, 128}}) {
      const DeltaCase c(dims, steps.num_rows);
      const std::string what = std::to_string(n) + " sequences, " + std::to_string(dims.key_heads) + " and " +
                               std::to_string(dims.value_heads) + " heads";
      const Outputs of_all = run(c, steps.together, n + 1, DType::kF32, 0);
      EXPECT_EQ(of_all, run(c, steps.apart, n + 1, DType::kF32, 0)) << what;
      EXPECT_EQ(of_all, run(c, steps.together, n + 1, DType::kF32, padding, /*records=*/true)) << what;
      expect_near(of_all.out, expected(c, steps.together, n + 1).out, 2e-5, what);
      ASSERT_FALSE(HasFailure()) << what;
    }
  }
}

// Heads that run in chunks if a sequence has enough rows.
constexpr Dims kChunkDims[] = {{1, 1, 128, 128}, {1, 2, 128, 128}, {2, 6, 128, 128}, {1, 8, 128, 128}};

TEST_F(GatedDeltaCuda, ChunksOfEveryLengthAreNearTheOracle) {
  for (const Dims& dims : kChunkDims)
    for (const int64_t rows : {1, 31, 32, 63, 64, 65, 127, 128, 200, 513}) {
      const DeltaCase c(dims, rows);
      const std::string what = std::to_string(dims.value_heads) + " heads, " + std::to_string(rows) + " rows";
      const Outputs actual = run(c, cuts({rows}, 1), 2), wanted = expected(c, cuts({rows}, 1), 2);
      expect_near(actual.out, wanted.out, 2e-5, what + ", out");
      expect_near(actual.recurrent, wanted.recurrent, 2e-5, what + ", recurrent");
      expect_near(actual.conv, wanted.conv, 0, what + ", conv");
    }
}

TEST_F(GatedDeltaCuda, ChunksOfAlignedRowsHaveTheSameBits) {
  for (const int width : {1, 2, 4, 8}) {
    const DeltaCase c({1, 2, 128, 128}, 200, 1, width);
    DeltaCase aligned = c;
    aligned.gap = 4;
    aligned.qkv.assign(static_cast<size_t>(c.tokens * aligned.qkv_stride()), 0);
    for (int64_t t = 0; t < c.tokens; ++t)
      std::copy_n(c.qkv.begin() + t * c.qkv_stride(), c.channels(),
                  aligned.qkv.begin() + t * aligned.qkv_stride());
    for (const auto& batches : {cuts({200}, 0), cuts({40, 160}, 0)})
      EXPECT_EQ(run(aligned, batches, 1), run(c, batches, 1)) << width;
  }
}

TEST_F(GatedDeltaCuda, CutsOfChunks) {
  const DeltaCase c({1, 2, 128, 128}, 230);
  const Outputs wanted = expected(c, cuts({230}, 0), 1), whole = run(c, cuts({230}, 0), 1);
  for (int64_t cut = 1; cut < 230; ++cut) {
    if (cut % 64 > 5 && cut % 64 < 59 && cut % 16 != 0) continue;
    const Outputs pieces = run(c, cuts({cut, 230 - cut}, 0), 1);
    expect_near(pieces.out, wanted.out, 2e-5, "cut at " + std::to_string(cut));
    expect_near(pieces.recurrent, wanted.recurrent, 2e-5, "state, cut at " + std::to_string(cut));
    expect_near(pieces.conv, wanted.conv, 0, "conv inputs, cut at " + std::to_string(cut));
    if (cut % 64 == 0) {
      EXPECT_EQ(pieces, whole) << cut;
    }
  }
  EXPECT_EQ(run(c, cuts({64, 64, 64, 38}, 0), 1), whole);
}

TEST_F(GatedDeltaCuda, PassesBesideEachOtherHaveTheBitsOfSinglePasses) {
  // Enough heads to fill a GPU, in four passes: kernels of different passes run at once, and reuse workspace.
  const DeltaCase c({16, 32, 128, 128}, 6500);
  const Outputs whole = run(c, cuts({6500}, 0), 1);
  EXPECT_EQ(whole, run(c, cuts({1024, 1024, 1024, 1024, 1024, 1024, 356}, 0), 1));
  EXPECT_EQ(whole, run(c, cuts({6500}, 0), 1));
}

TEST_F(GatedDeltaCuda, ChunksOfExtremeGates) {
  DeltaCase c({1, 2, 128, 128}, 300);
  for (int64_t t = 0; t < c.tokens; t += 7)  // forget all, between rows that forget little
    for (int head = 0; head < 2; ++head) c.ba[static_cast<size_t>(t * c.ba_stride() + 2 + head)] = 1e6f;
  expect_near(run(c, cuts({300}, 0), 1).out, expected(c, cuts({300}, 0), 1).out, 2e-5, "sudden decays");
  for (int64_t t = 0; t < c.tokens; ++t)  // forget nothing
    for (int head = 0; head < 2; ++head) c.ba[static_cast<size_t>(t * c.ba_stride() + 2 + head)] = -100;
  expect_near(run(c, cuts({300}, 0), 1).recurrent, expected(c, cuts({300}, 0), 1).recurrent, 2e-5,
              "no decay");
}

TEST_F(GatedDeltaCuda, ChunksKeepTheirPrecisionOverLongPrompts) {
  for (const float factor : {1.0f, 0.01f}) {
    const DeltaCase c({1, 1, 128, 128}, 8192, factor);
    const Outputs actual = run(c, cuts({8192}, 0), 1), wanted = expected(c, cuts({8192}, 0), 1);
    expect_near(actual.out, wanted.out, 2e-5, "out");
    expect_near(actual.recurrent, wanted.recurrent, 2e-5, "recurrent");
  }
}

TEST_F(GatedDeltaCuda, ChunksOfLargeBatchesDoNotDependOnOtherSequences) {
  // Sequences of the recurrence among those of chunks, which begin anywhere in a chunk; more than one pass.
  const DeltaCase c({1, 2, 128, 128}, 5000);
  const std::vector<int64_t> rows = {1, 700, 31, 32, 1, 3000, 2, 64, 1169};
  std::vector<SequenceRows> first, all;
  std::vector<std::vector<SequenceRows>> alone;
  int64_t at = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t position = i % 3 == 0 ? 0 : static_cast<int64_t>(i) * 13 % 32;
    const auto slot = static_cast<int32_t>(i + 1);
    if (position > 0) first.push_back({.first_row = at, .num_rows = position, .slot = slot});
    all.push_back({.first_row = at, .num_rows = rows[i], .first_position = position, .slot = slot});
    alone.push_back({all.back()});
    at += rows[i];
  }
  for (const SequenceRows& s : first) ASSERT_LE(s.first_row + s.num_rows, c.tokens);
  std::vector<std::vector<SequenceRows>> before;
  for (const SequenceRows& s : first) before.push_back({s});
  auto together = before, apart = before;
  together.push_back(all);
  apart.insert(apart.end(), alone.begin(), alone.end());
  const Outputs crowd = run(c, together, 11);
  EXPECT_EQ(crowd, run(c, apart, 11, DType::kF32, 0));
  EXPECT_EQ(crowd, run(c, together, 11, DType::kF32, 40, /*records=*/true));
  const Outputs wanted = expected(c, together, 11);
  expect_near(crowd.out, wanted.out, 2e-5, "out");
  expect_near(crowd.recurrent, wanted.recurrent, 2e-5, "recurrent");
  expect_near(crowd.conv, wanted.conv, 0, "conv");
}

TEST_F(GatedDeltaCuda, AShardOfHeadsHasTheBitsOfTheWhole) {
  const DeltaCase c({2, 4, 128, 128}, 150);
  const Outputs whole = run(c, cuts({150}, 0), 1);
  for (const int rank : {0, 1}) {
    const DeltaCase part = shard(c, rank);
    const Outputs actual = run(part, cuts({150}, 0), 1);
    std::vector<float> out, recurrent;
    for (int64_t t = 0; t < c.tokens; ++t)
      out.insert(out.end(), whole.out.begin() + t * c.columns() + rank * part.columns(),
                 whole.out.begin() + t * c.columns() + (rank + 1) * part.columns());
    recurrent.assign(whole.recurrent.begin() + rank * part.state_size(),
                     whole.recurrent.begin() + (rank + 1) * part.state_size());
    EXPECT_TRUE(same_bits(actual.out, out)) << rank;
    EXPECT_TRUE(same_bits(actual.recurrent, recurrent)) << rank;
  }
}

TEST_F(GatedDeltaCuda, OutputGatesAreThoseOfTheOracle) {
  for (const auto& [tokens, dim] : {std::pair<int64_t, int>{0, 200}, {1, 200}, {5, 200}, {9, 256}, {4, 51}}) {
    constexpr int kHeads = 3, kStride = 2048;
    Random random(static_cast<uint64_t>(tokens));
    const std::vector<bf16> x = to_bf16(random.normal(tokens * kHeads * dim));
    const std::vector<float> gate = random.normal(tokens * kStride, 3);
    std::vector<bf16> wanted = x;
    const DeviceArray<bf16> device_x(x);
    const DeviceArray<float> device_gate(gate);
    MulSigmoidArgs args{{wanted.data(), DType::kBF16, tokens, kHeads * dim},
                        gate.data() + dim,
                        kStride,
                        2 * dim,
                        kHeads,
                        dim};
    if (tokens == 0) args.gate = nullptr;
    ref_dense_ops().mul_sigmoid(args, pool_);
    args.x.data = device_x.data();
    args.gate = device_gate.data() + dim;
    ops_->mul_sigmoid(args, pool_);
    wait();
    const std::vector<float> actual = to_float(device_x.values()), expected = to_float(wanted);
    for (size_t i = 0; i < actual.size(); ++i)
      EXPECT_NEAR(actual[i], expected[i], 8e-3 * std::abs(expected[i])) << i;
  }
}

}  // namespace
}  // namespace fp4moe
