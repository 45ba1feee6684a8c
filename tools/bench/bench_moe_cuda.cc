// fp4moe bench moe on a GPU.
//
// One point is one CUDA graph of several calls of a layer, each with different weights and a different
// routing draw. There are enough calls that 240 MB are read before weights are used again, so the L2 never
// holds a call's weights. Events surround each replay; a row has the median, p10 and p90 of a call.
//
// roofline = max(weight bytes of the active experts / read rate, flops / bf16 matmul rate), with both rates
// measured in this run. "reads" is the time for the layer's two dependent reads (gate and up, then down),
// according to this run's short-read measurements.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

#include "base/buffer.h"
#include "base/check.h"
#include "bench/bench_cpu.h"
#include "bench/bench_device.h"
#include "bench/bench_moe.h"
#include "bench/bench_peak.h"
#include "bench/moe_kernels.h"
#include "device/cuda_probe.h"
#include "device/device_memory.h"
#include "kernels/device_peak.h"

namespace fp4moe {
namespace {

constexpr double kEqual = 1.03;  // results within 3 % count as equal
// After matmuls at the power limit, an H200 runs at 1.5 instead of 1.98 GHz for about 300 ms.
constexpr std::chrono::milliseconds kSettle{500};

// State shared by all points of one run.
struct MoeRun {
  const MoeBench& bench;
  const MoeKernels& kernels;
  const DevicePeakOps& data;
  Stream& stream;
  PeakFigures peak;
  std::optional<MoePeers> peers;
};

struct GpuPoint : MoePoint {
  double reads_us;
  const MoePeer* peer;

