// DecodeNode: a decode engine's side of the connections to prefill nodes (engine/disagg/kv_wire.h).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/log_limit.h"
#include "engine/disagg/byte_budget.h"
#include "engine/disagg/kv_lease.h"
#include "engine/disagg/kv_traffic.h"
#include "engine/disagg/kv_wire.h"
#include "engine/disagg/node_link.h"

namespace fp4moe {

// An event of a request that was sent to a prefill node.
struct KvEvent {
  enum class Kind { kFirstToken, kArrived, kFailed };
  Kind kind = Kind::kFailed;
  uint64_t room = 0;
  std::string id;                  // of the request
  FirstToken first;                // kFirstToken
  std::shared_ptr<KvLease> pages;  // kArrived: the lease that they were written to
  Status status;                   // kFailed; names the prefill node
};

struct DecodeNodeOptions {
  KvHello hello;
  int64_t max_page_bytes = 0;  // largest payload of a kPage frame
  NodeLinkOptions link;
};

// Connects to a prefill node when a request first names it, and reconnects at the first request after a
// failure. Keeps at most options.link.max_connections prefill nodes. A new node replaces one whose connection
// has failed, or the one that has had no rooms for longest; if all have rooms, its request is refused. Nodes
// without rooms for kIdleSeconds are dropped at the next request.
// Call ask(), take(), release() and set_hello() from one thread; check() is thread-safe.
class DecodeNode {
 public:
  static constexpr double kIdleSeconds = 600;

  // on_event is called on this object's threads until the destructor returns.
  DecodeNode(DecodeNodeOptions options, std::function<void(KvEvent)> on_event);
  ~DecodeNode();

  // Whether a request may name this prefill node. kInvalidArgument if it is not an address or not in
  // --disaggregation-allowed-hosts. Host names are not resolved.
  Status check(const std::string& prefill_node) const;
  // Sends the request, which must have a seed, to its prefill node and returns its room; on_event reports the
  // progress. Errors: those of check(); kDoesNotFit: the request is too large for a message; kUnavailable:
  // too many prefill nodes, too much data queued for this one, or no thread could be created.
  Result<uint64_t> ask(const Request& request);
  // Requests the parts of the transfer (KvPageShape) from `first` on (that part must exist) and writes them
  // to the lease, which must be open; the prefill node sends them as it completes them. Reports kArrived,
  // after kFirstToken, when all have arrived; the room is then released. If the lease ends before, parts for
  // it are dropped, and the room stays: call this again with another lease.
  void take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first);
  // Ends the room: no further events except those already queued. No effect if it is already released.
  void release(uint64_t room);
  // Ends all connections and rooms; later requests connect with this hello.
  void set_hello(KvHello hello);

  KvTrafficTotals traffic() const { return traffic_.totals(); }
  int num_peers() const { return static_cast<int>(peers_.size()); }  // call on ask()'s thread

 private:
  class Peer;
  using Peers = std::map<std::string, std::unique_ptr<Peer>>;  // by address
  void forget(Peers::iterator peer);
  void forget_idle_peers();
  Status make_room_for_peer();
  Status enter(uint64_t room, const Request& request);
  Result<std::unique_ptr<Peer>> make_peer(const std::string& name, const NodeAddress& address);

  DecodeNodeOptions options_;  // the hello changes only while there are no peers
  const std::function<void(KvEvent)> on_event_;
  LogLimit log_limit_;
  KvTraffic traffic_;
  const std::shared_ptr<ByteBudget> budget_;
  uint64_t num_rooms_ = 0;
  Peers peers_;
  std::map<uint64_t, Peer*> rooms_;  // rooms not yet released
};

}  // namespace fp4moe
