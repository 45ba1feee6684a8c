// KvSender: sends one node's frames on a connection, on a dedicated thread. While it sends the parts of a
// transfer on a second thread, it reads the next ones. Messages are sent in order, and before parts that have
// not been read. Several transfers take turns: each sends one part, or the pages that are copied together, so
// that a long prompt or a large state delays neither the messages nor the transfers of other requests for
// long. A transfer whose next part is not open (KvLease) waits without delaying others.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/disagg/kv_lease.h"
#include "engine/disagg/kv_pipeline.h"
#include "engine/disagg/kv_socket.h"
#include "engine/disagg/kv_traffic.h"
#include "engine/disagg/kv_wire.h"

namespace fp4moe {

class KvSender {
 public:
  // Limits on queued payload bytes and queued items.
  static constexpr int64_t kMaxQueuedBytes = 256 << 20;
  static constexpr size_t kMaxQueuedItems = 1 << 16;

  // Counts the parts that it sends; the counters are borrowed while run() runs.
  explicit KvSender(KvTraffic& traffic) : traffic_(traffic) {}

  // Thread-safe; never waits for the connection. Items posted before run() are sent once it runs. Returns
  // false and drops the item if a queue limit is reached because the other node receives too slowly.
  [[nodiscard]] bool post(KvFrameType type, uint64_t room, std::string payload);
  // A room's transfer: the lease's parts (KvPageShape) from `first` on, under the number of their kTake.
  struct Transfer {
    std::shared_ptr<KvLease> pages;
    int64_t first = 0, take = 1;
    std::function<void(const Status&)> on_failure;
  };
  // Sends the parts, read one by one, or KvLease::num_together() of those that are open at a time, as the
  // connection accepts them. Stops when the lease ends, at a part that cannot be read, which on_failure
  // reports on run()'s thread, or if the room gets another transfer. Call wake() when parts were opened or
  // the lease has ended.
  [[nodiscard]] bool post_pages(uint64_t room, Transfer transfer);
  void wake();

  // Sends until stop(). If the connection breaks or memory runs out, shuts the connection down for the
  // receiver too.
  void run(KvSocket& socket, uint64_t epoch) noexcept;
  void stop();

 private:
  struct Item {
    KvFrameType type;
    uint64_t room = 0;
    std::string payload;
    std::shared_ptr<KvLease> pages;  // if set, sent instead of the payload
    int64_t next = 0;                // part to send
    int64_t take = 0;
    int64_t num_open = 0;                // parts that were open when it was popped, and no message waited
    KvTraffic::Clock::time_point since;  // posted, without the time since then that no part was open
    std::optional<KvTraffic::Clock::time_point> waits_since;  // no part is open
    std::function<void(const Status&)> on_failure;
    bool is_transfer_of(uint64_t other) const { return pages != nullptr && room == other; }
    bool can_be_sent() const { return pages == nullptr || next < pages->num_open().value_or(next + 1); }
  };
  // Frames that are ready to be sent.
  struct Sealed {
    std::vector<uint8_t> frames;  // the first num_bytes bytes; the rest is memory for others
    size_t num_bytes = 0;
    std::function<void()> on_sent;  // may be null
  };
  using Outbox = KvPipeline<Sealed>;
  bool push(Item item);
  bool pop(Item& item);
  std::deque<Item>::iterator next_item();
  void put_back(Item item);
  Status send(KvSocket& socket, uint64_t epoch, Item& item);
  Status send_parts(uint64_t epoch, Item& item);
  Status send_read(Item& item, int64_t end, Sealed sealed, KvTraffic::Clock::duration copy);
  Status send_sealed(KvSocket& socket, Sealed& sealed);
  std::vector<uint8_t> memory_for(size_t num_bytes);

  KvTraffic& traffic_;
  std::optional<Outbox> outbox_;             // used on run()'s thread, from the first transfer on
  std::vector<std::vector<uint8_t>> spare_;  // memory of sent frames
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  int64_t queued_bytes_ = 0;  // payload bytes
  bool stopped_ = false;
};

}  // namespace fp4moe
