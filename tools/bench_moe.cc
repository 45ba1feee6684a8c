// fp4moe bench moe: whole MoE layers behind the router, over tokens, beside the roofline of this machine.
//
// One point is one CUDA graph of several calls of a layer. Each call has its own weights and its own routing
// draw, so many that 240 MB pass before weights are read again: the L2 never holds what a call needs. Events
// round each replay; a row has the median, p10 and p90 of a call. roofline = max(weight bytes of the active
// experts / measured read rate, flops / measured bf16 matmul rate), both of this run; "reads" is the time of
// the layer's two dependent reads (gate and up, then down) by the short-read measurements of this run.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/buffer.h"
#include "bench_device.h"
#include "bench_peak.h"
#include "bench_verbs.h"
#include "device/cuda_probe.h"
#include "device/device_memory.h"
#include "kernels/device_peak.h"
#include "moe_kernels.h"
#include "moe_shapes.h"
#include "verb.h"

namespace fp4moe {
namespace {

constexpr double kColdBytes = 240e6;  // between two reads of the same weights
constexpr int64_t kMaxCalls = 16;
constexpr double kEqual = 1.03;  // within 3 % counts as equal
// After matmuls at the power limit an H200 runs at 1.5 instead of 1.98 GHz for some 300 ms.
constexpr std::chrono::milliseconds kSettle{500};

struct MoeBenchOptions {
  std::vector<std::string> shapes = {"all"};
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
  std::string device = "cuda", routing = "uniform", format = "mxfp4", scheme = "w4a16", tactic = "auto",
              peers;
  int repeats = 30;
  bool json = false;
};

// Everything that the points of one run share.
struct MoeRun {
  const MoeBenchOptions& options;
  const MoeKernels& kernels;
  const DevicePeakOps& data;
  Stream& stream;
  Fp4Format format;
  MoeRouting routing;
  PeakFigures peak;
  std::optional<MoePeers> peers;
};

struct MoePoint {
  const MoeShape* shape;
  int64_t num_tokens, calls;
  Spread us;  // of one call
  double active_experts, weight_bytes, flops, roofline_us, reads_us;
  const MoePeer* peer;

  double multiple() const { return us.median / roofline_us; }
  double lead() const { return peer->multiple / multiple(); }  // over the peer; it must exist
};

// What the calls of one point choose.
struct PointDraws {
  std::vector<RoutingDraw> draws;
  double active_experts = 0, local_pairs = 0;  // means
};

PointDraws draw_point(const MoeRun& run, const MoeShape& shape, int64_t num_tokens, int64_t calls) {
  PointDraws point;
  for (int64_t c = 0; c < calls; ++c) {
    const uint64_t seed = 1000003 * static_cast<uint64_t>(num_tokens) + static_cast<uint64_t>(c);
    point.draws.push_back(draw_routing(shape, run.routing, num_tokens, seed));
    point.active_experts += static_cast<double>(point.draws.back().active_experts);
    point.local_pairs += static_cast<double>(point.draws.back().local_pairs);
  }
  point.active_experts /= static_cast<double>(calls);
  point.local_pairs /= static_cast<double>(calls);
  return point;
}

// Calls of a graph, so that weights are cold. The mean number of active experts of uniform draws says how
// much a call reads.
int64_t calls_of(const MoeRun& run, const MoeShape& shape, int64_t num_tokens) {
  const double e = static_cast<double>(shape.num_experts), k = static_cast<double>(shape.topk);
  const double part = run.routing == MoeRouting::kOneHot
                          ? k / static_cast<double>(shape.num_local)
                          : 1 - std::pow(1 - k / e, static_cast<double>(num_tokens));
  const double read = moe_weight_bytes(shape, run.format, part * static_cast<double>(shape.num_local));
  return std::clamp<int64_t>(1 + static_cast<int64_t>(std::ceil(kColdBytes / read)), 2, kMaxCalls);
}

// `copies` layers of random weights, one behind the other.
class LayerCopies {
 public:
  static Result<LayerCopies> make(const MoeRun& run, const MoeShape& shape, int64_t copies) {
    LayerCopies layers;
    const int64_t h = shape.hidden_size, i = shape.intermediate_size;
    layers.gate_up_bytes_ = shape.num_local * run.kernels.matrix_bytes(run.format, 2 * i, h);
    layers.down_bytes_ = shape.num_local * run.kernels.matrix_bytes(run.format, h, i);
    auto weights = Buffer::make(copies * (layers.gate_up_bytes_ + layers.down_bytes_), device_memory());
    if (!weights.ok()) return weights.status().with_context(std::to_string(copies) + " copies of the layer");
    layers.weights_ = std::move(weights).value();
    for (int64_t c = 0; c < copies; ++c) {
      uint8_t* const gate_up = layers.weights_.data() + c * (layers.gate_up_bytes_ + layers.down_bytes_);
      const auto seed = static_cast<uint64_t>(2 * c);
      run.kernels.fill(run.format, gate_up, 2 * i, h, shape.num_local, seed);
      run.kernels.fill(run.format, gate_up + layers.gate_up_bytes_, h, i, shape.num_local, seed + 1);
    }

    const std::vector<float> ones(static_cast<size_t>(shape.num_local) * 3, 1.0f);
    auto scales = Buffer::copy_of(ones, device_memory());
    if (!scales.ok()) return scales.status();
    layers.scales_ = std::move(scales).value();
    layers.experts_ = {.format = run.format,
                       .num_experts = shape.num_local,
                       .hidden_size = h,
                       .intermediate_size = i,
                       .activation = shape.activation,
                       .scales = layers.scales_.as<float>()};
    return layers;
  }

