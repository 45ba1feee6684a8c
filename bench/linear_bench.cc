// The dense linear layer of every ISA: GB/s of weights and GFLOP/s. Rotates through more weights than the
// caches hold, so that decode shapes read DRAM. Arguments: T, N, K, threads.
#include <benchmark/benchmark.h>

#include <random>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int64_t kColdBytes = 256 << 20;

void fill(bf16* data, int64_t n) {
  std::minstd_rand random(1);
  for (int64_t i = 0; i < n; ++i) data[i] = float_to_bf16(static_cast<float>(random() % 2001) / 1000 - 1);
}

void linear(benchmark::State& state, const DenseOps& ops, DType dtype) {
  const int64_t t = state.range(0), n = state.range(1), k = state.range(2);
  ThreadPool pool(static_cast<int>(state.range(3)));
  const int64_t weight_bytes = linear_weight_bytes(n, k, ops.linear_layout);
  const int64_t copies = kColdBytes / weight_bytes + 1;
  Buffer weights = *Buffer::make(weight_bytes * copies), x = *Buffer::make(t * k * 4),
         out = *Buffer::make(t * n * 4);
  fill(weights.as<bf16>(), weight_bytes * copies / 2);
  if (dtype == DType::kBF16)
    fill(x.as<bf16>(), t * k);
  else
    std::fill_n(x.as<float>(), t * k, 0.5f);
  int64_t copy = 0;
  for (auto _ : state) {
    ops.linear({.x = {x.data(), dtype, t, k},
                .weight = weights.data() + copy * weight_bytes,
                .out = out.as<float>(),
                .n = n},
               pool);
    copy = (copy + 1) % copies;
  }
  const auto per_second = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(weight_bytes) * 1e-9, per_second);
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(t * n * k), per_second);
}

// The same with FP8 weights, one scale for 128 x 128 values.
void linear_fp8(benchmark::State& state, const DenseOps& ops) {
  const int64_t t = state.range(0), n = state.range(1), k = state.range(2);
  ThreadPool pool(static_cast<int>(state.range(3)));
  const Fp8Shape shape{n, k, 128, 128};
  const int64_t weight_bytes = fp8_weight_bytes(shape, ops.fp8_layout);
  const std::vector<uint8_t> codes(static_cast<size_t>(n * k), 0x3a);
  const std::vector<float> scales(static_cast<size_t>(((n + 127) / 128) * ((k + 127) / 128)), 0.01f);
  std::vector<Fp8Weight> weights;
  for (int64_t copy = 0; copy <= kColdBytes / weight_bytes; ++copy)
    weights.push_back(*put_fp8_weight(
        [&](Buffer&) -> Result<Fp8LinearView> {
          return Fp8LinearView{codes.data(), scales.data(), 128, 128};
        },
        shape, ops, pool));
  Buffer x = *Buffer::make(t * k * 2), out = *Buffer::make(t * n * 4);
  fill(x.as<bf16>(), t * k);
  size_t copy = 0;
  for (auto _ : state) {
    ops.linear({.x = {x.data(), DType::kBF16, t, k},
                .out = out.as<float>(),
                .n = n,
                .format = LinearFormat::kFp8,
                .fp8 = weights[copy].view},
               pool);
    copy = (copy + 1) % weights.size();
  }
  const auto per_second = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(weight_bytes) * 1e-9, per_second);
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(t * n * k), per_second);
}

void set_sizes(benchmark::internal::Benchmark& bench) {
  bench.UseRealTime()->ArgNames({"T", "N", "K", "threads"});
  for (int64_t t : {1, 2, 4, 8, 12, 32, 128, 512})
    for (int threads : {1, available_cores()}) bench.Args({t, 4096, 2880, threads});
}

void register_all() {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
    if (!isa_available(isa)) continue;
    for (const auto& [quant, dtype] : {std::pair(DenseQuant::kNone, DType::kBF16),
                                       {DenseQuant::kNone, DType::kF32},
                                       {DenseQuant::kQ8, DType::kBF16}}) {
      const DenseOps& ops = cpu_dense_ops(isa, quant);
      auto* bench =
          benchmark::RegisterBenchmark((std::string("linear/") + ops.name + "/" + dtype_name(dtype)).c_str(),
                                       [&ops, dtype = dtype](benchmark::State& s) { linear(s, ops, dtype); });
      set_sizes(*bench);
    }
    const DenseOps& ops = cpu_dense_ops(isa);
    set_sizes(*benchmark::RegisterBenchmark((std::string("linear/") + ops.name + "_fp8/BF16").c_str(),
                                            [&ops](benchmark::State& s) { linear_fp8(s, ops); }));
  }
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) {
  fp4moe::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
