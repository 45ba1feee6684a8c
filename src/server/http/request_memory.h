// RequestMemory: one budget for the bytes of all requests that have not reached the engine yet.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace fp4moe {

// Thread-safe. Over the limit, the largest request that is still arriving is evicted, so that many large or
// unfinished requests cannot lock out small ones.
class RequestMemory {
 public:
  class Holder {
   public:
    virtual ~Holder() = default;
    // The holder was evicted and must refuse the request and free its memory. Called once, from any thread,
    // while the RequestMemory's lock is held, so the work must be posted, not done here.
    virtual void give_way() = 0;
  };

  explicit RequestMemory(int64_t limit) : limit_(limit) {}

  // Sets the bytes that `holder` holds; 0 removes it, which is required before its destruction. A holder can
  // be evicted while `is_arriving`. False: the bytes do not fit, and the previous number is kept.
  bool set(Holder& holder, int64_t bytes, bool is_arriving);
  int64_t total() const;
  int64_t limit() const { return limit_; }

 private:
  struct Share {
    int64_t bytes = 0;
    bool is_arriving = false;
    bool gives_way = false;
  };
  bool make_room(int64_t bytes, bool is_arriving);

  const int64_t limit_;
  mutable std::mutex mutex_;
  int64_t total_ = 0;    // of all shares
  int64_t leaving_ = 0;  // of evicted holders that have not freed theirs yet
  std::unordered_map<Holder*, Share> shares_;
  std::set<std::pair<int64_t, Holder*>> arriving_;  // evictable holders, by size
};

}  // namespace fp4moe
