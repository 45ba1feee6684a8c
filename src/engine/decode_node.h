// DecodeNode: a decode engine's side of the connections to prefill nodes (engine/kv_wire.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/log_limit.h"
#include "engine/byte_budget.h"
#include "engine/kv_lease.h"
#include "engine/kv_wire.h"
#include "engine/node_link.h"

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

struct DecodeNodeOptions {
  KvHello hello;
  int64_t max_page_bytes = 0;  // of a page's payload
  NodeLinkOptions link;
};

// A connection is made when a prefill node is first asked, and made anew when it is asked after a failure. At
// most options.link.max_connections prefill nodes are remembered: one more takes the place of one that failed
// or that has had no room for longest, and is refused where all have rooms. Those without rooms for
// kIdleSeconds are forgotten at the next request.
// ask, take and release are for one thread; check for any.
class DecodeNode {
 public:
  static constexpr double kIdleSeconds = 600;

  // on_news is called on threads of this object, until its destructor.
  DecodeNode(DecodeNodeOptions options, std::function<void(KvNews)> on_news);
  ~DecodeNode();

  // Whether a request may name this prefill node: kInvalidArgument if it is not an address, or is not in
  // --disaggregation-allowed-hosts. Nothing is resolved.
  Status check(const std::string& prefill_node) const;
  // The room in which its prefill node computes the request, which names a seed; what follows is reported as
  // KvNews. As check(), or kUnavailable: too many prefill nodes, too much that waits to be sent, no thread.
  Result<uint64_t> ask(const Request& request);
  // After the first token: fills the lease's pages from `first` on, of which there is one; news when all are
  // there, and then the room is released.
  void take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first);
  // The request has left its room: no news follows but what is on its way. Released rooms are ignored.
  void release(uint64_t room);

  int64_t page_bytes_received() const { return page_bytes_.load(); }
  int num_peers() const { return static_cast<int>(peers_.size()); }  // for the thread of ask()

 private:
  class Peer;
  using Peers = std::map<std::string, std::unique_ptr<Peer>>;  // by address
  void forget(Peers::iterator peer);
  void forget_idle_peers();
  Status make_room_for_peer();
  Status enter(uint64_t room, const Request& request);
  Result<std::unique_ptr<Peer>> make_peer(const std::string& name, const NodeAddress& address);

  const DecodeNodeOptions options_;
  const std::function<void(KvNews)> on_news_;
  LogLimit log_limit_;
  std::atomic<int64_t> page_bytes_{0};
  const std::shared_ptr<ByteBudget> budget_;
  uint64_t num_rooms_ = 0;
  Peers peers_;
  std::map<uint64_t, Peer*> rooms_;  // that were not released
};

}  // namespace fp4moe
