#include "engine/step/draft_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace fp4moe {
namespace {

// Each verified chain multiplies the counts before it by these: a sequence remembers about 16 chains, the
// prior of all sequences 64.
constexpr double kOwnDecay = 15.0 / 16, kSharedDecay = 63.0 / 64;
// Weights of the priors, in drafts. kFirstRate, before any draft was verified, is tried and soon forgotten.
constexpr double kFirstRate = 0.5, kFirstWeight = 1, kSharedWeight = 4;
// Tokens per second must increase by this factor. It exceeds the error of the measured times.
constexpr double kLeastGain = 1.02;
// Share of the time that probes may take, and the most that they can save up, in steps, also at the start.
constexpr double kProbeShare = 1.0 / 256, kMostCredit = 1;
// The time of a step without drafts is measured at least once in this number of steps.
constexpr int64_t kPlainInterval = 128, kFirstPlainSteps = 5;

// Rounds down to a multiple of 1/8 of the power of two below it.
int64_t rounded(int64_t num_rows) {
  const int shift = std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(num_rows))) - 4);
  return num_rows >> shift << shift;
}

}  // namespace

// ---- times ----------------------------------------------------------------------------------------

double StepCost::relative(double num_rows) const {
  const auto bytes = [&](double rows) {
    return dense_bytes + expert_bytes * num_experts * (1 - std::pow(1 - top_k / num_experts, rows));
  };
  return bytes(num_rows) / bytes(1) + row_share * (num_rows - 1);
}

// A number of rows that was never measured has the factor between those of its neighbours.
double StepTimes::factor(int64_t num_rows) const {
  const auto above = points_.lower_bound(num_rows);
  if (above == points_.end()) return points_.empty() ? 1 : std::prev(above)->second.factor;
  if (above->first == num_rows || above == points_.begin()) return above->second.factor;
  const auto below = std::prev(above);
  const double share =
      static_cast<double>(num_rows - below->first) / static_cast<double>(above->first - below->first);
  return std::lerp(below->second.factor, above->second.factor, share);
}

double StepTimes::seconds(int64_t num_rows) const {
  return unit_ * prior_.relative(static_cast<double>(num_rows)) * factor(rounded(num_rows));
}

// The first steps with a number of rows teach its own time, the shortest of them most. A later deviation
// mostly affects other numbers of rows too and goes into the unit. A step is sometimes much longer than
// expected, because the machine does something else, but never much shorter: shorter steps count more.
void StepTimes::add(int64_t num_rows, double seconds) {
  constexpr double kMostFirst = 2, kMostLonger = 1.25, kFirstUnitShare = 1.0 / 8, kUnitShare = 3.0 / 4;
  constexpr int kNumFirst = 3, kMostSteps = 8;
  if (num_rows <= 0 || !(seconds > 0)) return;
  if (unit_ == 0) unit_ = seconds / prior_.relative(static_cast<double>(num_rows));
  const double before = factor(rounded(num_rows));
  Point& point = points_.try_emplace(rounded(num_rows), Point{before, 0}).first->second;
  point.num_steps = std::min(point.num_steps + 1, kMostSteps);
  const bool is_first = point.num_steps <= kNumFirst;
  double change = std::log(seconds / this->seconds(num_rows));
  if (change < 0)
    change /= is_first ? 1 : kNumFirst;
  else
    change = std::min(change, std::log(is_first ? kMostFirst : kMostLonger)) / (point.num_steps + 1);
  const double unit_share = is_first ? kFirstUnitShare : kUnitShare;
  point.factor *= std::exp(change * (1 - unit_share));
  unit_ *= std::exp(change * unit_share);
}

// ---- the choice -----------------------------------------------------------------------------------

void DraftChoice::add_verified(DraftRecord& record, int64_t num_seen, int64_t num_right) {
  if (num_seen <= 0) return;
  if (record.last_probe == num_choices_ && num_right == num_seen) {
    credit_ += token_seconds_;  // what the probe has gained
    record.last_probe = -1;     // the next probe is for this sequence too
  }
  record.add(num_seen, num_right, kOwnDecay);
  all_.add(num_seen, num_right, kSharedDecay);
}

