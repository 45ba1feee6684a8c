#include "engine/disagg/decode_node.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/guarded.h"
#include "base/printable.h"
#include "engine/disagg/decode_peer.h"

namespace fp4moe {
namespace {

constexpr int64_t kMessageBytes = 256 << 20;  // budget for first tokens being received, over all peers

std::string name_of(const NodeAddress& address) {
  const bool is_v6 = address.host.find(':') != std::string::npos;
  return (is_v6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

}  // namespace

DecodeNode::DecodeNode(DecodeNodeOptions options, std::function<void(KvEvent)> on_event)
    : options_(std::move(options)),
      on_event_(std::move(on_event)),
      budget_(ByteBudget::make(kMessageBytes)) {}

DecodeNode::~DecodeNode() = default;

Status DecodeNode::check(const std::string& prefill_node) const {
  FP4MOE_ASSIGN_OR_RETURN(const NodeAddress address, parse_node_address(prefill_node));
  return options_.link.allowed_hosts.check(address);
}

Result<uint64_t> DecodeNode::ask(const Request& request) {
  const uint64_t room = ++num_rooms_;
  const Status status = guarded([&] { return enter(room, request); });
  if (!status.ok()) return status;
  return room;
}

Status DecodeNode::enter(uint64_t room, const Request& request) {
  FP4MOE_RETURN_IF_ERROR(check(request.prefill_node));
  FP4MOE_ASSIGN_OR_RETURN(const NodeAddress address, parse_node_address(request.prefill_node));
  const std::string name = name_of(address);
  std::string payload = encode_prefill(request);
  if (std::ssize(payload) > kMaxKvMessageBytes)
    return does_not_fit("the request to the prefill node has " + std::to_string(payload.size()) +
                        " bytes; the maximum is " + std::to_string(kMaxKvMessageBytes));
  forget_idle_peers();
  const auto found = peers_.find(name);
  Peer* peer = found != peers_.end() ? found->second.get() : nullptr;
  auto asked = Peer::Asked::kEnded;
  if (peer != nullptr) asked = peer->ask(room, request.id, std::move(payload));
  std::unique_ptr<Peer> made;
  if (asked == Peer::Asked::kEnded) {
    FP4MOE_ASSIGN_OR_RETURN(made, make_peer(name, address));
    peer = made.get();
    asked = peer->ask(room, request.id, std::move(payload));
  }
  if (asked != Peer::Asked::kYes)
    return unavailable("prefill node " + name + ": too many requests are waiting to be sent");
  if (made != nullptr) {
    const Status started = guarded([&]() -> Status {
      peer->start();
      return {};
    });
    FP4MOE_RETURN_IF_ERROR(started.with_context("prefill node " + name + ": no thread for its connection"));
    peers_[name] = std::move(made);
  }
  rooms_[room] = peer;
  return {};
}

// Replaces the previous connection to this node, if there was one.
Result<std::unique_ptr<DecodeNode::Peer>> DecodeNode::make_peer(const std::string& name,
                                                                const NodeAddress& address) {
  std::string last_error;
  if (const auto before = peers_.find(name); before != peers_.end()) {
    last_error = before->second->last_error();
    forget(before);
  }
  FP4MOE_RETURN_IF_ERROR(make_room_for_peer());
  return std::make_unique<Peer>(*this, name, address, std::move(last_error));
}

void DecodeNode::forget(Peers::iterator peer) {
  std::erase_if(rooms_, [&](const auto& room) { return room.second == peer->second.get(); });
  peers_.erase(peer);
}

void DecodeNode::forget_idle_peers() {
  const auto long_ago = Peer::Clock::now() - std::chrono::seconds(static_cast<int>(kIdleSeconds));
  for (auto it = peers_.begin(); it != peers_.end();) {
    const auto peer = it++;
    if (peer->second->idle_since() < long_ago) forget(peer);
  }
}

// Ended connections are evicted before idle ones.
Status DecodeNode::make_room_for_peer() {
  if (std::ssize(peers_) < options_.link.max_connections) return {};
  auto idlest = peers_.end();
  std::pair<bool, Peer::Clock::time_point> least{true, Peer::Clock::time_point::max()};
  for (auto peer = peers_.begin(); peer != peers_.end(); ++peer) {
    const std::pair key(peer->second->state() != Peer::State::kEnded, peer->second->idle_since());
    if (key >= least) continue;
    least = key;
    idlest = peer;
  }
  if (idlest == peers_.end())
    return unavailable("this decode node already has requests on " + std::to_string(peers_.size()) +
                       " prefill nodes (--disaggregation-max-connections)");
  forget(idlest);
  return {};
}

void DecodeNode::set_hello(KvHello hello) {
  rooms_.clear();
  peers_.clear();
  options_.hello = std::move(hello);
}

void DecodeNode::take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first) {
  if (const auto found = rooms_.find(room); found != rooms_.end())
    found->second->take(room, std::move(pages), first);
}

void DecodeNode::release(uint64_t room) {
  const auto found = rooms_.find(room);
  if (found == rooms_.end()) return;
  found->second->release(room);
  rooms_.erase(found);
}

}  // namespace fp4moe
