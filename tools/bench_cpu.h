// The limits of the CPU that benches divide by: reads of memory, dot products.
#pragma once

#include <cstdint>
#include <string>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/cpu_peak.h"

namespace fp4moe {

// "AMD EPYC 9B45, avx512, widest dots cpu_avx512, 2 of 2 cores, last-level cache 32 MiB".
std::string describe_cpu(int num_threads);

// Bytes that pass between two reads of the same, so that no cache holds them: `mib` MiB, and with 0 four
// times the last-level cache (256 MiB where the system does not say how large that is).
int64_t cold_bytes(int64_t mib);
constexpr const char* kColdMibHelp =
    "cpu: MiB that pass between two reads of the same; default: four times the last-level cache";

// With --device cuda: kUnsupported for flags of the CPU's benches that were given.
Status refuse_cpu_flags(int threads, int64_t cold_mib);

// Reads at the memory's speed: call after call walks through cold_bytes() of memory, in huge pages where they
// are to be had.
class ReadTest {
 public:
  // kDoesNotFit names the bytes and --cold-mib. The pool must outlive the object.
  static Result<ReadTest> make(int64_t num_bytes, ThreadPool& pool);
  // GB/s of the next quarter.
  double gbps();
  int64_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  ThreadPool* pool_ = nullptr;
  Buffer buffer_;
  int64_t next_ = 0;  // quarter
};

struct Rate {
  double best = 0, median = 0;
};

// AMX where it can be used, else the best ISA's.
const CpuPeakOps& widest_ops();
Rate measure_dots(const CpuDot& dot, int repeats, ThreadPool& pool);

// Flags of `bench peak`.
struct PeakOptions {
  int threads = 0;  // cpu; 0: all
  int repeats = 30;
  int64_t cold_mib = 0;  // cpu; 0: by the last-level cache
  bool json = false;
};
// --device cpu: with one thread and with so many.
Status bench_cpu_peak(const PeakOptions& options);

}  // namespace fp4moe
