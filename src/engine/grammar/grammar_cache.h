// Caches of a GrammarStore: compiled grammars, and compilation failures. Single-threaded.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/grammar/grammar.h"

namespace fp4moe {

// LRU cache, keyed by grammar text; the most recently used entry is first.
class GrammarCache {
 public:
  using GrammarPtr = std::shared_ptr<const Grammar>;

  explicit GrammarCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  GrammarPtr find(const std::string& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return entries_.front().grammar;
  }

  // Returns the evicted grammars, which can be large, so that the caller can free them outside of locks.
  std::vector<GrammarPtr> add(const std::string& key, GrammarPtr grammar) {
    std::vector<GrammarPtr> gone;
    if (by_key_.contains(key)) return gone;
    const int64_t num_bytes = grammar->num_bytes() + 2 * static_cast<int64_t>(key.size());
    entries_.push_front({key, std::move(grammar), num_bytes});
    by_key_[key] = entries_.begin();
    num_bytes_ += num_bytes;
    while (num_bytes_ > max_bytes_) {
      num_bytes_ -= entries_.back().num_bytes;
      by_key_.erase(entries_.back().key);
      gone.push_back(std::move(entries_.back().grammar));
      entries_.pop_back();
    }
    return gone;
  }

 private:
  struct Entry {
    std::string key;
    GrammarPtr grammar;
    int64_t num_bytes = 0;
  };
  const int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  std::list<Entry> entries_;
  std::map<std::string, std::list<Entry>::iterator> by_key_;
};

// Failed compilations with their errors. Entries expire; the oldest are dropped first.
class GrammarFailures {
 public:
  using Clock = std::chrono::steady_clock;

  GrammarFailures(Clock::duration time, int max_failures, int64_t max_bytes)
      : time_(time), max_failures_(max_failures), max_bytes_(max_bytes) {}

  // The recorded error, or OK if there is none.
  Status find(const std::string& key, Clock::time_point now) {
    while (!by_age_.empty() && by_age_.front().first <= now) forget_oldest();
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? Status() : found->second;
  }

  void add(const std::string& key, const Status& status, Clock::time_point now) {
    if (by_key_.contains(key)) return;
    num_bytes_ += bytes_of(key, status);
    by_age_.emplace_back(now + time_, by_key_.emplace(key, status).first);
    while (std::ssize(by_age_) > max_failures_ || num_bytes_ > max_bytes_) forget_oldest();
  }

 private:
  using Map = std::map<std::string, Status>;
  static int64_t bytes_of(const std::string& key, const Status& status) {
    return static_cast<int64_t>(key.size() + status.message().size());
  }
  void forget_oldest() {
    const Map::iterator oldest = by_age_.front().second;
    num_bytes_ -= bytes_of(oldest->first, oldest->second);
    by_key_.erase(oldest);
    by_age_.pop_front();
  }

  const Clock::duration time_;
  const int max_failures_;
  const int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  Map by_key_;
  std::list<std::pair<Clock::time_point, Map::iterator>> by_age_;  // expiry time, entry
};

}  // namespace fp4moe
