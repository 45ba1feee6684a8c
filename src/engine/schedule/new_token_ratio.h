// NewTokenRatio: the fraction of outstanding output tokens for which admission reserves KV pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fp4moe {

// Implements SGLang's rule. Most outputs end before their limit, so admission reserves pages for only a
// fraction of the remaining tokens: 0.7 at first, decaying with every decode step to 0.098. After pages have
// run out, the fraction is at least the one that outputs have really used plus a margin; once nothing runs,
// it is 0.7 again. `conservativeness` scales the fraction; 0 reserves nothing.
class NewTokenRatio {
 public:
  explicit NewTokenRatio(double conservativeness)
      : first_(std::min(0.7 * conservativeness, 1.0)), least_(0.14 * first_), ratio_(first_) {}

  double value() const { return ratio_; }
  // Returns the number of tokens to reserve for an output that can grow by max_tokens.
  int64_t expected_tokens(int64_t max_tokens) const {
    constexpr int64_t kMostCounted = 4096;
    return static_cast<int64_t>(std::ceil(ratio_ * static_cast<double>(std::min(max_tokens, kMostCounted))));
  }
  void decay() { ratio_ = std::max(least_, ratio_ - (first_ - least_) / 600); }
  void reset() { ratio_ = first_; }
  // Call after a retraction: num_requests requests have together generated num_tokens output tokens, of at
  // most num_tokens_at_most.
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
