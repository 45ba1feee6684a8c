// DecodeNode::Peer: one connection to a prefill node. When the connection ends, all its rooms end.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/disagg/decode_node.h"
#include "engine/disagg/kv_pipeline.h"
#include "engine/disagg/kv_sender.h"
#include "engine/disagg/kv_socket.h"

namespace fp4moe {

class DecodeNode::Peer {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { kConnecting, kOpen, kEnded };
  enum class Asked { kYes, kEnded, kFull };

  // last_error: why the previous connection ended; the same error is not logged again.
  Peer(DecodeNode& node, std::string name, NodeAddress address, std::string last_error);
  ~Peer();  // ends the connection; may wait for a connect in progress

  void start();  // throws std::system_error if no thread can be created
  // kEnded: the connection has ended; the payload is unchanged and needs a new Peer. kFull: too much data is
  // queued.
  Asked ask(uint64_t room, const std::string& id, std::string&& payload);
  void take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first);
  void release(uint64_t room);

  State state();
  // When the last room was closed; time_point::max() while there are rooms or the connection is being made.
  Clock::time_point idle_since();
  // Only valid once the connection has ended.
  const std::string& last_error() const { return last_error_; }

 private:
  struct Room {
    std::string id;
    std::shared_ptr<KvLease> pages;  // of the last take()
    int64_t num_takes = 0;
    int64_t next_page = 0;
    bool has_first_token = false;
    Clock::time_point since;  // the first token has arrived, and take() was called
  };

  void run() noexcept;
  Status converse();
  void shut_down();
  void end(const Status& status) noexcept;
  // Pages of one room that have arrived and are written together.
  struct Pending {
    uint64_t room = 0;
    std::string id;
    std::shared_ptr<KvLease> pages;
    int64_t first = 0;                           // number of the first
    std::vector<std::vector<uint8_t>> payloads;  // with their KvPageHeaders
    Clock::time_point since;                     // as in Room
  };
  Status take_in(KvFrame& frame);
  Status take_first_token(uint64_t room, const std::string& id, std::span<const uint8_t> payload);
  Status take_page(uint64_t room, const Room& found, std::vector<uint8_t>&& payload);
  Status hand_over_pending();
  Status write(Pending& pending);
  Status at_peer(const Status& status) const { return status.with_context("prefill node " + name_); }

  DecodeNode& node_;
  const std::string name_;
  const NodeAddress address_;
  KvSender sender_;
  std::mutex mutex_;
  std::unique_ptr<KvSocket> socket_;
  std::map<uint64_t, Room> rooms_;
  State state_ = State::kConnecting;
  Clock::time_point idle_since_ = Clock::now();
  std::string last_error_;  // owned by run()'s thread until the connection has ended
  bool closing_ = false;
  Pending pending_;                            // used on run()'s thread, like writer_; no payloads: none
  std::optional<KvPipeline<Pending>> writer_;  // writes pages while the next ones arrive
  std::thread sending_, thread_;
};

}  // namespace fp4moe
