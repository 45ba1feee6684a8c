// A server on a free port of 127.0.0.1 with a fake engine behind it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "fp4moe/server.h"
#include "server/fake_engine.h"
#include "server/http_client.h"
#include "support/eventually.h"

namespace fp4moe {

class TestServer {
 public:
  explicit TestServer(FakeOptions options = {}, ServerConfig config = {}) : engine(options) {
    config.port = 0;
    config.log_sink = [this](LogLevel, const std::string& line) {
      std::lock_guard<std::mutex> lock(mutex_);
      log_.push_back(line);
    };
    auto made = Server::make(config);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    server = std::move(made).value();
    server->set_engine(engine);
    port = server->port();
  }
  ~TestServer() { server->stop(); }

  std::vector<std::string> log() {
    std::lock_guard<std::mutex> lock(mutex_);
    return log_;
  }

 private:
  std::mutex mutex_;  // declared before the server, whose threads log until it is destroyed
  std::vector<std::string> log_;

 public:
  FakeEngine engine;
  std::unique_ptr<Server> server;
  int port = 0;
};

// The JSON of each "data: " event; [DONE] becomes the string "[DONE]".
inline std::vector<nlohmann::json> parse_events(const std::string& body) {
  std::vector<nlohmann::json> events;
  std::istringstream lines(body);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty()) continue;
    EXPECT_EQ(line.rfind("data: ", 0), 0u) << line;
    const std::string data = line.substr(6);
    events.push_back(data == "[DONE]" ? nlohmann::json(data) : nlohmann::json::parse(data));
  }
  return events;
}

}  // namespace fp4moe
