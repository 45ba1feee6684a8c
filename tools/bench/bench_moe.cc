// fp4moe bench moe: measures whole MoE layers after the router, for several token counts, and compares them
// with this machine's roofline.
#include "bench/bench_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/check.h"
#include "bench/bench_cpu.h"
#include "flag_checks.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

const std::vector<int64_t> kGpuTokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
const std::vector<int64_t> kCpuTokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512};

Status bench_moe(const MoeBenchOptions& options) {
  const bool is_cpu = options.device == "cpu";
  const std::vector<int64_t>& tokens = is_cpu ? kCpuTokens : kGpuTokens;
  MoeBench bench{.options = options,
                 .shapes = {},
                 .tokens = options.tokens.empty() ? tokens : options.tokens,
                 .routing = {},
                 .format = options.format == "nvfp4" ? Fp4Format::kNvfp4 : Fp4Format::kMxfp4};
  FP4MOE_ASSIGN_OR_RETURN(bench.shapes, moe_shapes_of(options.shapes));
  FP4MOE_ASSIGN_OR_RETURN(bench.routing, moe_routing_of(options.routing));
  return is_cpu ? bench_moe_cpu(bench) : bench_moe_cuda(bench);
}

}  // namespace

int64_t calls_of(const MoeBench& bench, const MoeShape& shape, int64_t num_tokens) {
  constexpr double kBytes = 240e6;
  constexpr int64_t kMaxCalls = 16;
  const double e = static_cast<double>(shape.num_experts), k = static_cast<double>(shape.topk);
  const double part = bench.routing == MoeRouting::kOneHot
                          ? k / static_cast<double>(shape.num_local)
                          : 1 - std::pow(1 - k / e, static_cast<double>(num_tokens));
  const double read = moe_weight_bytes(shape, bench.format, part * static_cast<double>(shape.num_local));
  return std::clamp<int64_t>(1 + static_cast<int64_t>(std::ceil(kBytes / read)), 2, kMaxCalls);
}

PointDraws draw_point(const MoeBench& bench, const MoeShape& shape, int64_t num_tokens, int64_t calls) {
  PointDraws point;
  for (int64_t c = 0; c < calls; ++c) {
    const uint64_t seed = 1000003 * static_cast<uint64_t>(num_tokens) + static_cast<uint64_t>(c);
    point.draws.push_back(draw_routing(shape, bench.routing, num_tokens, seed));
    point.active_experts += static_cast<double>(point.draws.back().active_experts);
    point.local_pairs += static_cast<double>(point.draws.back().local_pairs);
  }
  point.active_experts /= static_cast<double>(calls);
  point.local_pairs /= static_cast<double>(calls);
  return point;
}

MoePoint make_point(const MoeBench& bench, const MoeShape& shape, int64_t num_tokens, const PointDraws& draws,
                    const Spread& us, const MoeLimits& limits) {
  MoePoint p{.shape = &shape,
             .num_tokens = num_tokens,
             .calls = static_cast<int64_t>(draws.draws.size()),
             .us = us,
             .active_experts = draws.active_experts,
             .weight_bytes = moe_weight_bytes(shape, bench.format, draws.active_experts),
             .flops = moe_flops(shape, draws.local_pairs),
             .roofline_us = 0};
  p.roofline_us = std::max(p.weight_bytes / limits.read_gbps, p.flops / limits.gflops) * 1e-3;
  return p;
}

Status check_magnitude(double sum, const RoutingDraw& draw) {
  if (!std::isfinite(sum)) return internal_error("the layer's output is not finite");
  if (sum == 0 && draw.local_pairs > 0) return internal_error("the layer's output is all zeros");
  return {};
}

std::string moe_header(const std::string& more_columns, int num_more) {
  std::string header = "| shape | T | us | p10 | p90 | experts | MB | GFLOP | roofline us | multiple |" +
                       more_columns +
                       "\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |";
  for (int i = 0; i < num_more; ++i) header += " ---: |";
  return header + "\n";
}

std::string moe_cells(const MoePoint& p) {
  return fmt::format("| {} | {} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.2f} | {:.1f} | {:.2f} |",
                     p.shape->name, p.num_tokens, p.us.median, p.us.p10, p.us.p90, p.active_experts,
                     p.weight_bytes * 1e-6, p.flops * 1e-9, p.roofline_us, p.multiple());
}

nlohmann::ordered_json moe_row(const MoeBench& bench, const MoePoint& p) {
  return {{"shape", p.shape->name},
          {"tokens", p.num_tokens},
          {"device", bench.options.device},
          {"format", fp4_format_name(bench.format)},
          {"scheme", bench.options.scheme},
          {"routing", bench.options.routing},
          {"tactic", bench.options.tactic},
          {"calls", p.calls},
          {"us", p.us.median},
          {"us_p10", p.us.p10},
          {"us_p90", p.us.p90},
          {"active_experts", p.active_experts},
          {"bytes", p.weight_bytes},
          {"flops", p.flops},
          {"roofline_us", p.roofline_us},
          {"multiple", p.multiple()},
          {"fraction", 1 / p.multiple()}};
}

void add_bench_moe(CLI::App& bench, int& exit_code) {
  CLI::App* subcommand =
      bench.add_subcommand("moe", "Measure MoE layers and compare them with the roofline of this GPU or CPU");
  auto options = std::make_shared<MoeBenchOptions>();
  subcommand->add_option("--device", options->device, "cuda or cpu")
      ->check(CLI::IsMember({"cuda", "cpu"}))
      ->capture_default_str();
  subcommand->add_option("--shape", options->shapes, "shapes: all, or names separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  subcommand
      ->add_option("--tokens", options->tokens,
                   "token counts, separated by commas; default: powers of two up to 8192, on a CPU up to 512")
      ->delimiter(',')
      ->check(in_range(1, 65536));
  subcommand
      ->add_option("--routing", options->routing,
                   "distribution of tokens over experts: uniform, zipf or onehot")
      ->type_name("TEXT:{uniform,zipf,onehot}")
      ->capture_default_str();
  subcommand->add_option("--format", options->format, "format of the weights: mxfp4 or nvfp4")
      ->check(CLI::IsMember({"mxfp4", "nvfp4"}))
      ->capture_default_str();
  subcommand->add_option("--fp4-compute", options->scheme, "scheme: w4a16 or w4a8")
      ->check(CLI::IsMember({"w4a16", "w4a8"}))
      ->capture_default_str();
  subcommand
      ->add_option("--tactic", options->tactic, "cuda: auto (chosen by token count), or the name of a tactic")
      ->capture_default_str();
  subcommand
      ->add_option("--peers", options->peers,
                   "cuda: file with results of peers to compare with, such as bench/peers_h200.json")
      ->type_name("FILE");
  subcommand->add_option("-t,--threads", options->threads, "cpu: threads; 0: all cores")
      ->check(in_range(0, 4096))
      ->capture_default_str();
  subcommand->add_option("--cold-mib", options->cold_mib, kColdMibHelp)->check(in_range(1, 1 << 24));
  subcommand
      ->add_option("-r,--repeats", options->repeats,
                   "repeats of each point's calls; on a GPU, replays of their graph")
      ->check(in_range(5, 1000))
      ->capture_default_str();
  subcommand->add_flag("--json", options->json, "print JSON");
  subcommand->callback([options, &exit_code] {
    const Status status = bench_moe(*options);
    exit_code = status.ok() ? kExitOk : report_error(status);
  });
}

}  // namespace fp4moe