  double lead() const { return peer->multiple / multiple(); }  // precondition: peer is not null
};

// `copies` layers of random weights, stored consecutively.
class LayerCopies {
 public:
  static Result<LayerCopies> make(const MoeRun& run, const MoeShape& shape, int64_t copies) {
    LayerCopies layers;
    const int64_t h = shape.hidden_size, i = shape.intermediate_size;
    layers.gate_up_bytes_ = shape.num_local * run.kernels.matrix_bytes(run.bench.format, 2 * i, h);
    layers.down_bytes_ = shape.num_local * run.kernels.matrix_bytes(run.bench.format, h, i);
    auto weights = Buffer::make(copies * (layers.gate_up_bytes_ + layers.down_bytes_), device_memory());
    if (!weights.ok()) return weights.status().with_context(std::to_string(copies) + " copies of the layer");
    layers.weights_ = std::move(weights).value();
    for (int64_t c = 0; c < copies; ++c) {
      uint8_t* const gate_up = layers.weights_.data() + c * (layers.gate_up_bytes_ + layers.down_bytes_);
      const auto seed = static_cast<uint64_t>(2 * c);
      run.kernels.fill(run.bench.format, gate_up, 2 * i, h, shape.num_local, seed);
      run.kernels.fill(run.bench.format, gate_up + layers.gate_up_bytes_, h, i, shape.num_local, seed + 1);
    }

    const std::vector<float> ones(static_cast<size_t>(shape.num_local) * 3, 1.0f);
    auto scales = Buffer::copy_of(ones, device_memory());
    if (!scales.ok()) return scales.status();
    layers.scales_ = std::move(scales).value();
    layers.experts_ = {.format = run.bench.format,
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

// Checks the output of a point's last call.
Status check_output(const MoeShape& shape, const RoutingDraw& draw, const Buffer& out, int64_t num_tokens) {
  const int64_t rows = std::min<int64_t>(num_tokens, 1024);
  std::vector<bf16> host(static_cast<size_t>(rows * shape.hidden_size));
  const auto num_bytes = static_cast<int64_t>(host.size() * sizeof(bf16));
  if (Status s = device_memory().download(host.data(), out.data(), num_bytes); !s.ok()) return s;
  double sum = 0;
  for (const bf16 value : host) sum += std::abs(static_cast<double>(bf16_to_float(value)));
  return check_magnitude(sum, draw);
}

Result<GpuPoint> measure_point(const MoeRun& run, const MoeShape& shape, const LayerCopies& layers,
                               int64_t num_tokens, int64_t calls) {
  const PointDraws point = draw_point(run.bench, shape, num_tokens, calls);
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
    return unsupported(std::string("tactic ") + run.kernels.tactic.name +
                       " does not support this many tokens");
  const auto work = [&] {
    for (int64_t c = 0; c < calls; ++c) {
      args.experts = layers.copy(c);
      args.ids = buffers->ids.as<int32_t>() + c * pairs;
      args.weights = buffers->weights.as<float>() + c * pairs;
      run.kernels.tactic.layer(args);
    }
    return Status();
  };
  // Run once outside a graph, because one-time setup at a kernel's first launch cannot be captured.
  if (Status s = work(); !s.ok()) return s;
  if (Status s = run.stream.synchronize(); !s.ok()) return s;
  const auto time = time_graph(run.stream, work, run.bench.options.repeats);
  if (!time.ok()) return time.status();
  if (Status s = check_output(shape, point.draws.back(), buffers->out, num_tokens); !s.ok()) return s;

  const auto n = static_cast<double>(calls);
  GpuPoint p{make_point(run.bench, shape, num_tokens, point, {time->median / n, time->p10 / n, time->p90 / n},
                        {run.peak.hbm_gbps, run.peak.bf16_tflops * 1e3})};
  p.reads_us = short_read_us(run.peak, p.weight_bytes * 2 / 3) + short_read_us(run.peak, p.weight_bytes / 3);
  const bool compares = run.peers.has_value() && run.bench.routing == MoeRouting::kUniform;
  p.peer = compares ? run.peers->find(shape.name, num_tokens) : nullptr;
  return p;
}

nlohmann::ordered_json to_json(const MoeRun& run, const GpuPoint& p) {
  nlohmann::ordered_json row = moe_row(run.bench, p);
  row["kernels"] = run.kernels.name;
  row["hbm_gbps"] = run.peak.hbm_gbps;
  row["bf16_tflops"] = run.peak.bf16_tflops;
  row["reads_us"] = p.reads_us;
  if (p.peer != nullptr) {
    row["peer"] = p.peer->name;
    row["peer_us"] = p.peer->us;
    row["peer_multiple"] = p.peer->multiple;
    row["lead"] = p.lead();
  }
  return row;
}

void print_header(const MoeRun& run) {
  fmt::print("machine: {}\nlimits of this run: {:.0f} GB/s, {:.0f} TFLOP/s bf16, {:.2f} us per kernel\n",
             describe_cuda(kBenchGpu), run.peak.hbm_gbps, run.peak.bf16_tflops, run.peak.empty_us);
  fmt::print("layer: {} {}, {} routing, kernels {}, tactic {}\n\n", fp4_format_name(run.bench.format),
             run.bench.options.scheme, run.bench.options.routing, run.kernels.name, run.kernels.tactic.name);
  fmt::print("{}", moe_header(" reads us | peer | peer's multiple | lead |", 4));
}

void print_row(const GpuPoint& p) {
  fmt::print("{} {:.1f} |", moe_cells(p), p.reads_us);
  if (p.peer != nullptr) {
    fmt::print(" {} | {:.2f} | {:.2f} |\n", p.peer->name, p.peer->multiple, p.lead());
  } else {
    fmt::print(" | | |\n");
  }
  std::fflush(stdout);
}

void print_summary(const std::vector<GpuPoint>& points) {
  double logs = 0;
  int compared = 0;
  std::string slower;
  for (const GpuPoint& p : points) {
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

Status measure_shape(const MoeRun& run, const MoeShape& shape, std::vector<GpuPoint>& points) {
  int64_t copies = 0;
  for (const int64_t t : run.bench.tokens) copies = std::max(copies, calls_of(run.bench, shape, t));
  const auto layers = LayerCopies::make(run, shape, copies);
  if (!layers.ok()) return layers.status();
  std::this_thread::sleep_for(kSettle);
  for (const int64_t t : run.bench.tokens) {
    auto point = measure_point(run, shape, *layers, t, calls_of(run.bench, shape, t));
    if (!point.ok()) return point.status().with_context("T=" + std::to_string(t));
    points.push_back(*point);
    if (!run.bench.options.json) print_row(*point);
  }
  return {};
}

}  // namespace

Status bench_moe_cuda(const MoeBench& bench) {
  const MoeBenchOptions& options = bench.options;
  if (Status s = refuse_cpu_flags(options.threads, options.cold_mib); !s.ok()) return s;
  std::optional<MoePeers> peers;
  if (!options.peers.empty()) {
    auto read = MoePeers::read(options.peers);
    if (!read.ok()) return read.status();
    peers = std::move(read).value();
  }
  const auto kernels = moe_kernels_of(options.scheme, options.tactic);
  if (!kernels.ok()) return kernels.status();
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, bench_gpu());
  const DeviceScope on_gpu(*gpu);
  auto stream = Stream::make();
  if (!stream.ok()) return stream.status();
  auto peak = measure_peak(*stream, options.repeats, false);
  if (!peak.ok()) return peak.status();

  StreamScope scope(*stream);
  const MoeRun run{.bench = bench,
                   .kernels = *kernels,
                   .data = *sm90_peak_ops(),
                   .stream = *stream,
                   .peak = std::move(peak).value(),
                   .peers = std::move(peers)};
  if (!options.json) print_header(run);
  std::vector<GpuPoint> points;
  for (const MoeShape& shape : bench.shapes) {
    if (Status s = measure_shape(run, shape, points); !s.ok()) return s.with_context(shape.name);
  }
  if (options.json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const GpuPoint& p : points) rows.push_back(to_json(run, p));
    fmt::print("{}\n", rows.dump(1));
  } else {
    print_summary(points);
  }
  return {};
}

}  // namespace fp4moe