void DraftChoice::add_step(int64_t num_sequences, int64_t num_rows, double seconds) {
  times_.add(num_rows, seconds);
  ++num_steps_;
  const double plain_seconds = times_.seconds(num_sequences), most = kMostCredit * plain_seconds;
  token_seconds_ = plain_seconds / static_cast<double>(num_sequences);
  credit_ = std::min(credit_ + kProbeShare * plain_seconds, most);
  if (num_rows > num_sequences) return;
  last_plain_ = num_steps_;
  if (++num_plain_ == kFirstPlainSteps) credit_ = most;
}

bool DraftChoice::needs_plain_step() const {
  return num_plain_ < kFirstPlainSteps || num_steps_ - last_plain_ >= kPlainInterval;
}

// Sets gains_ to the expected tokens of each possible draft, largest first; those of a sequence are in order.
// A position without counts is expected to be as good as the one before it.
void DraftChoice::list_gains(std::span<const Candidate> candidates) {
  constexpr double kLeastTokens = 1.0 / 64;
  gains_.clear();
  for (size_t c = 0; c < candidates.size(); ++c) {
    const DraftRecord& record = *candidates[c].record;
    const int64_t most = std::min(candidates[c].num_drafts, record.reach());
    double shared = kFirstRate, own = kFirstRate, tokens = 1;
    for (int64_t i = 0; i < most; ++i) {
      const auto position = static_cast<size_t>(i);
      shared = all_.rate(position, shared, kFirstWeight);
      own = record.rate(position, i == 0 ? shared : (shared + own) / 2, kSharedWeight);
      tokens *= own;
      if (tokens < kLeastTokens) break;
      gains_.push_back({tokens, c, i});
    }
  }
  std::ranges::stable_sort(gains_, std::greater<>(), &Gain::tokens);
}

void DraftChoice::choose(std::span<Candidate> candidates, int64_t num_rows, double draft_seconds) {
  ++num_choices_;
  list_gains(candidates);
  possible_.clear();
  int64_t most = 0;
  for (Candidate& candidate : candidates) {
    possible_.push_back(candidate.num_drafts);
    most = std::max(most, std::min(candidate.num_drafts, candidate.record->reach()));
    candidate.num_drafts = 0;
  }
  if (needs_plain_step() || num_rows == 0) return;
  // The best drafts of at most `depth` positions are the first ones in gains_.
  const double plain_seconds = times_.seconds(num_rows);
  double best = static_cast<double>(num_rows) / plain_seconds * kLeastGain;
  int64_t best_depth = 0, best_count = 0;
  for (int64_t depth = draft_seconds > 0 ? 1 : most; depth > 0 && depth <= most; ++depth) {
    double tokens = static_cast<double>(num_rows);
    int64_t count = 0;
    for (const Gain& gain : gains_) {
      if (gain.position >= depth) continue;
      tokens += gain.tokens;
      ++count;
      const double seconds = std::max(plain_seconds, times_.seconds(num_rows + count));
      const double rate = tokens / (seconds + draft_seconds * static_cast<double>(depth));
      if (rate <= best) continue;
      best = rate;
      best_depth = depth;
      best_count = count;
    }
  }
  for (const Gain& gain : gains_) {
    if (gain.position >= best_depth) continue;
    if (best_count-- == 0) break;
    ++candidates[gain.candidate].num_drafts;
  }
  probe(candidates, possible_, num_rows);
}

// Gives sequences one more draft than pays, those first that were probed least recently.
void DraftChoice::probe(std::span<Candidate> candidates, std::span<const int64_t> possible,
                        int64_t num_rows) {
  constexpr double kLeastCost =
      1.0 / 4;  // relative to a row's share of the step: measured times are uncertain
  std::vector<size_t> order;
  for (size_t c = 0; c < candidates.size(); ++c) {
    num_rows += candidates[c].num_drafts;
    if (candidates[c].num_drafts < std::min(possible[c], candidates[c].record->reach())) order.push_back(c);
  }
  std::ranges::stable_sort(order, {}, [&](size_t c) { return candidates[c].record->last_probe; });
  for (const size_t c : order) {
    const double now = times_.seconds(num_rows);
    const double cost =
        std::max(times_.seconds(num_rows + 1) - now, kLeastCost * now / static_cast<double>(num_rows));
    if (cost > credit_) return;
    credit_ -= cost;
    ++num_rows;
    ++candidates[c].num_drafts;
    candidates[c].record->last_probe = num_choices_;
  }
}

}  // namespace fp4moe
