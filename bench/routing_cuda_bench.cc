// The small kernels around a layer's experts on a GPU: norm, gate, choice, all three in one, sort, gather
// into slabs, and the combine alone and with a shared expert. Prints microseconds per call in a CUDA graph of
// calls of one kernel, median of 20 replays, and the time in which the HBM could move the kernel's bytes.
// Consecutive calls overlap as programmatic dependents, as in a model, so the time is that by which the
// kernel delays its successor, not its duration. Hot: all calls use one set of arrays. Cold: the calls rotate
// through more bytes than the L2 holds; printed only for kernels that move at least kMinColdBytes.
//
//   routing_cuda_bench [norm|gate|choose|norm_route|sort|gather|combine|combine_added]...
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cuda_timing.h"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/experts/moe_sort.h"
#include "kernels/cuda/experts/sm90_wide_gemm.h"
#include "kernels/cuda/layout/token_slabs.h"
#include "kernels/cuda/routing/norm_route.h"
#include "kernels/cuda/routing/router.h"
#include "kernels/device_peak.h"

namespace fp4moe {
namespace {

constexpr double kHbmBytesPerUs = 4.3e6;  // measured on an H200
constexpr int64_t kColdBytes = 200'000'000, kMinColdBytes = 2'000'000;

struct Sizes {
  int64_t tokens, hidden, experts, topk;
  int64_t slots() const { return tokens * topk; }
  int64_t slab_rows() const { return num_slab_rows(slots(), 0, experts); }
};

RoutingRule rule_of(const Sizes& s) {
  RoutingRule rule = {.num_experts = s.experts, .top_k = s.topk};
  if (s.experts < 256) return rule;
  rule.norm_top_k = true;
  if (s.hidden < 7168) return rule;               // Qwen3.5
  rule.scoring = RouterScoring::kSigmoidGrouped;  // DeepSeek-V3
  rule.num_groups = 8, rule.top_k_groups = 4;
  rule.scaling_factor = 2.5f;
  return rule;
}

Buffer random_f32(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  uint32_t state = 1;
  for (float& x : values)
    x = static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1;
  return must(Buffer::copy_of(values.data(), n * 4, device_memory()));
}
Buffer random_bf16(int64_t n) {
  Buffer buffer = device_buffer(n * 2);
  sm90_peak_ops()->fill_normal(buffer.as<bf16>(), n, 1);
  return buffer;
}

// One set of arrays. The constructor runs every kernel once, so that each has its real input.
class Layer {
 public:
  explicit Layer(const Sizes& s) : sizes_(s) {
    const std::vector<uint64_t> zeros(static_cast<size_t>(s.experts));
    must(device_memory().upload(num_rows_.data(), &kAllRows, 4));
    must(device_memory().upload(counts_.data(), zeros.data(), counts_.num_bytes()));
    const std::vector<RouterWord> no_words(static_cast<size_t>(kRouterFewTokens * s.experts));
    must(device_memory().upload(words_.data(), no_words.data(), words_.num_bytes()));
    gate(), choose(), sort(), gather();
  }

  void rms_norm() const { cuda::rms_norm_rows(norm_args()); }
  void gate() const { router_gate(router_args()); }
  void choose() const { router_choose(router_args()); }
  bool norm_fits() const {
    const RmsNormArgs norm = norm_args();
    return norm_route_fits(router_args(&norm));
  }
  void norm() const {
    const RmsNormArgs norm = norm_args();
    norm_route(router_args(&norm));
  }
  void sort() const {
    moe_sort({.ids = ids_.as<int32_t>(),
              .num_tokens = sizes_.tokens,
              .topk = sizes_.topk,
              .num_experts = sizes_.experts,
              .rows = rows(),
              .scratch = scratch_.as<int32_t>()});
  }
  void gather() const {
    gather_token_slabs({.x = act_.as<bf16>(),
                        .rows = rows(),
                        .num_experts = sizes_.experts,
                        .num_tokens = sizes_.tokens,
                        .topk = sizes_.topk,
                        .cols = sizes_.hidden,
                        .slabs = slabs_.as<uint8_t>()});
  }

  void combine() const { moe_combine(combine_args()); }
  void combine_added() const {
    MoeCombineArgs args = combine_args();
    args.added = {.rows_bf16 = act_.as<bf16>(), .gate = norm_weight_.as<float>(), .x = x_.as<float>()};
    moe_combine(args);
  }

 private:
  static constexpr int32_t kAllRows = 1 << 30;

  RmsNormArgs norm_args() const {
    return {residual_.as<float>(),
            norm_weight_.as<float>(),
            1e-5f,
            {act_.data(), DType::kBF16, sizes_.tokens, sizes_.hidden},
            x_.as<float>()};
  }
  DeviceRouterArgs router_args(const RmsNormArgs* norm = nullptr) const {
    return {.x = x_.as<float>(),
            .weight = weight_.as<bf16>(),
            .bias = bias_.as<float>(),
            .num_tokens = sizes_.tokens,
            .hidden_size = sizes_.hidden,
            .rule = rule_of(sizes_),
            .logits = logits_.as<float>(),
            .ids = ids_.as<int32_t>(),
            .weights = weights_.as<float>(),
            .count = {counts_.as<uint64_t>(), num_rows_.as<int32_t>()},
            .norm = norm,
            .words = words_.as<RouterWord>()};
  }
  MoeCombineArgs combine_args() const {
    return {.y_bf16 = slabs_.as<bf16>(),  // any values
            .row_of_slot = row_of_slot_.as<int32_t>(),
            .weights = weights_.as<float>(),
            .num_tokens = sizes_.tokens,
            .topk = sizes_.topk,
            .hidden_size = sizes_.hidden,
            .out = residual_.as<float>(),
            .accumulate = true};
  }
  DeviceRows rows() const {
    return {.max_rows = sizes_.slots(),
            .offsets = offsets_.as<int32_t>(),
            .counts = expert_rows_.as<int32_t>(),
            .slot_of_row = slot_of_row_.as<int32_t>(),
            .row_of_slot = row_of_slot_.as<int32_t>(),
            .progress = progress_.as<int32_t>()};
  }

