#include "engine/prefill_node.h"

#include <cstdio>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/kv_sender.h"

namespace fp4moe {
namespace {

constexpr double kHelloSeconds = 10;

uint64_t random_epoch() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;  // never 0
}

}  // namespace

class PrefillNode::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(PrefillNode& node, std::unique_ptr<KvSocket> socket)
      : node_(node), socket_(std::move(socket)), peer_(socket_->peer()), epoch_(random_epoch()) {}
  void start() {
    thread_ = std::thread([this] { run(); });
  }
  void shut_down() { socket_->shut_down(); }
  void join() { thread_.join(); }
  bool has_ended() const { return ended_.load(); }
  int64_t page_bytes_sent() const { return sender_.page_bytes_sent(); }

 private:
  struct Room {
    std::shared_ptr<KvLease> pages;  // null until they are held
    std::vector<SampledToken> scored;
  };

  void run() {
    const Status status = converse();
    log_info("disaggregation: decode node " + peer_ + ": " + status.message());
    sender_.stop();
    if (sending_.joinable()) sending_.join();
    socket_->shut_down();
    std::map<uint64_t, Room> rooms;
    {
      std::lock_guard lock(mutex_);
      rooms.swap(rooms_);
    }
    for (const auto& [room, r] : rooms) node_.loop_.release_prompt(id_of(room));
    ended_.store(true);
  }

  // Until the connection ends; never OK.
  Status converse() {
    FP4MOE_ASSIGN_OR_RETURN(const KvFrame greeting, socket_->receive_within(kHelloSeconds, 0, 0));
    FP4MOE_ASSIGN_OR_RETURN(const KvHello theirs, decode_kv_hello(greeting.payload));
    if (const Status same = compare_hello(node_.hello_, theirs); !same.ok()) {
      FP4MOE_RETURN_IF_ERROR(
          socket_->send(kv_frame(KvFrameType::kFailed, 0, 0, std::string_view(encode_failure(same)))));
      return same;
    }
    const std::string hello = encode_kv_hello({epoch_, node_.hello_.facts});
    FP4MOE_RETURN_IF_ERROR(socket_->send(kv_frame(KvFrameType::kHello, 0, 0, std::string_view(hello))));
    log_info("disaggregation: decode node " + peer_ + " is connected");
    sending_ = std::thread([this] { sender_.run(*socket_, epoch_); });
    for (;;) {
      FP4MOE_ASSIGN_OR_RETURN(const KvFrame frame, socket_->receive(epoch_, 0));
      FP4MOE_RETURN_IF_ERROR(take_in(frame));
    }
  }

  Status take_in(const KvFrame& frame) {
    const uint64_t room = frame.header.room;
    switch (frame.header.type) {
      case KvFrameType::kPrefill:
        return start_prompt(room, frame.payload);
      case KvFrameType::kTake:
        return send_pages(room, frame.payload);
      case KvFrameType::kRelease: {
        std::lock_guard lock(mutex_);
        if (rooms_.erase(room) == 0) return {};
        break;
      }
      default:
        return data_loss("a frame of type " + std::to_string(static_cast<uint32_t>(frame.header.type)) +
                         " from a decode node");
    }
    node_.loop_.release_prompt(id_of(room));
    return {};
  }

  Status start_prompt(uint64_t room, std::span<const uint8_t> payload) {
    {
      std::lock_guard lock(mutex_);
      if (room == 0 || !rooms_.emplace(room, Room()).second)
        return data_loss("room " + std::to_string(room) + " is in use, or none");
    }
    Result<Request> request = decode_prefill(payload);
    Status status = request.status();
    if (status.ok()) {
      request->id = id_of(room);
      const auto on_held = [weak = weak_from_this(), room](HeldPrompt prompt) {
        if (const auto self = weak.lock()) self->on_held(room, std::move(prompt));
      };
      const auto on_delta = [weak = weak_from_this(), room](const Delta& delta) {
        if (const auto self = weak.lock()) self->on_delta(room, delta);
      };
      status = node_.loop_.submit_prompt(std::move(*request), on_held, on_delta).status();
    }
    if (!status.ok()) fail_room(room, status);
    return {};
  }

  // On the engine's thread.
  void on_held(uint64_t room, HeldPrompt prompt) {
    std::lock_guard lock(mutex_);
    const auto found = rooms_.find(room);
    if (found == rooms_.end()) return;  // its release is on its way
    found->second.pages = std::move(prompt.pages);
    prompt.first.scored = std::move(found->second.scored);
    std::string payload = encode_first_token(prompt.first);
    if (std::ssize(payload) > kMaxKvMessageBytes)
      throw std::length_error("the prompt's log-probabilities have " + std::to_string(payload.size()) +
                              " bytes, legal are " + std::to_string(kMaxKvMessageBytes));
    sender_.post(KvFrameType::kFirstToken, room, std::move(payload));
  }

  // On the engine's thread: scores of the prompt, or the end of a request that was not released.
  void on_delta(uint64_t room, const Delta& delta) {
    if (delta.finish_reason != FinishReason::kNone) return fail_room(room, {delta.error_code, delta.error});
    std::lock_guard lock(mutex_);
    const auto found = rooms_.find(room);
    if (found == rooms_.end()) return;
    for (const auto& [chosen, top] : delta.prompt_logprobs)
      found->second.scored.push_back({chosen.token_id, chosen.logprob, top});
  }

  void fail_room(uint64_t room, const Status& status) {
    std::lock_guard lock(mutex_);
    if (rooms_.erase(room) > 0) sender_.post(KvFrameType::kFailed, room, encode_failure(status));
  }

  Status send_pages(uint64_t room, std::span<const uint8_t> payload) {
    FP4MOE_ASSIGN_OR_RETURN(const int64_t first, decode_take(payload));
    std::lock_guard lock(mutex_);
    const auto found = rooms_.find(room);
    if (found == rooms_.end()) return {};  // it has failed, which the decode node will hear
    const std::shared_ptr<KvLease>& pages = found->second.pages;
    if (pages == nullptr) return data_loss("pages are asked for before their first token");
    if (const int64_t num_pages = pages->shape().num_pages(); first < 0 || first >= num_pages)
      return data_loss("page " + std::to_string(first) + " is asked for, legal are 0 to " +
                       std::to_string(num_pages - 1));
    sender_.post_pages(room, pages, first, [weak = weak_from_this(), room](const Status& status) {
      const auto self = weak.lock();
      if (self == nullptr) return;
      self->fail_room(room, status);
      self->node_.loop_.release_prompt(self->id_of(room));
    });
    return {};
  }

  std::string id_of(uint64_t room) const {
    char id[48];
    std::snprintf(id, sizeof id, "room-%016llx-%llu", static_cast<unsigned long long>(epoch_),
                  static_cast<unsigned long long>(room));
    return id;
  }

  PrefillNode& node_;
  const std::unique_ptr<KvSocket> socket_;
  const std::string peer_;
  const uint64_t epoch_;
  KvSender sender_;
  std::mutex mutex_;
  std::map<uint64_t, Room> rooms_;
  std::atomic<bool> ended_{false};
  std::thread sending_, thread_;
};

