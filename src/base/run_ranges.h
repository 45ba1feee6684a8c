// Loops over ranges of items, or over chunks of a long read, in parallel.
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

// Calls body(chunk) for 0 .. num_chunks - 1. Workers that take turns get a range each, in order: a chunk
// finds in its core's cache what the one before has fetched past its own end.
template <class Body>
void run_in_streams(ThreadPool& pool, int64_t num_chunks, const Body& body) {
  const int64_t workers = pool.num_threads(), range = num_chunks / workers;
  pool.run(num_chunks,
           [&](int64_t i, int) { body(i < range * workers ? i % workers * range + i / workers : i); });
}

}  // namespace fp4moe
