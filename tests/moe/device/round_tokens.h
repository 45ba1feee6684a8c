// One rank's tokens of a round of an exchange, in tests that record the round.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/gpu_ranks.h"
#include "kernels/dense_case.h"
#include "moe/device/device_exchange.h"

namespace fp4moe {

struct RoundTokens {
  int64_t num_own = 0, num_filled = 0;
  std::vector<bf16> x;       // [tokens, H]
  std::vector<int32_t> ids;  // [tokens, K]
  std::vector<float> weights;
  Buffer on_gpu_x, on_gpu_ids, on_gpu_weights, on_gpu_filled, out;
  Graph graph;

  // Adds a slot with a random weight.
  void add_slot(Random& random, int32_t id) {
    ids.push_back(id);
    weights.push_back(0.25f + 0.01f * static_cast<float>(random.integer(0, 50)));
  }
  // Copies the tokens to the current GPU, with outputs of zeros.
  void upload() {
    on_gpu_x = on_device(x), on_gpu_ids = on_device(ids), on_gpu_weights = on_device(weights);
    on_gpu_filled = on_device(std::vector<int32_t>{static_cast<int32_t>(num_filled)});
    out = on_device(std::vector<float>(x.size(), 0));
  }
  // most: tokens of the rank that has the most of them.
  ExchangeTokens inputs(int64_t most) const {
    return {.num_lane_tokens = most,
            .num_own = num_own,
            .num_filled = on_gpu_filled.as<int32_t>(),
            .x = on_gpu_x.as<bf16>(),
            .ids = on_gpu_ids.as<int32_t>(),
            .weights = on_gpu_weights.as<float>()};
  }
  // Enqueues zeros for `out`.
  void clear() const {
    cudaMemsetAsync(out.data(), 0, static_cast<size_t>(out.num_bytes()), current_stream().handle());
  }
};

}  // namespace fp4moe
