// Runs a body on every rank of a threads job, each rank in a separate thread.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/job.h"

namespace fp4moe::test {

inline std::unique_ptr<Job> threads_job(int num_ranks, int64_t heap_bytes, uint32_t first_signal = 0) {
  JobOptions options;
  options.fabric = "threads";
  options.num_ranks = num_ranks;
  options.heap_bytes = heap_bytes;
  options.first_signal = first_signal;
  Result<std::unique_ptr<Job>> job = Job::open(options);
  EXPECT_TRUE(job.ok()) << job.status().to_string();
  return job.ok() ? std::move(*job) : nullptr;
}

inline void on_every_rank(int num_ranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fp4moe::test
