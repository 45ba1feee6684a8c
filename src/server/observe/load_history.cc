#include "server/observe/load_history.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace fp4moe {

namespace {

constexpr auto kPause = std::chrono::seconds(1);

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// Keeps only one entry older than the longest window.
void LoadHistory::add(double now, const std::vector<int64_t>& counts) {
  if (!seen_.empty() && seen_.back().counts == counts) {
    seen_.back().last = now;
  } else {
    seen_.push_back({now, now, counts});
  }
  while (seen_.size() > 1 && seen_[1].first <= now - longest_) seen_.pop_front();
}

LoadHistory::Since LoadHistory::before(double now, double window) const {
  const double begin = now - window;
  const auto after =
      std::find_if(seen_.begin(), seen_.end(), [&](const Seen& seen) { return seen.first > begin; });
  if (after == seen_.begin()) return {now - start_, {}};
  const Seen& base = *std::prev(after);
  return {now - std::min(base.last, begin), base.counts};
}

LoadWatch::LoadWatch(std::function<ExpertLoad()> read)
    : read_(std::move(read)), history_(seconds_now(), kLongestWindow), thread_([this] { watch(); }) {}

LoadWatch::~LoadWatch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void LoadWatch::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    history_.add(seconds_now(), read_().tokens);
    stopped_.wait_for(lock, kPause, [this] { return stopping_; });
  }
}

LoadWatch::Window LoadWatch::last(double window) const {
  std::lock_guard lock(mutex_);
  Window latest{0, read_()};
  const double now = seconds_now();
  if (window == 0) {
    latest.seconds = now - history_.start();
    return latest;
  }
  const LoadHistory::Since since = history_.before(now, window);
  latest.seconds = since.seconds;
  for (size_t i = 0; i < since.counts.size(); ++i) latest.load.tokens[i] -= since.counts[i];
  return latest;
}

}  // namespace fp4moe
