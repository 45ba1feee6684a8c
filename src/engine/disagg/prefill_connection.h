// PrefillNode::Connection: one decode node's connection, from hello to end.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/disagg/kv_sender.h"
#include "engine/disagg/kv_socket.h"
#include "engine/disagg/prefill_node.h"

namespace fp4moe {

class PrefillNode::Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { kGreeting, kOpen, kEnding, kEnded };

  Connection(PrefillNode& node, std::unique_ptr<KvSocket> socket);
  void start();  // throws std::system_error if no thread can be created
  // Starts to end the connection. In kEnding it counts only towards the limit on threads.
  void shut_down();
  // Sends the reason behind all frames posted so far; the decode node then closes the connection. Without an
  // open connection, works like shut_down(). Not while open() may be called.
  void end(const Status& reason);
  void join() { thread_.join(); }
  State state() const { return state_.load(); }
  // kGreeting -> kOpen. Returns false if the connection is ending.
  bool open();
  // When the last room was closed; time_point::max() while there are rooms.
  Clock::time_point idle_since();

 private:
  struct Room {
    std::shared_ptr<KvLease> pages;  // null until the prompt is submitted
    std::vector<SampledToken> scored;
    int64_t num_takes = 0;  // requests for the pages
  };

  void run() noexcept;
  Status converse();
  Status take_in(const KvFrame& frame);
  Status start_prompt(uint64_t room, std::span<const uint8_t> payload);
  Status submit(uint64_t room, std::span<const uint8_t> payload);
  void on_held(uint64_t room, FirstToken first);
  Status send_first_token(uint64_t room, FirstToken& first);
  void on_delta(uint64_t room, const Delta& delta);
  void fail_room(uint64_t room, const Status& status);
  bool leave(uint64_t room);
  void post(KvFrameType type, uint64_t room, std::string payload);
  Status send_pages(uint64_t room, std::span<const uint8_t> payload);
  std::string id_of(uint64_t room) const;

  PrefillNode& node_;
  StepLoop& loop_;  // outlives node_: the engine's thread may be in on_held() while the node is destroyed
  const std::unique_ptr<KvSocket> socket_;
  const std::string peer_;
  const uint64_t epoch_;
  KvSender sender_;
  std::mutex mutex_;
  std::map<uint64_t, Room> rooms_;
  Clock::time_point idle_since_ = Clock::now();
  std::atomic<State> state_{State::kGreeting};
  std::thread sending_, thread_;
};

}  // namespace fp4moe
