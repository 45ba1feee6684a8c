#include "engine/decode_node.h"

#include <cstring>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/kv_sender.h"
#include "engine/kv_socket.h"

namespace fp4moe {
namespace {

constexpr double kConnectSeconds = 5, kHelloSeconds = 10;

struct Place {
  std::string host;
  int port = 0;
};

// "host:port", "[address]:port".
Result<Place> parse_place(const std::string& text) {
  const size_t colon = text.rfind(':');
  const std::string digits = colon == std::string::npos ? "" : text.substr(colon + 1);
  const bool is_port =
      !digits.empty() && digits.size() <= 5 && digits.find_first_not_of("0123456789") == std::string::npos;
  Place place{text.substr(0, colon), is_port ? std::stoi(digits) : 0};
  if (place.host.size() > 2 && place.host.front() == '[' && place.host.back() == ']')
    place.host = place.host.substr(1, place.host.size() - 2);
  if (place.host.empty() || place.port < 1 || place.port > 65535)
    return invalid_argument("prefill node \"" + text + "\"; legal: host:port");
  return place;
}

}  // namespace

// A connection to one prefill node, from its making to its end, which ends all its rooms.
class DecodeNode::Peer {
 public:
  // said: how the connection before it ended, as the log has it.
  Peer(const DecodeNode& node, std::string name, Place place, std::string said)
      : node_(node), name_(std::move(name)), place_(std::move(place)), said_(std::move(said)) {}
  ~Peer() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
      if (socket_ != nullptr) socket_->shut_down();
    }
    if (thread_.joinable()) thread_.join();
  }

  void start() {
    thread_ = std::thread([this] { run(); });
  }
  // Of a connection that has ended: what the log says of it, or of one before it.
  const std::string& said() const { return said_; }
  // False: the connection has ended, and this object is of no more use.
  bool ask(uint64_t room, const std::string& id, std::string payload) {
    std::lock_guard lock(mutex_);
    if (ended_) return false;
    rooms_[room] = {.id = id};
    sender_.post(KvFrameType::kPrefill, room, std::move(payload));
    return true;
  }
  void take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first) {
    std::lock_guard lock(mutex_);
    const auto found = rooms_.find(room);
    if (found == rooms_.end()) return;  // news of it is on its way
    found->second.pages = std::move(pages);
    found->second.next_page = first;
    std::string payload(sizeof first, '\0');
    std::memcpy(payload.data(), &first, sizeof first);
    sender_.post(KvFrameType::kTake, room, std::move(payload));
  }
  void release(uint64_t room) {
    std::lock_guard lock(mutex_);
    if (rooms_.erase(room) > 0) sender_.post(KvFrameType::kRelease, room, {});
  }

 private:
  struct Room {
    std::string id;
    std::shared_ptr<KvLease> pages;  // after take()
    int64_t next_page = 0;
  };

  void run() {
    const Status status = converse();
    sender_.stop();
    if (sending_.joinable()) sending_.join();
    std::map<uint64_t, Room> rooms;
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
      if (!closing_) say(at_peer(status).message());
      rooms.swap(rooms_);
    }
    for (const auto& [room, r] : rooms)
      node_.on_news_({.room = room, .id = r.id, .status = unavailable(at_peer(status).message())});
  }

  // A node that stays away fails every request that names it, and is said once.
  void say(const std::string& message) {
    if (message != said_) log_warning("disaggregation: " + message);
    said_ = message;
  }

  // Until the connection ends; never OK.
  Status converse() {
    FP4MOE_ASSIGN_OR_RETURN(auto socket, KvSocket::connect(place_.host, place_.port, kConnectSeconds));
    {
      std::lock_guard lock(mutex_);
      if (closing_) return cancelled("the engine ends");
      socket_ = std::move(socket);
    }
    FP4MOE_RETURN_IF_ERROR(
        socket_->send(kv_frame(KvFrameType::kHello, 0, 0, std::string_view(encode_kv_hello(node_.hello_)))));
    FP4MOE_ASSIGN_OR_RETURN(const KvFrame reply, socket_->receive_within(kHelloSeconds, 0, 0));
    if (reply.header.type == KvFrameType::kFailed) return decode_failure(reply.payload);
    FP4MOE_ASSIGN_OR_RETURN(const KvHello hello, decode_kv_hello(reply.payload));
    FP4MOE_RETURN_IF_ERROR(compare_hello(hello, node_.hello_));
    log_info("disaggregation: connected to prefill node " + name_);
    said_.clear();
    sending_ = std::thread([this, epoch = hello.epoch] { sender_.run(*socket_, epoch); });
    for (;;) {
      FP4MOE_ASSIGN_OR_RETURN(const KvFrame frame, socket_->receive(hello.epoch, node_.max_page_bytes_));
      FP4MOE_RETURN_IF_ERROR(take_in(frame));
    }
  }

  // What comes for a room that was released is dropped.
  Status take_in(const KvFrame& frame) {
    const uint64_t room = frame.header.room;
    if (frame.header.type == KvFrameType::kFailed && room == 0) return decode_failure(frame.payload);
    Room found;
    {
      std::lock_guard lock(mutex_);
      const auto it = rooms_.find(room);
      if (it == rooms_.end()) return {};
      found = it->second;
    }
    switch (frame.header.type) {
      case KvFrameType::kFirstToken: {
        FP4MOE_ASSIGN_OR_RETURN(FirstToken first, decode_first_token(frame.payload));
        node_.on_news_({.kind = KvNews::Kind::kFirstToken, .room = room, .id = found.id, .first = first});
        return {};
      }
      case KvFrameType::kPage:
        return take_page(room, found, frame.payload);
      case KvFrameType::kFailed: {
        {
          std::lock_guard lock(mutex_);
          rooms_.erase(room);
        }
        node_.on_news_({.room = room, .id = found.id, .status = at_peer(decode_failure(frame.payload))});
        return {};
      }
      default:
        return data_loss("a frame of type " + std::to_string(static_cast<uint32_t>(frame.header.type)) +
                         " from a prefill node");
    }
  }

  Status take_page(uint64_t room, const Room& found, std::span<const uint8_t> payload) {
    if (found.pages == nullptr) return data_loss("a page that was not asked for");
    const KvPageShape shape = found.pages->shape();
    FP4MOE_ASSIGN_OR_RETURN(const KvPageHeader page, decode_page(payload, shape));
    if (page.index != found.next_page)
      return data_loss("page " + std::to_string(page.index) + " where page " +
                       std::to_string(found.next_page) + " was to come");
    node_.page_bytes_->fetch_add(page.num_tokens * shape.token_bytes);
    if (const Status status = found.pages->write(page.index, payload.subspan(sizeof page)); !status.ok()) {
      release(room);
      if (status.code() != StatusCode::kCancelled)
        node_.on_news_({.room = room, .id = found.id, .status = status});
      return {};
    }
    const bool is_last = page.index + 1 == shape.num_pages();
    {
      std::lock_guard lock(mutex_);
      if (const auto it = rooms_.find(room); it != rooms_.end()) ++it->second.next_page;
    }
    if (!is_last) return {};
    release(room);
    node_.on_news_({.kind = KvNews::Kind::kArrived, .room = room, .id = found.id});
    return {};
  }

  Status at_peer(const Status& status) const { return status.with_context("prefill node " + name_); }

  const DecodeNode& node_;
  const std::string name_;
  const Place place_;
  KvSender sender_;
  std::mutex mutex_;
  std::unique_ptr<KvSocket> socket_;
  std::map<uint64_t, Room> rooms_;
  std::string said_;  // of run()'s thread, until the connection has ended
  bool closing_ = false, ended_ = false;
  std::thread sending_;
  std::thread thread_;
};

