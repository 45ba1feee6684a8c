#include "server/fake_node.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

namespace fp4moe {
namespace {

constexpr int kTickMs = 20;

// Whether the socket becomes readable or closed within a tick.
bool has_input(int socket) {
  pollfd wait = {socket, POLLIN, 0};
  return ::poll(&wait, 1, kTickMs) > 0;
}

// The size of a request's head; npos: it is not complete.
size_t head_size(const std::string& request) {
  const size_t end = request.find("\r\n\r\n");
  return end == std::string::npos ? end : end + 4;
}

// The size of a request with its body; npos: its head is not complete.
size_t whole_size(const std::string& request) {
  const std::string name = "\r\nContent-Length: ";
  const size_t head = head_size(request), at = request.find(name);
  if (head == std::string::npos) return head;
  return at < head ? head + std::strtoul(request.c_str() + at + name.size(), nullptr, 10) : head;
}

}  // namespace

bool FakePeer::send(std::string_view bytes) {
  while (!bytes.empty()) {
    if (stopping_.load()) return false;
    pollfd wait = {socket_, POLLOUT, 0};
    if (::poll(&wait, 1, kTickMs) == 0) continue;
    const ssize_t n = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

bool FakePeer::send_forever(std::string_view bytes) {
  while (send(bytes)) {
  }
  return false;
}

bool FakePeer::drip(std::string_view bytes) {
  for (const char byte : bytes) {
    if (!send({&byte, 1})) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(kTickMs));
  }
  return true;
}

void FakePeer::wait_until_closed() {
  char byte;
  while (!stopping_.load())
    if (has_input(socket_) && ::recv(socket_, &byte, 1, MSG_DONTWAIT) <= 0) return;
}

void FakePeer::reset() {
  const linger at_once = {1, 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

FakeNode::FakeNode(const std::string& role) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(listener_, 64), 0);
  EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
  port_ = ntohs(address.sin_port);
  set_body("/health", "{}");
  set_body("/server_info",
           R"({"disaggregation_mode":")" + role + R"(","disaggregation_bootstrap_port":8998})");
  thread_ = std::thread([this] { accept_all(); });
}

FakeNode::~FakeNode() {
  stopping_.store(true);
  thread_.join();
  for (std::thread& connection : connections_) connection.join();
  ::close(listener_);
}

void FakeNode::set(const std::string& path, Script script) {
  const std::lock_guard lock(mutex_);
  scripts_[path] = std::move(script);
}

void FakeNode::set_bytes(const std::string& path, const std::string& bytes) {
  set(path, [bytes](FakePeer& peer) { peer.send(bytes); });
}

void FakeNode::set_body(const std::string& path, const std::string& json) {
  set_bytes(path, http_answer(json));
}

int FakeNode::count(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find(path);
  return found == counts_.end() ? 0 : found->second;
}

std::string FakeNode::body(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  const auto found = bodies_.find(path);
  return found == bodies_.end() ? "" : found->second;
}

void FakeNode::accept_all() {
  while (!stopping_.load()) {
    if (!has_input(listener_)) continue;
    const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket >= 0) connections_.emplace_back([this, socket] { serve(socket); });
  }
}

void FakeNode::serve(int socket) {
  std::string request;
  char piece[4096];
  while (!stopping_.load() && request.size() < whole_size(request)) {
    if (!has_input(socket)) continue;
    const ssize_t n = ::recv(socket, piece, sizeof piece, MSG_DONTWAIT);
    if (n <= 0) break;
    request.append(piece, static_cast<size_t>(n));
  }
  const size_t begin = request.find(' ') + 1, end = request.find(' ', begin);
  const std::string path = end == std::string::npos ? "" : request.substr(begin, end - begin);
  Script script = [](FakePeer& peer) { peer.send(http_answer("{}", 404)); };
  {
    const std::lock_guard lock(mutex_);
    ++counts_[path];
    if (const size_t head_end = head_size(request); head_end != std::string::npos)
      bodies_[path] = request.substr(head_end);
    if (const auto found = scripts_.find(path); found != scripts_.end()) script = found->second;
  }
  FakePeer peer(socket, stopping_);
  if (!path.empty()) script(peer);
  ::close(socket);
}

std::string http_answer(const std::string& body, int status, const std::string& headers) {
  return "HTTP/1.1 " + std::to_string(status) + " X\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

}  // namespace fp4moe
