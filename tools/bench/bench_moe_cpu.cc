// fp4moe bench moe on a CPU: measures the runner and transport that a decoder layer calls on one rank.
//
// A point is 2 to 16 calls of a layer, each with a different routing draw, run once as warm-up and then
// `repeats` times; a row has the median, p10 and p90 of a call. The copies of the layer's weights fill the
// cold bytes (by default four times the last-level cache), and each call uses the least recently used
// experts. All copies are therefore read before any weight is read again, so weights come from memory.
//
// roofline = max(weight bytes of the active experts / read rate, flops / this run's measured dot-product
// rate). The read rate is the faster of two read tests, right before and right after a point's calls, because
// memory has fast and slow states that change within seconds.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <list>
#include <memory>
#include <random>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/run_ranges.h"
#include "bench/bench_cpu.h"
#include "bench/bench_moe.h"
#include "engine/startup/memory_plan.h"
#include "moe/routed_experts.h"
#include "moe/transport/transport.h"

namespace fp4moe {
namespace {

struct CpuPoint : MoePoint {
  double read_gbps, read_gbps_slower;  // the faster and slower of the two read tests
  double dot_gflops;

  double gbps() const { return weight_bytes / us.median * 1e-3; }
  double gflops() const { return flops / us.median * 1e-3; }
};

// State shared by all points of one run.
struct CpuRun {
  const MoeBench& bench;
  ThreadPool& pool;
  ReadTest& read;
  int64_t cold_bytes;
  double dot_gflops;  // rate of the scheme's dot products
};

// Plans the shape's local experts as all experts of a model on one rank.
Result<MoePlan> plan_of(const MoeBench& bench, const MoeShape& shape) {
  return plan_moe({.hidden_size = shape.hidden_size,
                   .intermediate_size = shape.intermediate_size,
                   .num_experts = shape.num_local,
                   .top_k = shape.topk,
                   .format = bench.format,
                   .activation = shape.activation},
                  {.fp4_compute = bench.options.scheme});
}

int64_t most_tokens(const MoeBench& bench) {
  return *std::max_element(bench.tokens.begin(), bench.tokens.end());
}

double layer_bytes(const MoeBench& bench, const MoeShape& shape) {
  return moe_weight_bytes(shape, bench.format, static_cast<double>(shape.num_local));
}

int64_t copies_of(const MoeBench& bench, const MoeShape& shape, int64_t cold_bytes) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(cold_bytes) / layer_bytes(bench, shape)));
}

// Checks that weights, scratch and the read test fit in the available memory; call it before allocating.
Status check_memory(const MoeBench& bench, const MoeShape& shape, int64_t cold_bytes) {
  const int64_t copies = copies_of(bench, shape, cold_bytes);
  const double weights = static_cast<double>(copies) * layer_bytes(bench, shape);
  FP4MOE_ASSIGN_OR_RETURN(const MoePlan plan, plan_of(bench, shape));
  FP4MOE_ASSIGN_OR_RETURN(const auto transport, make_transport(plan, {.max_group_rows = most_tokens(bench)}));
  const int64_t scratch =
      transport->scratch_bytes() +
      plan.runner()->scratch_bytes(plan.problem(), plan.numerics(), transport->max_batch_rows());
  const int64_t needed = static_cast<int64_t>(1.01 * weights) + scratch + cold_bytes;
  const int64_t available = available_memory_bytes();
  if (needed <= available) return {};
  const std::string advice =
      copies > 1 ? "; use --cold-mib below " + std::to_string(cold_bytes >> 20) + " or another --shape"
                 : "; use another --shape or smaller --tokens";
  return does_not_fit(fmt::format(
      "{} copies of the layer's weights ({}), scratch for T={} ({}) and the read test ({}) need {}, but only "
      "{} are available{}",
      copies, size_string(static_cast<int64_t>(weights)), most_tokens(bench), size_string(scratch),
      size_string(cold_bytes), size_string(needed), size_string(available), advice));
}

