#include "engine/disagg/decode_peer.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/guarded.h"
#include "engine/disagg/kv_handshake.h"

namespace fp4moe {
DecodeNode::Peer::Peer(DecodeNode& node, std::string name, NodeAddress address, std::string last_error)
    : node_(node),
      name_(std::move(name)),
      address_(std::move(address)),
      sender_(node.traffic_),
      last_error_(std::move(last_error)) {}

DecodeNode::Peer::~Peer() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  shut_down();
  if (thread_.joinable()) thread_.join();
}

void DecodeNode::Peer::shut_down() {
  std::lock_guard lock(mutex_);
  if (socket_ != nullptr) socket_->shut_down();
}

void DecodeNode::Peer::start() {
  thread_ = std::thread([this] { run(); });
}

DecodeNode::Peer::Asked DecodeNode::Peer::ask(uint64_t room, const std::string& id, std::string&& payload) {
  std::lock_guard lock(mutex_);
  if (state_ == State::kEnded) return Asked::kEnded;
  rooms_[room] = {.id = id};
  if (sender_.post(KvFrameType::kPrefill, room, std::move(payload))) return Asked::kYes;
  rooms_.erase(room);
  return Asked::kFull;
}

void DecodeNode::Peer::take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first) {
  std::lock_guard lock(mutex_);
  const auto found = rooms_.find(room);
  if (found == rooms_.end()) return;  // its failure event is queued
  found->second.pages = std::move(pages);
  found->second.next_page = first;
  ++found->second.num_takes;
  found->second.since = Clock::now();
  std::string payload(sizeof first, '\0');
  std::memcpy(payload.data(), &first, sizeof first);
  if (!sender_.post(KvFrameType::kTake, room, std::move(payload)) && socket_ != nullptr) socket_->shut_down();
}

void DecodeNode::Peer::release(uint64_t room) {
  std::lock_guard lock(mutex_);
  if (rooms_.erase(room) == 0) return;
  if (rooms_.empty()) idle_since_ = Clock::now();
  if (!sender_.post(KvFrameType::kRelease, room, {}) && socket_ != nullptr) socket_->shut_down();
}

DecodeNode::Peer::State DecodeNode::Peer::state() {
  std::lock_guard lock(mutex_);
  return state_;
}

DecodeNode::Peer::Clock::time_point DecodeNode::Peer::idle_since() {
  std::lock_guard lock(mutex_);
  const bool is_busy = state_ == State::kConnecting || !rooms_.empty();
  return is_busy ? Clock::time_point::max() : idle_since_;
}

void DecodeNode::Peer::run() noexcept {
  const Status status = guarded([this] { return converse(); });
  writer_.reset();  // pages that have arrived are written, and their requests continue
  sender_.stop();
  shut_down();  // the prefill node then gives back the pages and slots that it holds for the rooms
  if (sending_.joinable()) sending_.join();
  end(status);
}

// Skips steps for which there is no memory; the rooms end in any case.
void DecodeNode::Peer::end(const Status& status) noexcept {
  Status error(StatusCode::kUnavailable, "no memory");
  static_cast<void>(guarded([&]() -> Status {
    error = unavailable(at_peer(status).message());
    const bool is_new = std::exchange(last_error_, error.message()) != error.message();
    // An unreachable node fails every request that names it; log it once.
    std::unique_lock lock(mutex_);
    if (!is_new || closing_) return {};
    lock.unlock();
    node_.log_limit_.log(LogLevel::kWarning, "disaggregation: " + error.message());
    return {};
  }));
  std::map<uint64_t, Room> rooms;
  {
    std::lock_guard lock(mutex_);
    state_ = State::kEnded;
    idle_since_ = Clock::now();
    rooms.swap(rooms_);
  }
  for (const auto& [room, r] : rooms)
    static_cast<void>(guarded([&, room = room, id = &r.id]() -> Status {
      node_.on_event_({.room = room, .id = *id, .status = error});
      return {};
    }));
}

// Runs until the connection ends; never returns OK.
Status DecodeNode::Peer::converse() {
  const NodeLinkOptions& link = node_.options_.link;
  KvSocketOptions options{.timeout_seconds = link.timeout_seconds, .budget = node_.budget_};
  FP4MOE_ASSIGN_OR_RETURN(auto socket, KvSocket::connect(address_, !link.secret->is_set(), options));
  {
    std::lock_guard lock(mutex_);
    if (closing_) return cancelled("the engine is stopping");
    socket_ = std::move(socket);
  }
  const auto end_by = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                         std::chrono::duration<double>(link.timeout_seconds));
  FP4MOE_ASSIGN_OR_RETURN(const KvHello hello,
                          greet_prefill_node(*socket_, node_.options_.hello, *link.secret, end_by));
  log_info("disaggregation: connected to prefill node " + name_);
  last_error_.clear();
  {
    std::lock_guard lock(mutex_);
    state_ = State::kOpen;
  }
  writer_.emplace([this](Pending& pending) {
    const Status status = guarded([&] { return write(pending); });
    if (!status.ok()) shut_down();  // nothing else may arrive
    return status;
  });
  sending_ = std::thread([this, epoch = hello.epoch] { sender_.run(*socket_, epoch); });
  const KvLegal legal{
      .stage = KvStage::kToDecode, .epoch = hello.epoch, .max_page_bytes = node_.options_.max_page_bytes};
  for (;;) {
    FP4MOE_ASSIGN_OR_RETURN(KvFrame frame, socket_->receive(legal));
    FP4MOE_RETURN_IF_ERROR(take_in(frame));
  }
}

