#include "engine/startup/fastest.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace fp4moe {
namespace {

constexpr double kGain = 0.97;  // a challenger may take at most this fraction of the shipped candidate's time
constexpr int kRounds = 3;
constexpr double kNever = std::numeric_limits<double>::infinity();

}  // namespace

std::optional<size_t> fastest(std::span<const size_t> candidates, size_t shipped,
                              const std::function<double(size_t)>& seconds,
                              const std::function<bool()>& has_time) {
  std::vector<double> best(candidates.size(), kNever);
  std::vector<bool> wrong(candidates.size(), false);
  for (int round = 0; round < kRounds; ++round)
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!has_time()) return std::nullopt;
      const double once = wrong[i] ? -1 : seconds(candidates[i]);
      wrong[i] = once < 0;
      best[i] = wrong[i] ? kNever : std::min(best[i], once);
    }
  const auto at =
      static_cast<size_t>(std::find(candidates.begin(), candidates.end(), shipped) - candidates.begin());
  size_t winner = at;
  for (size_t i = 0; i < candidates.size(); ++i)
    if (best[i] <= kGain * best[at] && best[i] < best[winner]) winner = i;
  return candidates[winner];
}

}  // namespace fp4moe
