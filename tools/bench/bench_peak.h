// The GPU limits that benchmarks compare with.
#pragma once

#include <cstdint>
#include <vector>

#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct ShortRead {
  int64_t num_bytes = 0;
  double us = 0;
};

struct PeakFigures {
  double hbm_gbps = 0;                 // reads of 8 GiB each from a 16 GiB buffer
  double bf16_tflops = 0;              // 8192^3 matmuls, four per graph
  double empty_us = 0;                 // per kernel in a graph of empty kernels
  double h2d_gbps = 0, d2h_gbps = 0;   // page-locked memory, 256 MiB
  std::vector<ShortRead> short_reads;  // cold ranges, one kernel per read, ascending sizes
};

// Measures the limits that `bench moe` needs and, with `all`, also copies to and from the host.
Result<PeakFigures> measure_peak(Stream& stream, int repeats, bool all);

// Returns the microseconds that one kernel needs to read num_bytes of uncached memory: interpolated linearly
// between the measured sizes, and at the full rate beyond them. Precondition: short_reads is not empty.
double short_read_us(const PeakFigures& peak, double num_bytes);

}  // namespace fp4moe