// One expert of random codes with scales of 2^-8 to 2^-5 (MXFP4) or below 2^-4 (NVFP4). All experts are
// copies of it, because times do not depend on the values.
class RandomExpert {
 public:
  RandomExpert(const MoeShape& shape, Fp4Format format) : random_(1) {
    view_.gate = matrix(format, shape.intermediate_size, shape.hidden_size);
    view_.up = matrix(format, shape.intermediate_size, shape.hidden_size);
    view_.down = matrix(format, shape.hidden_size, shape.intermediate_size);
    layer_ = {format, shape.hidden_size, shape.intermediate_size,
              std::vector<ExpertWeightsView>(static_cast<size_t>(shape.num_local), view_)};
  }
  RandomExpert(const RandomExpert&) = delete;
  RandomExpert& operator=(const RandomExpert&) = delete;

  const MoeWeightsView& layer() const { return layer_; }

 private:
  Fp4MatrixView matrix(Fp4Format format, int64_t rows, int64_t cols) {
    const int block = fp4_block(format);
    std::vector<uint8_t>& codes = bytes_.emplace_back(static_cast<size_t>(rows * cols / 2));
    for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random_());
    std::vector<uint8_t>& scales = bytes_.emplace_back(static_cast<size_t>(rows * cols / block));
    for (uint8_t& byte : scales)
      byte = static_cast<uint8_t>(format == Fp4Format::kMxfp4 ? 119 + random_() % 4 : 1 + random_() % 0x17);
    return {format, rows, cols, codes.data(), scales.data(), cols / 2, cols / block, 1.0f};
  }

  std::mt19937 random_;
  std::list<std::vector<uint8_t>> bytes_;
  ExpertWeightsView view_;
  MoeWeightsView layer_;
};

// Copies of one layer, whose experts are used in rotation.
class ColdLayers {
 public:
  static Result<ColdLayers> make(const CpuRun& run, const MoeShape& shape, const MoePlan& plan) {
    ColdLayers layers;
    const RandomExpert expert(shape, run.bench.format);
    for (int64_t c = 0; c < copies_of(run.bench, shape, run.cold_bytes); ++c) {
      FP4MOE_ASSIGN_OR_RETURN(RoutedExperts copy, RoutedExperts::make(plan, expert.layer(), run.pool));
      layers.copies_.push_back({std::move(copy), 0});
    }
    return layers;
  }

  // Returns the layer for the next call and renumbers the draw's experts, so that the call uses the layer's
  // least recently used experts.
  const RoutedExperts& take(const MoeShape& shape, RoutingDraw& draw) {
    Copy& copy = copies_[next_++ % copies_.size()];
    rename_experts(shape, copy.first_expert, draw);
    copy.first_expert = (copy.first_expert + draw.active_experts) % shape.num_local;
    return copy.experts;
  }
  const RoutedExperts& any() const { return copies_.front().experts; }

 private:
  struct Copy {
    RoutedExperts experts;
    int64_t first_expert;  // for the next call
  };
  std::vector<Copy> copies_;
  size_t next_ = 0;
};

// The memory for calls of one shape, except weights.
struct LayerMemory {
  std::unique_ptr<Transport> transport;
  Arena scratch;
  Buffer x, out;

  static Result<LayerMemory> make(const CpuRun& run, const MoePlan& plan, const RoutedExperts& experts) {
    const int64_t tokens = most_tokens(run.bench), elems = tokens * plan.problem().hidden_size;
    LayerMemory memory;
    FP4MOE_ASSIGN_OR_RETURN(memory.transport, make_transport(plan, {.max_group_rows = tokens}));
    FP4MOE_ASSIGN_OR_RETURN(memory.scratch, Arena::make(memory.transport->scratch_bytes() +
                                                        experts.round_bytes(*memory.transport)));
    FP4MOE_ASSIGN_OR_RETURN(memory.x, Buffer::make(elems * int64_t{sizeof(bf16)}));
    FP4MOE_ASSIGN_OR_RETURN(memory.out, Buffer::make(elems * int64_t{sizeof(float)}));
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < elems; ++i) memory.x.as<bf16>()[i] = float_to_bf16(normal(random));
    return memory;
  }
};

