// DraftRecord: how often drafts were right, by position in their chain (--speculative-adaptive).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fp4moe {

class DraftRecord {
 public:
  // Adds a verified chain of num_seen drafts; the first num_right were right. Earlier counts of its
  // positions are multiplied by `decay`.
  void add(int64_t num_seen, int64_t num_right, double decay) {
    const auto num_counted = static_cast<size_t>(std::min(num_seen, num_right + 1));
    counts_.resize(std::max(counts_.size(), num_counted));
    for (size_t i = 0; i < num_counted; ++i) {
      const double right = static_cast<int64_t>(i) < num_right ? 1 : 0;
      counts_[i] = {counts_[i].seen * decay + 1, counts_[i].right * decay + right};
    }
    if (num_right == num_seen) reach_ = std::max(reach_, 2 * num_right);
  }

  // Probability that the draft at `position` (from 0) is right if those before it are, with `weight` drafts
  // of the prior's rate added to the counts.
  double rate(size_t position, double prior, double weight) const {
    const Count count = position < counts_.size() ? counts_[position] : Count();
    return (count.right + weight * prior) / (count.seen + weight);
  }

  // The longest chain to try: twice the longest one so far that was right.
  int64_t reach() const { return reach_; }

  // DraftChoice: its choice that probed the sequence last; 0: none; -1: that probe was right.
  int64_t last_probe = 0;

 private:
  struct Count {
    double seen = 0, right = 0;
  };
  std::vector<Count> counts_;  // by position
  int64_t reach_ = 3;
};

}  // namespace fp4moe
