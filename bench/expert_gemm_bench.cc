// gate_up + down of gpt-oss experts (2880 x 2880), one expert after the other, by tokens per expert; w4a4 and
// w4a8 include the quantisation of their inputs. The experts' weights exceed the last-level cache, so runs
// with few tokens measure memory bandwidth, and runs with many tokens measure arithmetic throughput.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 8, kSize = 2880;

struct Experts {
  // Codes are arbitrary; all block scales are equal (MXFP4 2^-7, NVFP4 1/2).
  Experts(const RunnerRow& row, Fp4Format format, const Numerics& numerics, ThreadPool& pool) {
    problem = {kSize, kSize, kExperts, 1, format, {}};
    std::vector<uint8_t> codes(static_cast<size_t>(kSize * kSize / 2));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    const std::vector<uint8_t> scales(static_cast<size_t>(kSize * kSize / fp4_block(format)),
                                      format == Fp4Format::kMxfp4 ? 120 : 0x30);
    const Fp4MatrixView m = {
        format, kSize, kSize, codes.data(), scales.data(), kSize / 2, kSize / fp4_block(format), 1};
    MoeWeightsView weights{format, kSize, kSize, std::vector<ExpertWeightsView>(kExperts)};
    for (ExpertWeightsView& w : weights.experts) w.gate = w.up = w.down = m;
    packed = std::move(*row.pack(row, problem, numerics, weights, pool));
  }
  MoeProblem problem;
  PackedExperts packed;
};

void expert_gemm(benchmark::State& state, const RunnerRow& row, Fp4Format format, const Numerics& numerics) {
  ThreadPool pool(static_cast<int>(state.range(1)));
  const Experts experts(row, format, numerics, pool);
  const int64_t tokens = state.range(0), rows = kExperts * tokens;
  std::vector<int64_t> offsets;
  for (int64_t e = 0; e <= kExperts; ++e) offsets.push_back(e * tokens);
  std::vector<bf16> x(static_cast<size_t>(rows * kSize), float_to_bf16(0.01f));
  std::vector<float> y(x.size());
  const ExpertBatch batch{.num_experts = kExperts,
                          .offsets = offsets.data(),
                          .x = {x.data(), DType::kBF16, rows, kSize},
                          .y = y.data()};
  Arena scratch = std::move(*Arena::make(row.scratch_bytes(experts.problem, numerics, rows)));
  for (auto _ : state) {
    scratch.reset();
    row.run(row, {experts.problem, experts.packed, batch}, scratch, pool);
    benchmark::ClobberMemory();
  }
  const double runs = static_cast<double>(state.iterations());
  const double bytes =
      static_cast<double>(experts.packed.gate_up.num_bytes() + experts.packed.down.num_bytes());
  const double flops = 2.0 * 3 * static_cast<double>(rows * kSize * kSize);
  state.counters["weight_GB/s"] = benchmark::Counter(runs * bytes / 1e9, benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] = benchmark::Counter(runs * flops / 1e9, benchmark::Counter::kIsRate);
}

void register_one(const RunnerRow& row, Fp4Format format, const Numerics& numerics) {
  const std::string name = std::string("expert_gemm/") + row.name + "/" + fp4_format_name(format) + "/" +
                           scheme_name(numerics.scheme);
  auto* bench = benchmark::RegisterBenchmark(name.c_str(), [&row, format, numerics](benchmark::State& state) {
    expert_gemm(state, row, format, numerics);
  });
  bench->ArgNames({"tokens_per_expert", "threads"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  for (int64_t tokens : {1, 2, 4, 8, 12, 48, 192})
    for (int threads : {1, available_cores()}) bench->Args({tokens, threads});
}

// Registers one benchmark per combination of table row that this CPU supports, format, scheme, tokens per
// expert and thread count.
void register_all() {
  const Numerics w4a8 = {.scheme = Scheme::kW4A8};
  const Numerics w4a4 = {Scheme::kW4A4, ActScaleChoice::kPerToken, ActScaleChoice::kPerToken};
  for (const RunnerRow& row : runner_rows()) {
    if (!isa_available(row.isa) || std::string(row.name) == "ref") continue;
    for (Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
      register_one(row, format, {});
      register_one(row, format, w4a8);
      if (format == Fp4Format::kNvfp4) register_one(row, format, w4a4);
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
