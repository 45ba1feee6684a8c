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

bool KvSender::push(Item item) {
  const int64_t num_bytes = std::ssize(item.payload);
  std::lock_guard lock(mutex_);
  if (items_.size() >= kMaxQueuedItems || queued_bytes_ + num_bytes > kMaxQueuedBytes) return false;
  items_.push_back(std::move(item));
  queued_bytes_ += num_bytes;
  changed_.notify_one();
  return true;
}

bool KvSender::post(KvFrameType type, uint64_t room, std::string payload) {
  return push({.type = type, .room = room, .payload = std::move(payload)});
}

bool KvSender::post_pages(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first,
                          std::function<void(const Status&)> on_failure) {
  return push({.type = KvFrameType::kPage,
               .room = room,
               .pages = std::move(pages),
               .next = first,
               .posted = KvTraffic::Clock::now(),
               .on_failure = std::move(on_failure)});
}

void KvSender::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_one();
}

// False after stop().
bool KvSender::pop(Item& item) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || !items_.empty(); });
  if (stopped_) return false;
  item = std::move(items_.front());
  items_.pop_front();
  queued_bytes_ -= std::ssize(item.payload);
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

// Not subject to the queue's limits, which the item has passed before.
void KvSender::put_back(Item item) {
  std::lock_guard lock(mutex_);
  items_.push_back(std::move(item));
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

// Sends the next parts, each in its own frame. Clears item.pages at the end of the transfer.
Status KvSender::send_parts(uint64_t epoch, Item& item) {
  const KvPageShape shape = item.pages->shape();
  const int64_t first = item.next, end = first + item.pages->num_together(first);
  const auto frame_bytes = [&](int64_t part) {
    return kHeaderBytes + static_cast<size_t>(shape.bytes_of(part));
  };
  Sealed sealed;
  for (int64_t part = first; part < end; ++part) sealed.num_bytes += frame_bytes(part);
  sealed.frames = memory_for(sealed.num_bytes);
  std::vector<std::span<uint8_t>> frames, parts;
  for (size_t at = 0; std::ssize(frames) < end - first; at += frames.back().size()) {
    const KvPageHeader part{first + std::ssize(frames), shape.tokens_of(first + std::ssize(frames))};
    frames.push_back(std::span(sealed.frames).subspan(at, frame_bytes(part.index)));
    open_kv_frame(item.type, epoch, item.room, frames.back());
    std::memcpy(kv_payload(frames.back()).data(), &part, sizeof part);
    parts.push_back(kv_payload(frames.back()).subspan(sizeof part));
  }
  const auto before = KvTraffic::Clock::now();
  if (const Status status = item.pages->read(first, parts); !status.ok()) {
    item.pages = nullptr;
    spare_.push_back(std::move(sealed.frames));
    if (status.code() != StatusCode::kCancelled) item.on_failure(status);
    return {};
  }
  const auto copy = KvTraffic::Clock::now() - before;
  for (const std::span<uint8_t> frame : frames) seal_kv_frame(frame);
  const auto num_bytes = static_cast<int64_t>(sealed.num_bytes - frames.size() * kHeaderBytes);
  const bool is_last = end == shape.num_parts();
  sealed.on_sent = [this, num_bytes, copy, is_last, posted = item.posted] {
    traffic_.count_parts(num_bytes, copy);
    if (is_last) traffic_.count_transfer(KvTraffic::Clock::now() - posted);
  };
  FP4MOE_RETURN_IF_ERROR(outbox_->put(std::move(sealed)));
  item.next = end;
  if (is_last) item.pages = nullptr;
  return {};
}

}  // namespace fp4moe
