// NewTokenRatio: the fraction of outstanding output tokens for which admission reserves KV pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fp4moe {

// SGLang's rule. Outputs mostly end before their limit, so only a fraction of the remaining tokens is
// reserved: 0.7 at first, decaying with every decode step to 0.098; after pages ran out, the fraction that
// outputs have really used plus a margin; 0.7 again once nothing runs. `conservativeness` scales it; 0
// reserves nothing.
class NewTokenRatio {
 public:
  explicit NewTokenRatio(double conservativeness)
      : first_(std::min(0.7 * conservativeness, 1.0)), least_(0.14 * first_), ratio_(first_) {}

  double value() const { return ratio_; }
  // Reserved tokens for an output that may grow by max_tokens.
  int64_t expected_tokens(int64_t max_tokens) const {
    constexpr int64_t kMostCounted = 4096;
    return static_cast<int64_t>(std::ceil(ratio_ * static_cast<double>(std::min(max_tokens, kMostCounted))));
  }
  void decay() { ratio_ = std::max(least_, ratio_ - (first_ - least_) / 600); }
  void reset() { ratio_ = first_; }
  // After a retraction: num_requests have generated num_tokens of at most num_tokens_at_most output tokens.
  void learn(int64_t num_requests, int64_t num_tokens, int64_t num_tokens_at_most) {
    constexpr int64_t kMoreEach = 20;
    const double ratio = static_cast<double>(num_tokens + kMoreEach * num_requests) /
                         static_cast<double>(num_tokens_at_most + 1);
    if (first_ > 0) ratio_ = std::max(ratio_, std::min(ratio, 1.0));
  }

 private:
  double first_, least_, ratio_;
};

}  // namespace fp4moe