DecodeNode::DecodeNode(KvHello hello, int64_t max_page_bytes, std::function<void(KvNews)> on_news)
    : hello_(std::move(hello)), max_page_bytes_(max_page_bytes), on_news_(std::move(on_news)) {}

DecodeNode::~DecodeNode() = default;

Result<uint64_t> DecodeNode::ask(const Request& request) {
  FP4MOE_ASSIGN_OR_RETURN(Place place, parse_place(request.prefill_node));
  const uint64_t room = ++num_rooms_;
  std::string payload = encode_prefill(request);
  if (std::ssize(payload) > kMaxKvMessageBytes)
    return does_not_fit("the request has " + std::to_string(payload.size()) +
                        " bytes for the prefill node, " + "legal are " + std::to_string(kMaxKvMessageBytes));
  std::unique_ptr<Peer>& peer = peers_[request.prefill_node];
  if (peer == nullptr || !peer->ask(room, request.id, payload)) {
    std::string said;
    if (peer != nullptr) {
      std::erase_if(rooms_, [&](const auto& r) { return r.second == peer.get(); });
      said = peer->said();
    }
    peer = std::make_unique<Peer>(*this, request.prefill_node, std::move(place), std::move(said));
    static_cast<void>(peer->ask(room, request.id, std::move(payload)));
    peer->start();
  }
  rooms_[room] = peer.get();
  return room;
}

void DecodeNode::take(uint64_t room, std::shared_ptr<KvLease> pages, int64_t first) {
  if (const auto found = rooms_.find(room); found != rooms_.end())
    found->second->take(room, std::move(pages), first);
}

void DecodeNode::release(uint64_t room) {
  const auto found = rooms_.find(room);
  if (found == rooms_.end()) return;
  found->second->release(room);
  rooms_.erase(found);
}

}  // namespace fp4moe
