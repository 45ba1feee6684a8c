// NewTokenRatio: how much of the answers still to come admission keeps room for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fp4moe {

// SGLang's rule: answers mostly end before their limit, so a part of what is left to their limits is counted:
// 0.7 at first, less with every decode step down to 0.098; what the answers have really taken, and a little
// more, when pages ran out; 0.7 again once nothing runs. `conservativeness` scales it; 0: nothing is counted.
class NewTokenRatio {
 public:
  explicit NewTokenRatio(double conservativeness)
      : first_(std::min(0.7 * conservativeness, 1.0)), least_(0.14 * first_), ratio_(first_) {}

  double value() const { return ratio_; }
  // Of an answer that may have max_tokens more.
  int64_t expected_tokens(int64_t max_tokens) const {
    constexpr int64_t kMostCounted = 4096;
    return static_cast<int64_t>(std::ceil(ratio_ * static_cast<double>(std::min(max_tokens, kMostCounted))));
  }
  void decay() { ratio_ = std::max(least_, ratio_ - (first_ - least_) / 600); }
  void reset() { ratio_ = first_; }
  // After a retraction: of num_requests, which have num_tokens of the num_tokens_at_most of their answers.
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
