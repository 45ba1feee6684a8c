// The shapes of random crowds: few pages, small chunks, and every combination of groups, windows and prefix
// reuse in some round.
#pragma once

#include <algorithm>
#include <random>

#include "engine/fake_executor.h"
#include "model/kv_window.h"

namespace fp4moe {

inline int below(std::mt19937& random, int n) {
  return static_cast<int>(random() % static_cast<unsigned>(n));
}

// Fewer than max_spare_pages pages more than one request needs.
inline LoopShape crowd_shape(int round, int max_spare_pages, std::mt19937& random) {
  LoopShape shape{.page_size = 1 + round % 5,
                  .scheduler = {.max_running_requests = 1 + below(random, 8),
                                .chunked_prefill_size = 1 + below(random, 12),
                                .max_prefill_tokens = 1 + below(random, 20)},
                  .context_length = 100,
                  .num_groups = 1 + round % 3};
  shape.num_pages = (100 + shape.page_size - 1) / shape.page_size + below(random, max_spare_pages);
  if (round % 2 == 1) {
    shape.window = 1 + below(random, 20);
    const int64_t least = KvWindow{shape.window, shape.page_size}.most_pages(1);
    shape.num_window_pages = std::min(least + below(random, 20), shape.num_pages);
  }
  shape.reuses_prefixes = round % 4 != 3;
  return shape;
}

}  // namespace fp4moe