  TiledExperts copy(int64_t c) const {
    TiledExperts experts = experts_;
    experts.gate_up = weights_.data() + c * (gate_up_bytes_ + down_bytes_);
    experts.down = experts.gate_up + gate_up_bytes_;
    return experts;
  }

 private:
  Buffer weights_, scales_;
  TiledExperts experts_;
  int64_t gate_up_bytes_ = 0, down_bytes_ = 0;
};

// A point's buffers on the device.
struct PointBuffers {
  Buffer x, out, ids, weights, workspace, counters;
};

Result<PointBuffers> make_buffers(const MoeRun& run, const MoeShape& shape, const TiledExperts& experts,
                                  const PointDraws& point, int64_t num_tokens) {
  MemoryResource& memory = device_memory();
  const int64_t rows_bytes = num_tokens * shape.hidden_size * 2, pair_bytes = num_tokens * shape.topk * 4;
  const auto calls = static_cast<int64_t>(point.draws.size());
  const int64_t sizes[] = {rows_bytes,
                           rows_bytes,
                           calls * pair_bytes,
                           calls * pair_bytes,
                           run.kernels.tactic.workspace_bytes(experts, num_tokens, shape.topk),
                           kMoeCounterBytes};
  PointBuffers buffers;
  Buffer* const made[] = {&buffers.x,       &buffers.out,       &buffers.ids,
                          &buffers.weights, &buffers.workspace, &buffers.counters};
  for (size_t b = 0; b < std::size(sizes); ++b) {
    auto buffer = Buffer::make(sizes[b], memory);
    if (!buffer.ok()) return buffer.status();
    *made[b] = std::move(buffer).value();
  }
  run.data.fill_normal(buffers.x.as<bf16>(), num_tokens * shape.hidden_size, 4);
  const std::vector<uint8_t> zeros(kMoeCounterBytes, 0);
  Status status = memory.upload(buffers.counters.data(), zeros.data(), kMoeCounterBytes);
  for (int64_t c = 0; c < calls && status.ok(); ++c) {
    const RoutingDraw& draw = point.draws[static_cast<size_t>(c)];
    status = memory.upload(buffers.ids.data() + c * pair_bytes, draw.ids.data(), pair_bytes);
    if (status.ok())
      status = memory.upload(buffers.weights.data() + c * pair_bytes, draw.weights.data(), pair_bytes);
  }
  if (!status.ok()) return status;
  return buffers;
}

// A kernel that does nothing must not look fast: the last call's output is finite, and not all zero if its
// tokens had local experts.
Status check_output(const MoeShape& shape, const RoutingDraw& draw, const Buffer& out, int64_t num_tokens) {
  const int64_t rows = std::min<int64_t>(num_tokens, 1024);
  std::vector<bf16> host(static_cast<size_t>(rows * shape.hidden_size));
  const auto num_bytes = static_cast<int64_t>(host.size() * sizeof(bf16));
  if (Status s = device_memory().download(host.data(), out.data(), num_bytes); !s.ok()) return s;
  double sum = 0;
  for (const bf16 value : host) sum += std::abs(static_cast<double>(bf16_to_float(value)));
  if (!std::isfinite(sum)) return internal_error("the layer's output is not finite");
  if (sum == 0 && draw.local_pairs > 0) return internal_error("the layer's output is all zeros");
  return {};
}

Result<MoePoint> measure_point(const MoeRun& run, const MoeShape& shape, const LayerCopies& layers,
                               int64_t num_tokens, int64_t calls) {
  const PointDraws point = draw_point(run, shape, num_tokens, calls);
  auto buffers = make_buffers(run, shape, layers.copy(0), point, num_tokens);
  if (!buffers.ok()) return buffers.status();
  const int64_t pairs = num_tokens * shape.topk;
  DeviceMoeArgs args{.experts = layers.copy(0),
                     .x = buffers->x.as<bf16>(),
                     .num_tokens = num_tokens,
                     .topk = shape.topk,
                     .first_expert = shape.first_expert,
                     .num_routed_experts = shape.num_experts,
                     .out_bf16 = buffers->out.as<bf16>(),
                     .counters = buffers->counters.data(),
                     .workspace = buffers->workspace.data()};
  if (!run.kernels.tactic.fits(args))
    return unsupported(std::string("tactic ") + run.kernels.tactic.name + " does not take so many tokens");
  const auto work = [&] {
    for (int64_t c = 0; c < calls; ++c) {
      args.experts = layers.copy(c);
      args.ids = buffers->ids.as<int32_t>() + c * pairs;
      args.weights = buffers->weights.as<float>() + c * pairs;
      run.kernels.tactic.layer(args);
    }
    return Status();
  };
  // Once outside a graph: what kernels set up at their first launch is not part of one.
  if (Status s = work(); !s.ok()) return s;
  if (Status s = run.stream.synchronize(); !s.ok()) return s;
  const auto time = time_graph(run.stream, work, run.options.repeats);
  if (!time.ok()) return time.status();
  if (Status s = check_output(shape, point.draws.back(), buffers->out, num_tokens); !s.ok()) return s;

  const auto n = static_cast<double>(calls);
  MoePoint p{.shape = &shape, .num_tokens = num_tokens, .calls = calls};
  p.us = {time->median / n, time->p10 / n, time->p90 / n};
  p.active_experts = point.active_experts;
  p.weight_bytes = moe_weight_bytes(shape, run.format, point.active_experts);
  p.flops = moe_flops(shape, point.local_pairs);
  p.roofline_us = std::max(p.weight_bytes / run.peak.hbm_gbps * 1e-3, p.flops / run.peak.bf16_tflops * 1e-6);
  p.reads_us = short_read_us(run.peak, p.weight_bytes * 2 / 3) + short_read_us(run.peak, p.weight_bytes / 3);
  const bool compares = run.peers.has_value() && run.routing == MoeRouting::kUniform;
  p.peer = compares ? run.peers->find(shape.name, num_tokens) : nullptr;
  return p;
}

nlohmann::ordered_json to_json(const MoeRun& run, const MoePoint& p) {
  nlohmann::ordered_json row = {{"shape", p.shape->name},
                                {"tokens", p.num_tokens},
                                {"format", fp4_format_name(run.format)},
                                {"scheme", run.options.scheme},
                                {"routing", run.options.routing},
                                {"kernels", run.kernels.name},
                                {"tactic", run.kernels.tactic.name},
                                {"calls", p.calls},
                                {"us", p.us.median},
                                {"us_p10", p.us.p10},
                                {"us_p90", p.us.p90},
                                {"active_experts", p.active_experts},
                                {"bytes", p.weight_bytes},
                                {"flops", p.flops},
                                {"hbm_gbps", run.peak.hbm_gbps},
                                {"bf16_tflops", run.peak.bf16_tflops},
                                {"roofline_us", p.roofline_us},
                                {"multiple", p.multiple()},
                                {"fraction", 1 / p.multiple()},
                                {"reads_us", p.reads_us}};
  if (p.peer != nullptr) {
    row["peer"] = p.peer->name;
    row["peer_us"] = p.peer->us;
    row["peer_multiple"] = p.peer->multiple;
    row["lead"] = p.lead();
  }
  return row;
}

void print_header(const MoeRun& run) {
  fmt::print("machine: {}\nlimits of this run: {:.0f} GB/s, {:.0f} TFLOP/s bf16, {:.2f} us a kernel\n",
             describe_cuda(), run.peak.hbm_gbps, run.peak.bf16_tflops, run.peak.empty_us);
  fmt::print("layer: {} {}, {} routing, kernels {}, tactic {}\n\n", fp4_format_name(run.format),
             run.options.scheme, run.options.routing, run.kernels.name, run.kernels.tactic.name);
  fmt::print(
      "| shape | T | us | p10 | p90 | experts | MB | GFLOP | roofline us | multiple | reads us | peer | "
      "peer's multiple | lead |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |\n");
}

void print_row(const MoePoint& p) {
  fmt::print("| {} | {} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.2f} | {:.1f} | {:.2f} | {:.1f} |",
             p.shape->name, p.num_tokens, p.us.median, p.us.p10, p.us.p90, p.active_experts,
             p.weight_bytes * 1e-6, p.flops * 1e-9, p.roofline_us, p.multiple(), p.reads_us);
  if (p.peer != nullptr) {
    fmt::print(" {} | {:.2f} | {:.2f} |\n", p.peer->name, p.peer->multiple, p.lead());
  } else {
    fmt::print(" | | |\n");
  }
  std::fflush(stdout);
}

void print_summary(const std::vector<MoePoint>& points) {
  double logs = 0;
  int compared = 0;
  std::string slower;
  for (const MoePoint& p : points) {
    if (p.peer == nullptr) continue;
    logs += std::log(p.lead());
    ++compared;
    if (p.lead() * kEqual < 1)
      slower += fmt::format("{}{} T={} ({:.2f})", slower.empty() ? "" : ", ", p.shape->name, p.num_tokens,
                            p.lead());
  }
  if (compared == 0) return;
  fmt::print(
      "\nlead over the best peer, as multiples of each run's roofline: geometric mean {:.2f} of {} points\n",
      std::exp(logs / compared), compared);
  fmt::print("points slower than the best peer by more than 3 %: {}\n", slower.empty() ? "none" : slower);
}

Status measure_shape(const MoeRun& run, const MoeShape& shape, std::vector<MoePoint>& points) {
  int64_t copies = 0;
  for (const int64_t t : run.options.tokens) copies = std::max(copies, calls_of(run, shape, t));
  const auto layers = LayerCopies::make(run, shape, copies);
  if (!layers.ok()) return layers.status();
  std::this_thread::sleep_for(kSettle);
  for (const int64_t t : run.options.tokens) {
    auto point = measure_point(run, shape, *layers, t, calls_of(run, shape, t));
    if (!point.ok()) return point.status().with_context("T=" + std::to_string(t));
    points.push_back(*point);
    if (!run.options.json) print_row(*point);
  }
  return {};
}

Status bench_moe(const MoeBenchOptions& options) {
  const auto shapes = moe_shapes_of(options.shapes);
  if (!shapes.ok()) return shapes.status();
  const auto routing = moe_routing_of(options.routing);
  if (!routing.ok()) return routing.status();
  std::optional<MoePeers> peers;
  if (!options.peers.empty()) {
    auto read = MoePeers::read(options.peers);
    if (!read.ok()) return read.status();
    peers = std::move(read).value();
  }
  const auto kernels = moe_kernels_of(options.scheme, options.tactic);
  if (!kernels.ok()) return kernels.status();
  if (const auto gpu = bench_gpu(options.device); !gpu.ok()) return gpu.status();
  auto stream = Stream::make();
  if (!stream.ok()) return stream.status();
  auto peak = measure_peak(*stream, options.repeats, false);
  if (!peak.ok()) return peak.status();

  StreamScope scope(*stream);
  const MoeRun run{.options = options,
                   .kernels = *kernels,
                   .data = *sm90_peak_ops(),
                   .stream = *stream,
                   .format = options.format == "nvfp4" ? Fp4Format::kNvfp4 : Fp4Format::kMxfp4,
                   .routing = *routing,
                   .peak = std::move(peak).value(),
                   .peers = std::move(peers)};
  if (!options.json) print_header(run);
  std::vector<MoePoint> points;
  for (const MoeShape& shape : *shapes) {
    if (Status s = measure_shape(run, shape, points); !s.ok()) return s.with_context(shape.name);
  }
  if (options.json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const MoePoint& p : points) rows.push_back(to_json(run, p));
    fmt::print("{}\n", rows.dump(1));
  } else {
    print_summary(points);
  }
  return {};
}

}  // namespace

