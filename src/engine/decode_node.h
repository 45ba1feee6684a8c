// DecodeNode: a decode engine's side of the connections to prefill nodes (engine/kv_wire.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/kv_lease.h"
#include "engine/kv_wire.h"

namespace fp4moe {

// What has become of a request that was asked for.
struct KvNews {
  enum class Kind { kFirstToken, kArrived, kFailed };
  Kind kind = Kind::kFailed;
  uint64_t room = 0;
  std::string id;    // of the request
  FirstToken first;  // kFirstToken
  Status status;     // kFailed; names the prefill node
};

// A connection is made when a prefill node is first asked, and made anew when it is asked after a failure.
// ask, take and release are for one thread.
class DecodeNode {
 public:
  // max_page_bytes: of a page's payload. on_news is called on threads of this object, until its destructor.
  DecodeNode(KvHello hello, int64_t max_page_bytes, std::function<void(KvNews)> on_news);
  ~DecodeNode();

  // The room in which its prefill node computes the request, which names a seed. Whatever follows is news.
  Result<uint64_t> ask(const Request& request);
  // After the first token: fills the lease's pages from `first` on, of which there is one; news when all are
  // there, and then the room is released.
  void take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first);
  // Nobody waits for it any more: no news that is not on its way. Nothing for rooms that are released.
  void release(uint64_t room);

  int64_t page_bytes_received() const { return page_bytes_->load(); }

 private:
  class Peer;
  const KvHello hello_;
  const int64_t max_page_bytes_;
  const std::function<void(KvNews)> on_news_;
  const std::shared_ptr<std::atomic<int64_t>> page_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  uint64_t num_rooms_ = 0;
  std::map<std::string, std::unique_ptr<Peer>> peers_;  // by address
  std::map<uint64_t, Peer*> rooms_;                     // that were not released
};

}  // namespace fp4moe
