// Code and scale histograms of the experts' FP4 data, for `fp4moe inspect`.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "io/checkpoint/expert_weights.h"

namespace fp4moe {

// Statistics for one projection of one expert, or summed over several experts.
struct Fp4Statistics {
  std::array<int64_t, 16> code_counts = {};  // by e2m1 code: 0, .5, 1, 1.5, 2, 3, 4, 6, then negative
  std::map<int, int64_t> exponent_counts;  // by floor(log2(block scale * tensor scale)), without zero scales
  int64_t num_blocks = 0;
  int64_t num_zero_blocks = 0;  // blocks in which every code is +-0 or the scale is 0

  void add(const Fp4MatrixView& matrix);
  int64_t num_saturated() const { return code_counts[7] + code_counts[15]; }  // codes for 6 and -6
  // Returns the smallest exponent that is not exceeded by at least the fraction `share` of the blocks with a
  // non-zero scale: 0 gives the minimum, 0.5 the median, 1 the maximum. 0 if there are no such blocks.
  int exponent_quantile(double share) const;
};

struct ExpertStatistics {
  Fp4Statistics gate, up, down;
  int64_t num_gate_up_mismatches = 0;  // experts whose gate and up tensor scales differ
  double max_gate_up_ratio = 1;        // largest ratio (>= 1) of an expert's gate and up tensor scales

  void add(const ExpertWeightsView& expert);
};

}  // namespace fp4moe