// Frames for a released room are dropped. A failure comes after the pages that were sent before it.
Status DecodeNode::Peer::take_in(KvFrame& frame) {
  const uint64_t room = frame.header.room;
  if (frame.header.type == KvFrameType::kFailed) FP4MOE_RETURN_IF_ERROR(writer_->drain());
  if (frame.header.type == KvFrameType::kFailed && room == 0) return decode_failure(frame.payload);
  Room found;
  {
    std::lock_guard lock(mutex_);
    const auto it = rooms_.find(room);
    if (it == rooms_.end()) return {};
    found = it->second;
  }
  if (frame.header.type == KvFrameType::kPage) return take_page(room, found, std::move(frame.payload));
  if (frame.header.type == KvFrameType::kFirstToken) return take_first_token(room, found.id, frame.payload);
  {
    std::lock_guard lock(mutex_);
    rooms_.erase(room);
    if (rooms_.empty()) idle_since_ = Clock::now();
  }
  node_.on_event_({.room = room, .id = found.id, .status = at_peer(decode_failure(frame.payload))});
  return {};
}

Status DecodeNode::Peer::take_first_token(uint64_t room, const std::string& id,
                                          std::span<const uint8_t> payload) {
  FP4MOE_ASSIGN_OR_RETURN(FirstToken first, decode_first_token(payload));
  {
    std::lock_guard lock(mutex_);
    if (const auto found = rooms_.find(room); found != rooms_.end()) {
      found->second.has_first_token = true;
      found->second.since = Clock::now();
    }
  }
  node_.on_event_({.kind = KvEvent::Kind::kFirstToken, .room = room, .id = id, .first = std::move(first)});
  return {};
}

// Keeps the page until those that are written with it have arrived, or another room's pages come in between.
// Drops it if it answers an earlier take().
Status DecodeNode::Peer::take_page(uint64_t room, const Room& found, std::vector<uint8_t>&& payload) {
  if (found.pages == nullptr) return data_loss("received a page that was not requested");
  const KvPageShape shape = found.pages->shape();
  FP4MOE_ASSIGN_OR_RETURN(const KvPageHeader page, decode_page(payload, shape));
  if (page.take > 0 && page.take < found.num_takes) return {};
  if (page.take != found.num_takes)
    return data_loss("received a page for request " + std::to_string(page.take) + " of " +
                     std::to_string(found.num_takes));
  if (page.index != found.next_page)
    return data_loss("received page " + std::to_string(page.index) + ", expected page " +
                     std::to_string(found.next_page));
  if (page.index + 1 == shape.num_parts() && !found.has_first_token)
    return data_loss("received the last page before the first token");
  if (pending_.pages != found.pages) FP4MOE_RETURN_IF_ERROR(hand_over_pending());
  if (pending_.payloads.empty()) {
    pending_.room = room;
    pending_.id = found.id;
    pending_.pages = found.pages;
    pending_.first = page.index;
  }
  pending_.since = found.since;
  pending_.payloads.push_back(std::move(payload));
  {
    std::lock_guard lock(mutex_);
    const auto it = rooms_.find(room);
    if (it != rooms_.end() && it->second.num_takes == found.num_takes) ++it->second.next_page;
  }
  if (std::ssize(pending_.payloads) == pending_.pages->num_together(pending_.first))
    return hand_over_pending();
  return {};
}

Status DecodeNode::Peer::hand_over_pending() {
  if (pending_.payloads.empty()) return {};
  FP4MOE_RETURN_IF_ERROR(writer_->put(std::exchange(pending_, {})));
  for (Pending& written : writer_->take_done())
    for (std::vector<uint8_t>& payload : written.payloads) socket_->reuse(std::move(payload));
  return {};
}

// Called on the writer's thread. Errors of the copies end the request, except that the lease has ended; an
// error that is returned ends the connection.
Status DecodeNode::Peer::write(Pending& pending) {
  const int64_t end = pending.first + std::ssize(pending.payloads);
  const bool is_last = end == pending.pages->shape().num_parts();
  int64_t num_bytes = 0;
  std::vector<std::span<const uint8_t>> parts;
  for (const std::vector<uint8_t>& payload : pending.payloads) {
    parts.push_back(std::span(payload).subspan(sizeof(KvPageHeader)));
    num_bytes += std::ssize(parts.back());
  }
  const auto before = Clock::now();
  const Status status = pending.pages->write(pending.first, parts);
  node_.traffic_.count_parts(num_bytes, Clock::now() - before);
  const std::shared_ptr<KvLease> pages = std::exchange(pending.pages, nullptr);
  if (status.code() == StatusCode::kCancelled) return {};
  if (!status.ok()) {
    release(pending.room);
    node_.on_event_({.room = pending.room, .id = pending.id, .status = status});
    return {};
  }
  if (!is_last) return {};
  node_.traffic_.count_transfer(Clock::now() - pending.since);
  release(pending.room);
  node_.on_event_({.kind = KvEvent::Kind::kArrived, .room = pending.room, .id = pending.id, .pages = pages});
  return {};
}

}  // namespace fp4moe
