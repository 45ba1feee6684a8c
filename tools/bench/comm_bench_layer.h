// A MoE layer, from its norm on, with and without an exchange, for fp4moe bench comm.
#pragma once

#include "bench/comm_bench_ranks.h"

namespace fp4moe {

enum class CommLayer : uint8_t {
  kLocal,      // a rank's experts on the tokens of all ranks, which it already has and routes itself
  kExchanged,  // with send, wait and combine of flashinfer's protocol
  kDirect,     // in a direct round (kernels/device_a2a.h)
};

// T tokens per rank; size() * tokens <= kDirectLanes. kUnsupported: no direct round for these sizes.
Result<CommBenchRow> bench_comm_layer(const CommBenchRanks& all, const CommBenchOptions& o, CommLayer kind,
                                      int64_t tokens);

}  // namespace fp4moe
