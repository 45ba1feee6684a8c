#include "server/http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace fp4moe {

HttpClient::HttpClient(int port) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval limit{10, 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    ::close(socket_);
    socket_ = -1;
  }
}

HttpClient::~HttpClient() {
  if (socket_ >= 0) ::close(socket_);
}

void HttpClient::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return;  // the server can refuse before it has read everything
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

bool HttpClient::fill() {
  char bytes[16384];
  const ssize_t n = ::recv(socket_, bytes, sizeof bytes, 0);
  if (n <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(n));
  return true;
}

bool HttpClient::receive_until(std::string_view needle) {
  while (buffer_.find(needle) == std::string::npos) {
    if (!fill()) return false;
  }
  return true;
}

bool HttpClient::at_end() {
  if (!buffer_.empty()) return false;
  char byte;
  const ssize_t received = ::recv(socket_, &byte, 1, 0);
  return received == 0 || (received < 0 && errno != EAGAIN);
}

void HttpClient::shut_sending() { ::shutdown(socket_, SHUT_WR); }

void HttpClient::reset() {
  const linger now{1, 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  ::close(socket_);
  socket_ = -1;
}

HttpAnswer HttpClient::receive() {
  HttpAnswer answer;
  if (!receive_until("\r\n\r\n")) return answer;
  const size_t end = buffer_.find("\r\n\r\n");
  std::string head = buffer_.substr(0, end + 2);
  buffer_.erase(0, end + 4);
  const int status = std::atoi(head.c_str() + 9);
  for (size_t at = head.find("\r\n") + 2; at < head.size();) {
    const size_t stop = head.find("\r\n", at), colon = head.find(':', at);
    std::string name = head.substr(at, colon - at);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    answer.headers[name] = head.substr(colon + 2, stop - colon - 2);
    at = stop + 2;
  }
  if (status < 200) {  // no body
  } else if (answer.headers.count("transfer-encoding") != 0) {
    for (;;) {
      if (!receive_until("\r\n")) return {};
      const size_t line = buffer_.find("\r\n"), size = std::strtoul(buffer_.c_str(), nullptr, 16);
      while (buffer_.size() < line + 2 + size + 2) {
        if (!fill()) return {};
      }
      answer.body += buffer_.substr(line + 2, size);
      buffer_.erase(0, line + 2 + size + 2);
      if (size == 0) break;
    }
  } else if (answer.headers.count("content-length") != 0) {
    const size_t size = std::strtoul(answer.headers["content-length"].c_str(), nullptr, 10);
    while (buffer_.size() < size) {
      if (!fill()) return {};
    }
    answer.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
  } else {
    while (fill()) {
    }
    answer.body = std::move(buffer_);
  }
  answer.status = status;
  return answer;
}

std::string get_request(const std::string& path, const std::string& headers) {
  return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n";
}

std::string post_request(const std::string& path, const std::string& body, const std::string& headers) {
  return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

HttpAnswer http_get(int port, const std::string& path, const std::string& headers) {
  HttpClient client(port);
  client.send(get_request(path, headers));
  return client.receive();
}

HttpAnswer http_post(int port, const std::string& path, const std::string& body, const std::string& headers) {
  HttpClient client(port);
  client.send(post_request(path, body, headers));
  return client.receive();
}

}  // namespace fp4moe
