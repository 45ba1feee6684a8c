// PrefillNode: the port of a prefill engine, and its side of the connections from decode nodes
// (engine/kv_wire.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/kv_socket.h"
#include "engine/kv_wire.h"
#include "engine/step_loop.h"

namespace fp4moe {

// Two threads a connection. When one ends, all that it asked for is released.
class PrefillNode {
 public:
  // Listens; kInvalidArgument or kUnavailable if that cannot be. The loop is borrowed. hello.epoch is
  // ignored.
  static Result<std::unique_ptr<PrefillNode>> make(StepLoop& loop, KvHello hello, const std::string& host,
                                                   int port);
  ~PrefillNode();

  int port() const { return listener_.port(); }
  int64_t page_bytes_sent() const;

 private:
  class Connection;
  PrefillNode(StepLoop& loop, KvHello hello) : loop_(loop), hello_(std::move(hello)) {}
  void accept();

  StepLoop& loop_;
  const KvHello hello_;
  KvListener listener_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Connection>> connections_;
  int64_t ended_bytes_ = 0;  // sent by connections that have ended
  std::thread thread_;
};

}  // namespace fp4moe
