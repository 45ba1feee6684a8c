// The gated delta net of every ISA, with the dims of Qwen3.5-35B-A3B: GB/s of states (read and written) and
// GFLOP/s of the recurrence. Slots exceed the last-level cache, so that decode reads states from memory.
// Arguments: rows per sequence, sequences, threads.
#include <benchmark/benchmark.h>

#include <random>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int64_t kColdBytes = 256 << 20, kKeyHeads = 16, kValueHeads = 32, kDim = 128, kConvWidth = 4;
constexpr int64_t kStateSize = kValueHeads * kDim * kDim, kColumns = kValueHeads * kDim;
constexpr int64_t kChannels = 2 * kKeyHeads * kDim + kColumns;
constexpr int64_t kInputs = kChannels + kColumns + 2 * kValueHeads;  // of a row, from one projection

std::vector<float> random_values(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  std::minstd_rand random(1);
  for (float& x : values) x = static_cast<float>(random() % 2001) / 1000 - 1;
  return values;
}

// Sequences of `rows` rows, behind other rows; each call uses the least recently used slots.
struct Sequences {
  Sequences(int64_t rows, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      sequences.push_back({.first_row = i * rows, .num_rows = rows, .first_position = 64});
  }
  void advance(int64_t num_slots) {
    for (SequenceRows& s : sequences) s.slot = static_cast<int32_t>((next_slot++) % num_slots);
  }
  std::vector<SequenceRows> sequences;
  int64_t next_slot = 0;
};

void gated_delta(benchmark::State& state, const DenseOps& ops) {
  const int64_t rows = state.range(0), batch = state.range(1), tokens = rows * batch;
  ThreadPool pool(static_cast<int>(state.range(2)));
  const int64_t num_slots = kColdBytes / (kStateSize * 4) + batch;
  const std::vector<float> inputs = random_values(tokens * kInputs), weights = random_values(kChannels * 4);
  const std::vector<float> decay(kValueHeads, -0.5f), norm(kDim, 1);
  std::vector<float> recurrent = random_values(num_slots * kStateSize),
                     conv = random_values(num_slots * kChannels * (kConvWidth - 1));
  std::vector<bf16> out(static_cast<size_t>(tokens * kColumns));
  Sequences sequences(rows, batch);
  GatedDeltaArgs args{.qkv = inputs.data(),
                      .z = inputs.data() + kChannels,
                      .b = inputs.data() + kChannels + kColumns,
                      .a = inputs.data() + kChannels + kColumns + kValueHeads,
                      .qkv_stride = kInputs,
                      .z_stride = kInputs,
                      .ba_stride = kInputs,
                      .conv_weight = weights.data(),
                      .decay = decay.data(),
                      .dt_bias = weights.data(),
                      .norm_weight = norm.data(),
                      .eps = 1e-6f,
                      .num_key_heads = kKeyHeads,
                      .num_value_heads = kValueHeads,
                      .key_head_dim = kDim,
                      .value_head_dim = kDim,
                      .conv_width = kConvWidth,
                      .slots = {recurrent.data(), conv.data(), num_slots},
                      .sequences = sequences.sequences,
                      .out = {out.data(), DType::kBF16, tokens, kColumns}};
  for (auto _ : state) {
    sequences.advance(num_slots);
    ops.gated_delta(args, pool);
    benchmark::ClobberMemory();
  }
  const auto per_second = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["state_GB/s"] =
      benchmark::Counter(8e-9 * static_cast<double>(batch * kStateSize), per_second);
  state.counters["GFLOP/s"] = benchmark::Counter(8e-9 * static_cast<double>(tokens * kStateSize), per_second);
}

void register_all() {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (!isa_available(isa)) continue;
    const DenseOps& ops = cpu_dense_ops(isa);
    auto* bench = benchmark::RegisterBenchmark((std::string("gated_delta/") + ops.name).c_str(),
                                               [&ops](benchmark::State& s) { gated_delta(s, ops); });
    bench->UseRealTime()->ArgNames({"rows", "sequences", "threads"});
    for (int threads : {1, available_cores()}) {
      for (int64_t sequences : {1, 4, 32}) bench->Args({1, sequences, threads});
      for (int64_t rows : {4, 16, 64, 512}) bench->Args({rows, 1, threads});
    }
  }
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) {
  fp4moe::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