  Sizes sizes_;
  Buffer residual_ = random_f32(sizes_.tokens * sizes_.hidden),
         x_ = random_f32(sizes_.tokens * sizes_.hidden), norm_weight_ = random_f32(sizes_.hidden),
         bias_ = random_f32(sizes_.experts);
  Buffer act_ = random_bf16(sizes_.tokens * sizes_.hidden),
         weight_ = random_bf16(sizes_.experts * sizes_.hidden);
  Buffer logits_ = device_buffer(sizes_.tokens * sizes_.experts * 4),
         ids_ = device_buffer(sizes_.slots() * 4), weights_ = device_buffer(sizes_.slots() * 4),
         counts_ = device_buffer(sizes_.experts * 8), num_rows_ = device_buffer(4);
  Buffer offsets_ = device_buffer((sizes_.experts + 1) * 4), expert_rows_ = device_buffer(sizes_.experts * 4),
         slot_of_row_ = device_buffer(sizes_.slots() * 4), row_of_slot_ = device_buffer(sizes_.slots() * 4),
         progress_ = device_buffer((sizes_.experts + 1) * 4),
         words_ = device_buffer(kRouterFewTokens * sizes_.experts * 8),
         scratch_ = device_buffer(kSortBlocks * sizes_.experts * 4);
  Buffer slabs_ = device_buffer(slabs_bytes(sizes_.slab_rows(), sizes_.hidden * 2));
};

struct Kernel {
  const char* name;
  void (Layer::*call)() const;
  int64_t (*bytes)(const Sizes&);  // from and to the HBM, if the L2 is cold
};
constexpr Kernel kKernels[] = {
    {"norm", &Layer::rms_norm, [](const Sizes& s) { return s.tokens * s.hidden * 10; }},
    {"gate", &Layer::gate,
     [](const Sizes& s) {
       return s.experts * s.hidden * 2 + s.tokens * s.hidden * 4 + s.tokens * s.experts * 4;
     }},
    {"choose", &Layer::choose, [](const Sizes& s) { return s.tokens * s.experts * 4 + s.slots() * 8; }},
    {"norm_route", &Layer::norm,
     [](const Sizes& s) { return s.experts * s.hidden * 2 + s.tokens * s.hidden * 10; }},
    {"sort", &Layer::sort, [](const Sizes& s) { return s.slots() * 12; }},
    {"gather", &Layer::gather, [](const Sizes& s) { return (s.tokens + s.slots()) * s.hidden * 2; }},
    {"combine", &Layer::combine,
     [](const Sizes& s) { return s.slots() * s.hidden * 2 + s.tokens * s.hidden * 8; }},
    {"combine_added", &Layer::combine_added,
     [](const Sizes& s) { return s.slots() * s.hidden * 2 + s.tokens * s.hidden * 14; }},
};

using Layers = std::vector<std::unique_ptr<Layer>>;

void bench(Stream& stream, const Kernel& kernel, const Sizes& s, Layers& layers, bool cold) {
  const int64_t bytes = kernel.bytes(s), copies = cold ? kColdBytes / bytes + 2 : 1;
  while (std::ssize(layers) < copies) layers.push_back(std::make_unique<Layer>(s));
  must(stream.synchronize());
  const double us = median_us(stream, std::max<int64_t>(copies, 20), [&](int64_t i) {
    ((*layers[static_cast<size_t>(i % copies)]).*kernel.call)();
  });
  const auto size = static_cast<double>(bytes);
  std::printf(
      "%-13s H=%-4lld E=%-3lld K=%lld T=%-4lld %-4s %8.2f us %9.3f MB %6.0f GB/s, HBM bound %7.2f us\n",
      kernel.name, static_cast<long long>(s.hidden), static_cast<long long>(s.experts),
      static_cast<long long>(s.topk), static_cast<long long>(s.tokens), cold ? "cold" : "hot", us,
      size * 1e-6, size / us * 1e-3, size / kHbmBytesPerUs);
  std::fflush(stdout);
}

void bench_sizes(Stream& stream, const Sizes& s, std::span<char*> names) {
  Layers layers;
  layers.push_back(std::make_unique<Layer>(s));
  for (const Kernel& kernel : kKernels) {
    if (!names.empty() && !has(names, kernel.name)) continue;
    if (kernel.call == &Layer::norm && !layers[0]->norm_fits()) continue;
    bench(stream, kernel, s, layers, false);
    if (kernel.bytes(s) >= kMinColdBytes) bench(stream, kernel, s, layers, true);
  }
}

int run(std::span<char*> names) {
  BenchGpu gpu;
  Stream& stream = gpu.stream;
  for (const int64_t tokens : {1, 8, 64, 512, 8192}) bench_sizes(stream, {tokens, 2880, 32, 4}, names);
  for (const int64_t tokens : {1, 8, 64, 512, 8192}) bench_sizes(stream, {tokens, 7168, 256, 8}, names);
  for (const int64_t tokens : {1, 2, 4, 16, 64, 512, 2048, 4096, 8192})
    bench_sizes(stream, {tokens, 2048, 256, 8}, names);
  return 0;
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) { return fp4moe::run(std::span(argv, static_cast<size_t>(argc)).subspan(1)); }
