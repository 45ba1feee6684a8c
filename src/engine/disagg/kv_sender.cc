#include "engine/disagg/kv_sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/guarded.h"

namespace fp4moe {
namespace {

constexpr size_t kHeaderBytes = sizeof(KvFrameHeader) + sizeof(KvPageHeader);  // of a part's frame

}  // namespace

// A transfer replaces the room's transfer before it, which put_back() drops if it is being read.
bool KvSender::push(Item item) {
  if (!item.can_be_sent()) item.waits_since = item.since;
  const int64_t num_bytes = std::ssize(item.payload);
  std::lock_guard lock(mutex_);
  if (item.pages != nullptr)
    std::erase_if(items_, [&](const Item& other) { return other.is_transfer_of(item.room); });
  if (items_.size() >= kMaxQueuedItems || queued_bytes_ + num_bytes > kMaxQueuedBytes) return false;
  items_.push_back(std::move(item));
  queued_bytes_ += num_bytes;
  changed_.notify_one();
  return true;
}

bool KvSender::post(KvFrameType type, uint64_t room, std::string payload) {
  return push({.type = type, .room = room, .payload = std::move(payload)});
}

bool KvSender::post_pages(uint64_t room, Transfer transfer) {
  return push({.type = KvFrameType::kPage,
               .room = room,
               .pages = std::move(transfer.pages),
               .next = transfer.first,
               .take = transfer.take,
               .since = KvTraffic::Clock::now(),
               .on_failure = std::move(transfer.on_failure)});
}

void KvSender::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_one();
}

void KvSender::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_one();
}

// Returns the first message, otherwise the first transfer that can go on, otherwise end().
std::deque<KvSender::Item>::iterator KvSender::next_item() {
  const auto message = std::ranges::find(items_, nullptr, &Item::pages);
  if (message != items_.end()) return message;
  return std::ranges::find_if(items_, &Item::can_be_sent);
}

// False after stop().
bool KvSender::pop(Item& item) {
  std::unique_lock lock(mutex_);
  auto next = items_.end();
  changed_.wait(lock, [&] { return stopped_ || (next = next_item()) != items_.end(); });
  if (stopped_) return false;
  item = std::move(*next);
  items_.erase(next);
  queued_bytes_ -= std::ssize(item.payload);
  if (item.waits_since) item.since += KvTraffic::Clock::now() - *item.waits_since;
  // Parts that open after this follow the messages that are posted before they open.
  if (item.pages != nullptr) item.num_open = item.pages->num_open().value_or(item.next + 1);
  return true;
}

void KvSender::run(KvSocket& socket, uint64_t epoch) noexcept {
  const Status status = guarded([&]() -> Status {
    for (Item item; pop(item);) {
      FP4MOE_RETURN_IF_ERROR(send(socket, epoch, item));
      if (item.pages != nullptr) put_back(std::move(item));
    }
    return {};
  });
  if (!status.ok()) socket.shut_down();
  outbox_.reset();
}

// Not subject to the queue's limits, which the item has passed before. Drops it if the room has another
// transfer now.
void KvSender::put_back(Item item) {
  item.waits_since.reset();
  if (!item.can_be_sent()) item.waits_since = KvTraffic::Clock::now();
  std::lock_guard lock(mutex_);
  const auto is_same = [&](const Item& other) { return other.is_transfer_of(item.room); };
  if (std::ranges::none_of(items_, is_same)) items_.push_back(std::move(item));
}

// Messages take the transfers' way once there is one, so that all frames keep their order.
Status KvSender::send(KvSocket& socket, uint64_t epoch, Item& item) {
  if (item.pages != nullptr) {
    if (!outbox_) outbox_.emplace([this, &socket](Sealed& sealed) { return send_sealed(socket, sealed); });
    return send_parts(epoch, item);
  }
  std::vector<uint8_t> frame = kv_frame(item.type, epoch, item.room, std::string_view(item.payload));
  if (!outbox_) return socket.send(frame);
  const size_t num_bytes = frame.size();
  return outbox_->put({std::move(frame), num_bytes, {}});
}

// Called on the outbox's thread.
Status KvSender::send_sealed(KvSocket& socket, Sealed& sealed) {
  const Status status =
      guarded([&] { return socket.send(std::span(sealed.frames).first(sealed.num_bytes)); });
  if (!status.ok()) socket.shut_down();  // run() may be waiting for the next item
  if (status.ok() && sealed.on_sent) sealed.on_sent();
  return status;
}

std::vector<uint8_t> KvSender::memory_for(size_t num_bytes) {
  for (Sealed& sent : outbox_->take_done())
    if (sent.on_sent) spare_.push_back(std::move(sent.frames));
  std::vector<uint8_t> memory;
  if (!spare_.empty()) {
    memory = std::move(spare_.back());
    spare_.pop_back();
  }
  if (memory.size() < num_bytes) memory.resize(num_bytes);
  return memory;
}

// Reads and sends the next open parts, each in its own frame. Clears item.pages at the end of the transfer.
Status KvSender::send_parts(uint64_t epoch, Item& item) {
  const KvPageShape shape = item.pages->shape();
  const int64_t first = item.next;
  const int64_t end = std::min(first + item.pages->num_together(first), item.num_open);
  if (end <= first) return {};  // withdrawn
  const auto frame_bytes = [&](int64_t part) {
    return kHeaderBytes + static_cast<size_t>(shape.bytes_of(part));
  };
  Sealed sealed;
  for (int64_t part = first; part < end; ++part) sealed.num_bytes += frame_bytes(part);
  sealed.frames = memory_for(sealed.num_bytes);
  std::vector<std::span<uint8_t>> frames, parts;
  for (size_t at = 0; std::ssize(frames) < end - first; at += frames.back().size()) {
    const int64_t index = first + std::ssize(frames);
    const KvPageHeader part{.index = index, .num_tokens = shape.tokens_of(index), .take = item.take};
    frames.push_back(std::span(sealed.frames).subspan(at, frame_bytes(part.index)));
    open_kv_frame(item.type, epoch, item.room, frames.back());
    std::memcpy(kv_payload(frames.back()).data(), &part, sizeof part);
    parts.push_back(kv_payload(frames.back()).subspan(sizeof part));
  }
  const auto before = KvTraffic::Clock::now();
  if (const Status status = item.pages->read(first, parts); !status.ok()) {
    spare_.push_back(std::move(sealed.frames));
    if (status.code() == StatusCode::kCancelled && !item.pages->has_ended()) return {};  // withdrawn
    item.pages = nullptr;
    if (status.code() != StatusCode::kCancelled) item.on_failure(status);
    return {};
  }
  const auto copy = KvTraffic::Clock::now() - before;
  for (const std::span<uint8_t> frame : frames) seal_kv_frame(frame);
  return send_read(item, end, std::move(sealed), copy);
}

Status KvSender::send_read(Item& item, int64_t end, Sealed sealed, KvTraffic::Clock::duration copy) {
  const int64_t num_frames = end - item.next;
  const auto num_bytes = static_cast<int64_t>(sealed.num_bytes) - num_frames * int64_t{kHeaderBytes};
  const bool is_last = end == item.pages->shape().num_parts();
  sealed.on_sent = [this, num_bytes, copy, is_last, since = item.since] {
    traffic_.count_parts(num_bytes, copy);
    if (is_last) traffic_.count_transfer(KvTraffic::Clock::now() - since);
  };
  FP4MOE_RETURN_IF_ERROR(outbox_->put(std::move(sealed)));
  item.next = end;
  if (is_last) item.pages = nullptr;
  return {};
}

}  // namespace fp4moe
