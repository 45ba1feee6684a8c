#include "engine/disagg/prefill_connection.h"

#include <cstdio>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/guarded.h"
#include "engine/disagg/kv_handshake.h"

namespace fp4moe {
namespace {

constexpr size_t kMaxRooms = 1 << 16;  // per connection

uint64_t random_epoch() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;  // never 0
}

}  // namespace

PrefillNode::Connection::Connection(PrefillNode& node, std::unique_ptr<KvSocket> socket)
    : node_(node),
      loop_(node.loop_),
      socket_(std::move(socket)),
      peer_(socket_->peer()),
      epoch_(random_epoch()),
      sender_(node.traffic_) {}

void PrefillNode::Connection::start() {
  thread_ = std::thread([this] { run(); });
}

void PrefillNode::Connection::shut_down() {
  for (State now = state_.load(); now == State::kGreeting || now == State::kOpen;)
    if (state_.compare_exchange_weak(now, State::kEnding)) break;
  socket_->shut_down();
}

void PrefillNode::Connection::end(const Status& reason) {
  if (state_.load() != State::kOpen) return shut_down();
  post(KvFrameType::kFailed, 0, encode_failure(reason));
}

bool PrefillNode::Connection::open() {
  State expected = State::kGreeting;
  return state_.compare_exchange_strong(expected, State::kOpen);
}

PrefillNode::Connection::Clock::time_point PrefillNode::Connection::idle_since() {
  std::lock_guard lock(mutex_);
  return rooms_.empty() ? idle_since_ : Clock::time_point::max();
}

void PrefillNode::Connection::run() noexcept {
  const Status status = guarded([this] { return converse(); });
  const bool was_ended = state() == State::kEnding;
  shut_down();
  sender_.stop();
  if (sending_.joinable()) sending_.join();
  static_cast<void>(guarded([&]() -> Status {
    node_.log(LogLevel::kInfo, "decode node " + peer_ + ": " +
                                   (was_ended ? "closed by this node, which is stopping or needs the slot"
                                              : status.message()));
    return {};
  }));
  std::map<uint64_t, Room> rooms;
  {
    std::lock_guard lock(mutex_);
    rooms.swap(rooms_);
  }
  for (const auto& entry : rooms)
    static_cast<void>(guarded([&]() -> Status {
      loop_.release_prompt(id_of(entry.first));
      return {};
    }));
  state_.store(State::kEnded);
  node_.listener_.wake();
}

// Runs until the connection ends; never returns OK.
Status PrefillNode::Connection::converse() {
  const auto end_by = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                         std::chrono::duration<double>(node_.options_.timeout_seconds));
  KvHello hello{.epoch = epoch_};
  const uint64_t num_hellos = node_.hello_of_connection(hello);
  FP4MOE_RETURN_IF_ERROR(greet_decode_node(*socket_, hello, *node_.options_.secret, end_by,
                                           [&] { return node_.admit(*this, num_hellos); }));
  node_.log(LogLevel::kInfo, "decode node " + peer_ + " is connected");
  sending_ = std::thread([this] { sender_.run(*socket_, epoch_); });
  for (;;) {
    FP4MOE_ASSIGN_OR_RETURN(const KvFrame frame,
                            socket_->receive({.stage = KvStage::kToPrefill, .epoch = epoch_}));
    FP4MOE_RETURN_IF_ERROR(take_in(frame));
  }
}

Status PrefillNode::Connection::take_in(const KvFrame& frame) {
  const uint64_t room = frame.header.room;
  if (frame.header.type == KvFrameType::kPrefill) return start_prompt(room, frame.payload);
  if (frame.header.type == KvFrameType::kTake) return send_pages(room, frame.payload);
  if (leave(room)) loop_.release_prompt(id_of(room));  // kRelease
  return {};
}

Status PrefillNode::Connection::start_prompt(uint64_t room, std::span<const uint8_t> payload) {
  {
    std::lock_guard lock(mutex_);
    if (rooms_.size() >= kMaxRooms)
      return data_loss("more than " + std::to_string(kMaxRooms) + " rooms at a time");
    if (room == 0 || !rooms_.emplace(room, Room()).second)
      return data_loss("room " + std::to_string(room) + " is invalid or already in use");
  }
  const Status status = guarded([&] { return submit(room, payload); });
  if (!status.ok()) fail_room(room, status);
  return {};
}

