// Loops over ranges of items, in parallel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"

namespace fp4moe {

// Calls body(begin, end) for ranges of up to `step` of the `count` items, each item in one of them. As with
// ThreadPool::run, a range's result must not depend on the worker.
template <class Body>
void run_ranges(ThreadPool& pool, int64_t count, int64_t step, const Body& body) {
  pool.run((count + step - 1) / step,
           [&](int64_t chunk, int) { body(chunk * step, std::min(count, (chunk + 1) * step)); });
}

}  // namespace fp4moe