Result<std::unique_ptr<PrefillNode>> PrefillNode::make(StepLoop& loop, KvHello hello, const std::string& host,
                                                       int port) {
  std::unique_ptr<PrefillNode> node(new PrefillNode(loop, std::move(hello)));
  FP4MOE_RETURN_IF_ERROR(node->listener_.listen(host, port).with_context("disaggregation bootstrap port"));
  node->thread_ = std::thread([raw = node.get()] { raw->accept(); });
  return node;
}

PrefillNode::~PrefillNode() {
  listener_.shut_down();
  if (thread_.joinable()) thread_.join();
  for (const auto& connection : connections_) connection->shut_down();
  for (const auto& connection : connections_) connection->join();
}

void PrefillNode::accept() {
  while (std::unique_ptr<KvSocket> socket = listener_.accept()) {
    const auto connection = std::make_shared<Connection>(*this, std::move(socket));
    std::lock_guard lock(mutex_);
    std::erase_if(connections_, [this](const auto& c) {
      if (!c->has_ended()) return false;
      c->join();
      ended_bytes_ += c->page_bytes_sent();
      return true;
    });
    connections_.push_back(connection);
    connection->start();
  }
}

int64_t PrefillNode::page_bytes_sent() const {
  std::lock_guard lock(mutex_);
  int64_t total = ended_bytes_;
  for (const auto& connection : connections_) total += connection->page_bytes_sent();
  return total;
}

}  // namespace fp4moe