// Returns the draw's ids relative to the shape's first expert; -1 for experts that are not local.
std::vector<int32_t> local_ids(const MoeShape& shape, const RoutingDraw& draw) {
  std::vector<int32_t> ids;
  for (const int32_t id : draw.ids) {
    const int64_t local = id - shape.first_expert;
    ids.push_back(local >= 0 && local < shape.num_local ? static_cast<int32_t>(local) : -1);
  }
  return ids;
}

// Runs one call; returns its microseconds.
Result<double> time_call(const CpuRun& run, const MoeShape& shape, ColdLayers& layers, LayerMemory& memory,
                         RoutingDraw draw) {
  constexpr int64_t kRowsPerChunk = 32;
  const int64_t tokens = static_cast<int64_t>(draw.ids.size()) / shape.topk, h = shape.hidden_size;
  const RoutedExperts& experts = layers.take(shape, draw);
  const std::vector<int32_t> ids = local_ids(shape, draw);
  const auto start = std::chrono::steady_clock::now();
  memory.scratch.reset();
  FP4MOE_RETURN_IF_ERROR(memory.transport->begin({.group_rows = tokens,
                                                  .x = {memory.x.data(), DType::kBF16, tokens, h},
                                                  .ids = ids.data(),
                                                  .weights = draw.weights.data()},
                                                 memory.scratch, run.pool));
  float* const out = memory.out.as<float>();
  run_ranges(run.pool, tokens, kRowsPerChunk,
             [&](int64_t first, int64_t last) { std::fill(out + first * h, out + last * h, 0.0f); });
  FP4MOE_RETURN_IF_ERROR(experts.run_experts(out, *memory.transport, memory.scratch, run.pool));
  const auto end = std::chrono::steady_clock::now();
  double sum = 0;
  for (int64_t i = 0; i < tokens * h; ++i) sum += std::abs(static_cast<double>(out[i]));
  FP4MOE_RETURN_IF_ERROR(check_magnitude(sum, draw));
  return std::chrono::duration<double, std::micro>(end - start).count();
}

Result<CpuPoint> measure_point(const CpuRun& run, const MoeShape& shape, ColdLayers& layers,
                               LayerMemory& memory, int64_t num_tokens) {
  const PointDraws draws = draw_point(run.bench, shape, num_tokens, calls_of(run.bench, shape, num_tokens));
  const auto mean_us = [&]() -> Result<double> {
    double sum = 0;
    for (const RoutingDraw& draw : draws.draws) {
      FP4MOE_ASSIGN_OR_RETURN(const double us, time_call(run, shape, layers, memory, draw));
      sum += us;
    }
    return sum / static_cast<double>(draws.draws.size());
  };
  FP4MOE_RETURN_IF_ERROR(mean_us().status());
  const double before = run.read.gbps();
  std::vector<double> means;
  for (int r = 0; r < run.bench.options.repeats; ++r) {
    FP4MOE_ASSIGN_OR_RETURN(const double us, mean_us());
    means.push_back(us);
  }
  const double after = run.read.gbps(), faster = std::max(before, after);
  return CpuPoint{make_point(run.bench, shape, num_tokens, draws, spread_of(means), {faster, run.dot_gflops}),
                  faster, std::min(before, after), run.dot_gflops};
}