Status PrefillNode::Connection::submit(uint64_t room, std::span<const uint8_t> payload) {
  FP4MOE_ASSIGN_OR_RETURN(Request request, decode_prefill(payload));
  request.id = id_of(room);
  const auto on_held = [weak = weak_from_this(), room](FirstToken first) {
    if (const auto self = weak.lock()) self->on_held(room, std::move(first));
  };
  const auto on_delta = [weak = weak_from_this(), room](const Delta& delta) {
    if (const auto self = weak.lock()) self->on_delta(room, delta);
  };
  FP4MOE_ASSIGN_OR_RETURN(const std::shared_ptr<KvLease> pages,
                          loop_.submit_prompt(std::move(request), on_held, on_delta));
  pages->watch([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->sender_.wake();
  });
  std::lock_guard lock(mutex_);
  if (const auto found = rooms_.find(room); found != rooms_.end()) found->second.pages = pages;
  return {};
}

// Called on the engine's thread.
void PrefillNode::Connection::on_held(uint64_t room, FirstToken first) {
  const Status status = guarded([&] { return send_first_token(room, first); });
  if (status.ok()) return;
  fail_room(room, status);
  loop_.release_prompt(id_of(room));
}

Status PrefillNode::Connection::send_first_token(uint64_t room, FirstToken& first) {
  {
    std::lock_guard lock(mutex_);
    const auto found = rooms_.find(room);
    if (found == rooms_.end()) return {};  // its kRelease is being processed
    first.scored = std::move(found->second.scored);
  }
  std::string payload = encode_first_token(first);
  if (std::ssize(payload) > kMaxKvMessageBytes)
    return does_not_fit("the prompt's log-probabilities and experts have " + std::to_string(payload.size()) +
                        " bytes; the maximum is " + std::to_string(kMaxKvMessageBytes));
  std::lock_guard lock(mutex_);
  if (rooms_.contains(room)) post(KvFrameType::kFirstToken, room, std::move(payload));
  return {};
}

// Called on the engine's thread with scores of the prompt, or when the request ends without a release.
void PrefillNode::Connection::on_delta(uint64_t room, const Delta& delta) {
  if (delta.finish_reason != FinishReason::kNone) return fail_room(room, {delta.error_code, delta.error});
  std::lock_guard lock(mutex_);
  const auto found = rooms_.find(room);
  if (found == rooms_.end()) return;
  for (const auto& [chosen, top, ids] : delta.prompt_logprobs)
    found->second.scored.push_back({chosen.token_id, chosen.logprob, top, ids});
}

void PrefillNode::Connection::fail_room(uint64_t room, const Status& status) {
  if (leave(room)) post(KvFrameType::kFailed, room, encode_failure(status));
}

// Returns false if the room does not exist.
bool PrefillNode::Connection::leave(uint64_t room) {
  std::lock_guard lock(mutex_);
  if (rooms_.erase(room) == 0) return false;
  if (rooms_.empty()) idle_since_ = Clock::now();
  return true;
}

void PrefillNode::Connection::post(KvFrameType type, uint64_t room, std::string payload) {
  if (!sender_.post(type, room, std::move(payload))) shut_down();
}

Status PrefillNode::Connection::send_pages(uint64_t room, std::span<const uint8_t> payload) {
  FP4MOE_ASSIGN_OR_RETURN(const int64_t first, decode_take(payload));
  std::lock_guard lock(mutex_);
  const auto found = rooms_.find(room);
  if (found == rooms_.end()) return {};  // it has failed, and the kFailed frame is queued
  const std::shared_ptr<KvLease>& pages = found->second.pages;
  if (const int64_t num_parts = pages->shape().num_parts(); first < 0 || first >= num_parts)
    return data_loss("page " + std::to_string(first) + " was requested; expected 0 to " +
                     std::to_string(num_parts - 1));
  const auto on_failure = [weak = weak_from_this(), room](const Status& status) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->fail_room(room, status);
    self->loop_.release_prompt(self->id_of(room));
  };
  if (sender_.post_pages(room, {pages, first, ++found->second.num_takes, on_failure})) return {};
  return unavailable("the other side reads frames too slowly");
}

std::string PrefillNode::Connection::id_of(uint64_t room) const {
  char id[48];
  std::snprintf(id, sizeof id, "room-%016llx-%llu", static_cast<unsigned long long>(epoch_),
                static_cast<unsigned long long>(room));
  return id;
}

}  // namespace fp4moe
