// The CPU limits that benchmarks compare with: memory read bandwidth and dot products.
#pragma once

#include <cstdint>
#include <string>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/cpu_peak.h"

namespace fp4moe {

// Returns a description, such as "AMD EPYC 9B45, avx512, widest dots cpu_avx512, 2 of 2 cores, last-level
// cache 32 MiB".
std::string describe_cpu(int num_threads);

// Returns the bytes to read between two uses of the same data so that no cache holds it: `mib` MiB, or if
// that is 0, four times the last-level cache (256 MiB if the system does not report its size).
int64_t cold_bytes(int64_t mib);
constexpr const char* kColdMibHelp =
    "cpu: MiB read between two reads of the same data; default: four times the last-level cache";

// For --device cuda: returns kUnsupported if flags for CPUs were given.
Status refuse_cpu_flags(int threads, int64_t cold_mib);

// Measures memory read bandwidth. Consecutive calls walk through `num_bytes` of memory, in huge pages if
// available.
class ReadTest {
 public:
  // kDoesNotFit: the memory is not available. The pool must outlive the object.
  static Result<ReadTest> make(int64_t num_bytes, ThreadPool& pool);
  // Reads the next quarter of the memory; returns GB/s.
  double gbps();
  int64_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  ThreadPool* pool_ = nullptr;
  Buffer buffer_;
  int64_t next_ = 0;  // index of the next quarter
};

struct Rate {
  double best = 0, median = 0;
};

// Returns the ops of AMX if available, otherwise those of the best ISA.
const CpuPeakOps& widest_ops();
Rate measure_dots(const CpuDot& dot, int repeats, ThreadPool& pool);

// Flags of `bench peak`.
struct PeakOptions {
  int threads = 0;  // cpu; 0: all
  int repeats = 30;
  int64_t cold_mib = 0;  // cpu; 0: from the last-level cache
  bool json = false;
};
// `bench peak --device cpu`: measures with one thread and with options.threads.
Status bench_cpu_peak(const PeakOptions& options);

}  // namespace fp4moe
