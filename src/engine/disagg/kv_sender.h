// KvSender: sends one node's frames on a connection, on a dedicated thread. While it sends the parts of a
// transfer on a second thread, it reads the next ones. Messages are sent in order; of
// several transfers, each sends one part in turn, or the pages that are copied together, so that a long
// prompt or a large state delays neither the messages nor the transfers of other requests for long.
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
  // Sends the parts of the lease's transfer (KvPageShape) from `first` on, read one by one, or
  // KvLease::num_together() at a time, as the connection accepts them. Stops when the lease ends, or at a
  // part that cannot be read, which on_failure reports on run()'s thread.
  [[nodiscard]] bool post_pages(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first,
                                std::function<void(const Status&)> on_failure);

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
    KvTraffic::Clock::time_point posted;
    std::function<void(const Status&)> on_failure;
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
  void put_back(Item item);
  Status send(KvSocket& socket, uint64_t epoch, Item& item);
  Status send_parts(uint64_t epoch, Item& item);
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
