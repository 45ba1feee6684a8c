// PrefillNode: a prefill engine's listening port and its side of the connections from decode nodes
// (engine/disagg/kv_wire.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/log_limit.h"
#include "engine/disagg/byte_budget.h"
#include "engine/disagg/kv_listener.h"
#include "engine/disagg/kv_traffic.h"
#include "engine/disagg/kv_wire.h"
#include "engine/disagg/node_link.h"
#include "engine/step/step_loop.h"

namespace fp4moe {

// A connection has one thread until its hello is complete, then two, and three from its first transfer on.
// When it ends, all its prompts are released.
//
// Limits that keep strangers on the port from exhausting the process:
// - after a burst of kAcceptBurst, one connection is accepted every kAcceptInterval; a decode node needs one;
// - at most kMaxGreeting connections are in their hello, which must end within options.timeout_seconds;
//   another one ends the oldest of them;
// - at most options.max_connections are open after their hello; another one replaces the one that has had no
//   rooms for longest, or is refused if all have rooms;
// - without a free file descriptor, the oldest connection in its hello ends, and new ones are closed until
//   descriptors are free;
// - a connection for which there is no thread or no memory ends, without affecting others;
// - messages being received take at most kMessageBytes in total.
class PrefillNode {
 public:
  static constexpr size_t kMaxGreeting = 16;
  static constexpr int64_t kMessageBytes = 128 << 20;
  static constexpr int kAcceptBurst = 32;
  static constexpr std::chrono::milliseconds kAcceptInterval{5};

  // Listens on host:port; kInvalidArgument or kUnavailable if that fails. The loop is borrowed. hello.epoch
  // is ignored.
  static Result<std::unique_ptr<PrefillNode>> make(StepLoop& loop, KvHello hello, const std::string& host,
                                                   int port, NodeLinkOptions options = {});
  ~PrefillNode();

  // Later connections greet with this hello. Open ones end: their decode nodes get `reason`, and nothing that
  // is computed after this call.
  void set_hello(KvHello hello, const Status& reason);

  int port() const { return listener_.port(); }
  KvTrafficTotals traffic() const { return traffic_.totals(); }
  // Connections whose threads have not ended.
  int num_connections() const;

 private:
  class Connection;
  PrefillNode(StepLoop& loop, KvHello hello, NodeLinkOptions options);
  void accept() noexcept;
  void wait_to_accept();
  void add(int descriptor);
  void reap();
  size_t num_greeting() const;
  void end_oldest_greeting();
  uint64_t hello_of_connection(KvHello& hello) const;
  Status admit(Connection& connection, uint64_t num_hellos);
  void log(LogLevel level, const std::string& line) { log_limit_.log(level, "disaggregation: " + line); }

  StepLoop& loop_;
  const NodeLinkOptions options_;
  const std::shared_ptr<ByteBudget> budget_ = ByteBudget::make(kMessageBytes);
  KvListener listener_;
  LogLimit log_limit_;
  KvTraffic traffic_;
  std::chrono::steady_clock::time_point accepts_from_;  // end of the last connection's accept interval
  mutable std::mutex mutex_;
  KvHello hello_;
  uint64_t num_hellos_ = 0;                               // by set_hello()
  std::vector<std::shared_ptr<Connection>> connections_;  // oldest first
  std::thread thread_;
};

}  // namespace fp4moe
