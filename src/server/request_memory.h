// RequestMemory: one budget for the bytes of all requests that have not reached the engine yet.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace fp4moe {

// Thread-safe. Beyond the limit the largest request that is still arriving gives way, so that many large or
// unfinished requests cannot keep small ones out.
class RequestMemory {
 public:
  class Holder {
   public:
    virtual ~Holder() = default;
    // The request is to be refused and its memory freed. Called once, from any thread, under a lock: only to
    // hand the news on.
    virtual void give_way() = 0;
  };

  explicit RequestMemory(int64_t limit) : limit_(limit) {}

  // Replaces what `holder` holds; 0 forgets it, and must come before its end. While `is_arriving` it may be
  // chosen to give way. False: there is no room for so many, and the holder keeps its former number.
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
  int64_t leaving_ = 0;  // of those that give way
  std::unordered_map<Holder*, Share> shares_;
  std::set<std::pair<int64_t, Holder*>> arriving_;  // those that may be chosen, by size
};

}  // namespace fp4moe