void add_bench_moe(CLI::App& bench, int& exit_code) {
  CLI::App* verb = bench.add_subcommand("moe", "MoE layers on a GPU beside its roofline and the best peers");
  auto options = std::make_shared<MoeBenchOptions>();
  verb->add_option("--device", options->device, "cuda")->capture_default_str();
  verb->add_option("--shape", options->shapes, "all, or names separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--tokens", options->tokens, "rows of the layer's input, each a point")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536));
  verb->add_option("--routing", options->routing, "uniform, zipf or onehot")->capture_default_str();
  verb->add_option("--format", options->format, "weights: mxfp4 or nvfp4")
      ->check(CLI::IsMember({"mxfp4", "nvfp4"}))
      ->capture_default_str();
  verb->add_option("--fp4-compute", options->scheme, "w4a16 or w4a8")
      ->check(CLI::IsMember({"w4a16", "w4a8"}))
      ->capture_default_str();
  verb->add_option("--tactic", options->tactic, "of w4a16: auto (by size), or one of the kernels' own")
      ->capture_default_str();
  verb->add_option("--peers", options->peers, "figures to print beside: bench/peers_h200.json");
  verb->add_option("-r,--repeats", options->repeats, "replays of each graph")
      ->check(CLI::Range(5, 1000))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "print JSON");
  verb->callback([options, &exit_code] {
    const Status status = bench_moe(*options);
    exit_code = status.ok() ? kExitOk : report_error(status);
  });
}

}  // namespace fp4moe
