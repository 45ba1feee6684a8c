// The limits of the machine that benches divide by.
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
  double hbm_gbps = 0;                 // reads, 8 GiB a call over 16 GiB
  double bf16_tflops = 0;              // 8192^3, four to a graph
  double empty_us = 0;                 // one kernel of a graph of nothing else
  double h2d_gbps = 0, d2h_gbps = 0;   // page-locked memory, 256 MiB
  std::vector<ShortRead> short_reads;  // cold ranges, one kernel a read, ascending
};

// What `bench moe` needs; with `all`, also the links to the host.
Result<PeakFigures> measure_peak(Stream& stream, int repeats, bool all);

// Time to read num_bytes that are not in the cache with one kernel, between the measured ranges (linear), at
// the full rate past them. Precondition: short_reads is not empty.
double short_read_us(const PeakFigures& peak, double num_bytes);

}  // namespace fp4moe
