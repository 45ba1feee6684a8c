// A node for router tests that responds with arbitrary bytes.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace fp4moe {

// One connection of a FakeNode whose request has been read.
class FakePeer {
 public:
  FakePeer(int socket, const std::atomic<bool>& stopping) : socket_(socket), stopping_(stopping) {}
  // Returns false if the router closed the connection or the node is stopping.
  bool send(std::string_view bytes);
  bool send_forever(std::string_view bytes);  // returns false once it cannot continue
  bool drip(std::string_view bytes);          // one byte every 20 ms
  void wait_until_closed();
  void reset();  // closes with RST

 private:
  int socket_;
  const std::atomic<bool>& stopping_;
};

class FakeNode {
 public:
  using Script = std::function<void(FakePeer& peer)>;

  // The node starts healthy, and its /server_info reports this role.
  explicit FakeNode(const std::string& role);
  ~FakeNode();
  FakeNode(const FakeNode&) = delete;
  FakeNode& operator=(const FakeNode&) = delete;

  int port() const { return port_; }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  // Sets the script for requests to `path`; other paths get 404.
  void set(const std::string& path, Script script);
  void set_bytes(const std::string& path, const std::string& bytes);
  void set_body(const std::string& path, const std::string& json);
  // The number of requests to `path`.
  int count(const std::string& path) const;
  // The body of the last request to `path`.
  std::string body(const std::string& path) const;

 private:
  void accept_all();
  void serve(int socket);

  int listener_ = -1, port_ = 0;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::map<std::string, Script> scripts_;
  std::map<std::string, int> counts_;
  std::map<std::string, std::string> bodies_;
  std::list<std::thread> connections_;
  std::thread thread_;
};

// A complete HTTP response.
std::string http_answer(const std::string& body, int status = 200,
                        const std::string& headers = "Content-Type: application/json\r\n");

}  // namespace fp4moe
