// Parallel loops over ranges of items, or over consecutive chunks of memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "base/thread_pool.h"

namespace fp4moe {

// Calls body(begin, end) in parallel for ranges of `step` items (the last may be shorter) of [0, count).
template <class Body>
void run_ranges(ThreadPool& pool, int64_t count, int64_t step, const Body& body) {
  pool.run((count + step - 1) / step,
           [&](int64_t chunk, int) { body(chunk * step, std::min(count, (chunk + 1) * step)); });
}

// The same, one range after the other on the calling thread if there is no pool.
template <class Body>
void run_ranges(ThreadPool* pool, int64_t count, int64_t step, const Body& body) {
  if (pool != nullptr) return run_ranges(*pool, count, step, body);
  for (int64_t begin = 0; begin < count; begin += step) body(begin, std::min(count, begin + step));
}

// Searches [0, count) in ranges of `step` items, as run_ranges() does. find(begin, end) returns a value of a
// range, lower than that of any later range, or -1. Returns the lowest value found, or -1.
template <class Find>
int64_t find_lowest(ThreadPool* pool, int64_t count, int64_t step, const Find& find) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> lowest = kNone;
  run_ranges(pool, count, step, [&](int64_t begin, int64_t end) {
    const int64_t found = find(begin, end);
    int64_t known = lowest.load();
    while (found >= 0 && found < known && !lowest.compare_exchange_weak(known, found)) {
    }
  });
  return lowest == kNone ? -1 : lowest.load();
}

// Calls body(chunk) in parallel for 0 .. num_chunks - 1. As long as workers take turns, each gets consecutive
// chunks. The data that the prefetcher loads past the end of a chunk is then in the cache of the core that
// runs the next chunk.
template <class Body>
void run_in_streams(ThreadPool& pool, int64_t num_chunks, const Body& body) {
  const int64_t workers = pool.num_threads(), range = num_chunks / workers;
  pool.run(num_chunks,
           [&](int64_t i, int) { body(i < range * workers ? i % workers * range + i / workers : i); });
}

}  // namespace fp4moe
