// The layers that `bench moe` measures, the costs of a call, and the routing distributions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"
#include "kernels/expert_ops.h"

namespace fp4moe {

struct MoeShape {
  const char* name;
  int64_t num_experts;              // E: the experts that tokens choose from
  int64_t first_expert, num_local;  // the layer's local experts: [first, first + L)
  int64_t topk, hidden_size, intermediate_size;
  Activation activation;
};

const std::vector<MoeShape>& moe_shapes();
// `names`: shape names or "all". kInvalidArgument: a name is unknown; the message lists all names.
Result<std::vector<MoeShape>> moe_shapes_of(const std::vector<std::string>& names);

enum class MoeRouting : uint8_t {
  kUniform,  // topk distinct experts, uniformly distributed
  kZipf,     // topk distinct experts; the r-th most popular has weight 1 / r, and each call draws a new order
  kOneHot,   // every token chooses the same topk local experts
};
Result<MoeRouting> moe_routing_of(const std::string& name);

struct RoutingDraw {
  std::vector<int32_t> ids;    // [T, topk], distinct within a token
  std::vector<float> weights;  // [T, topk], the weights of a token sum to 1
  int64_t active_experts = 0;  // local experts with at least one token
  int64_t local_pairs = 0;     // (token, local expert) pairs
};
// The same seed gives the same draw.
RoutingDraw draw_routing(const MoeShape& shape, MoeRouting routing, int64_t num_tokens, uint64_t seed);

// Renames the draw's local experts, in the order of their ids, to the layer's experts first_local,
// first_local + 1 and so on, wrapping around after the last. The result is the same draw with other experts.
void rename_experts(const MoeShape& shape, int64_t first_local, RoutingDraw& draw);

// Return lower bounds for a call: it reads each active expert's weights once, and does two flops per weight
// and row.
double moe_weight_bytes(const MoeShape& shape, Fp4Format format, double active_experts);
double moe_flops(const MoeShape& shape, double local_pairs);

// The best known peer at one point.
struct MoePeer {
  std::string name;
  double us = 0, multiple = 0;  // time in microseconds, and as a multiple of the roofline of the peer's run
};
// Results of peers, read from a file such as bench/peers_h200.json.
class MoePeers {
 public:
  static Result<MoePeers> read(const std::string& path);
  // Returns null if the file has no such point. dsv4_flash has seedbench's dims and uses its results.
  const MoePeer* find(const std::string& shape, int64_t num_tokens) const;

 private:
  struct Row {
    std::string shape;
    int64_t num_tokens;
    MoePeer peer;
  };
  std::vector<Row> rows_;
};

}  // namespace fp4moe
