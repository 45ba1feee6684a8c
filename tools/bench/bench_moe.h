// Code common to `bench moe` on all devices: options, draws, points and rows.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/bench_spread.h"
#include "bench/moe_shapes.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct MoeBenchOptions {
  std::vector<std::string> shapes = {"all"};
  std::vector<int64_t> tokens;  // empty: the device's default
  std::string device = "cuda", routing = "uniform", format = "mxfp4", scheme = "w4a16", tactic = "auto",
              peers;
  int threads = 0;  // cpu; 0: all
  int repeats = 30;
  int64_t cold_mib = 0;  // cpu; 0: from the last-level cache
  bool json = false;
};

// The checked options.
struct MoeBench {
  const MoeBenchOptions& options;
  std::vector<MoeShape> shapes;
  std::vector<int64_t> tokens;
  MoeRouting routing;
  Fp4Format format;
};

// Returns the calls per timed sequence, 2 to 16: enough that 240 MB are read before the first call's weights
// are used again, if possible. The bytes are estimated from the expected number of active experts.
int64_t calls_of(const MoeBench& bench, const MoeShape& shape, int64_t num_tokens);

// The routing draws of the calls of one point.
struct PointDraws {
  std::vector<RoutingDraw> draws;
  double active_experts = 0, local_pairs = 0;  // means over the draws
};
PointDraws draw_point(const MoeBench& bench, const MoeShape& shape, int64_t num_tokens, int64_t calls);

struct MoePoint {
  const MoeShape* shape;
  int64_t num_tokens, calls;
  Spread us;  // per call
  double active_experts, weight_bytes, flops;
  double roofline_us;

  double multiple() const { return us.median / roofline_us; }
};
struct MoeLimits {  // of the machine
  double read_gbps, gflops;
};
// Computes the roofline: the time to read the active experts' weights at read_gbps, or for the flops at
// gflops, whichever is longer.
MoePoint make_point(const MoeBench& bench, const MoeShape& shape, int64_t num_tokens, const PointDraws& draws,
                    const Spread& us, const MoeLimits& limits);

// Detects kernels that do nothing: `sum`, the sum of magnitudes over some of a call's outputs, must be
// finite, and must not be 0 if the call's tokens had local experts.
Status check_magnitude(double sum, const RoutingDraw& draw);

// Return a row's first columns, which are the same on all devices, as text and as JSON; each device appends
// more.
std::string moe_header(const std::string& more_columns, int num_more);
std::string moe_cells(const MoePoint& point);
nlohmann::ordered_json moe_row(const MoeBench& bench, const MoePoint& point);

Status bench_moe_cuda(const MoeBench& bench);
Status bench_moe_cpu(const MoeBench& bench);

}  // namespace fp4moe