nlohmann::ordered_json to_json(const CpuRun& run, const std::string& runner, const CpuPoint& p) {
  nlohmann::ordered_json row = moe_row(run.bench, p);
  row["kernels"] = runner;
  row["threads"] = run.pool.num_threads();
  row["cold_bytes"] = run.cold_bytes;
  row["read_gbps"] = p.read_gbps;
  row["read_gbps_slower"] = p.read_gbps_slower;
  row["dot_gflops"] = p.dot_gflops;
  row["gbps"] = p.gbps();
  row["gflops"] = p.gflops();
  return row;
}

void print_row(const CpuPoint& p) {
  fmt::print("{} {:.1f} | {:.1f} | {:.0f} | {:.0f} % |\n", moe_cells(p), p.gbps(), p.read_gbps, p.gflops(),
             100 / p.multiple());
  std::fflush(stdout);
}

Status measure_shape(const CpuRun& run, const MoeShape& shape, nlohmann::ordered_json& rows) {
  FP4MOE_ASSIGN_OR_RETURN(const MoePlan plan, plan_of(run.bench, shape));
  FP4MOE_ASSIGN_OR_RETURN(ColdLayers layers, ColdLayers::make(run, shape, plan));
  FP4MOE_ASSIGN_OR_RETURN(LayerMemory memory, LayerMemory::make(run, plan, layers.any()));
  for (const int64_t t : run.bench.tokens) {
    const auto point = measure_point(run, shape, layers, memory, t);
    if (!point.ok()) return point.status().with_context("T=" + std::to_string(t));
    if (run.bench.options.json) {
      rows.push_back(to_json(run, runner_name(plan), *point));
    } else {
      print_row(*point);
    }
  }
  return {};
}

// Refuses flags that apply only to GPUs.
Status check_options(const MoeBenchOptions& options) {
  if (options.tactic != "auto")
    return unsupported("--tactic " + options.tactic + " is supported only with --device cuda");
  if (!options.peers.empty())
    return unsupported("--peers " + options.peers + " is supported only with --device cuda");
  return {};
}

void print_header(const CpuRun& run, const CpuDot& dot, const MoePlan& plan) {
  const MoeBenchOptions& options = run.bench.options;
  fmt::print("machine: {}\n", describe_cpu(run.pool.num_threads()));
  fmt::print(
      "limits: memory read rate measured for each row; {:.0f} GFLOP/s ({}); {} between reads of the same "
      "weights\n",
      run.dot_gflops, dot.name, size_string(run.cold_bytes));
  fmt::print("layer: {} {}, {} routing, kernels {}\n\n", fp4_format_name(run.bench.format), options.scheme,
             options.routing, runner_name(plan));
  fmt::print("{}", moe_header(" GB/s | read GB/s | GFLOP/s | of the roofline |", 4));
}

}  // namespace

Status bench_moe_cpu(const MoeBench& bench) {
  const MoeBenchOptions& options = bench.options;
  FP4MOE_RETURN_IF_ERROR(check_options(options));
  const int64_t cold = cold_bytes(options.cold_mib);
  for (const MoeShape& shape : bench.shapes) {
    if (Status s = check_memory(bench, shape, cold); !s.ok()) return s.with_context(shape.name);
  }
  FP4MOE_ASSIGN_OR_RETURN(const MoePlan plan, plan_of(bench, bench.shapes.front()));
  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  FP4MOE_ASSIGN_OR_RETURN(ReadTest read, ReadTest::make(cold, pool));
  const CpuDot& dot = options.scheme == "w4a8" ? widest_ops().int8 : widest_ops().bf16;
  const CpuRun run{.bench = bench,
                   .pool = pool,
                   .read = read,
                   .cold_bytes = cold,
                   .dot_gflops = measure_dots(dot, options.repeats, pool).best};
  if (!options.json) print_header(run, dot, plan);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const MoeShape& shape : bench.shapes) {
    if (Status s = measure_shape(run, shape, rows); !s.ok()) return s.with_context(shape.name);
  }
  if (options.json) fmt::print("{}\n", rows.dump(1));
  return {};
}

}  // namespace fp4moe
