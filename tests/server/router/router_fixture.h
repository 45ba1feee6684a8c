// A router in front of a fake prefill node and a fake decode node.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fp4moe/router.h"
#include "server/fake_node.h"
#include "server/http_client.h"
#include "support/eventually.h"

namespace fp4moe {

inline const std::string kRequest = R"({"text":"a","sampling_params":{"max_new_tokens":4}})";

// Bytes as one chunk of a chunked response.
inline std::string chunk(const std::string& bytes) {
  char size[32];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  return size + bytes + "\r\n";
}

inline FakeNode::Script bytes(const std::string& text) {
  return [text](FakePeer& peer) { peer.send(text); };
}

// A prefill node, a decode node and the router in front of them.
class RouterWithFakeNodes : public testing::Test {
 protected:
  static RouterConfig limits() {
    RouterConfig config;
    config.health_check_seconds = 0.02;
    config.health_timeout_seconds = 0.4;
    config.request_timeout_seconds = 1;
    config.quiet_timeout_seconds = 0.5;
    config.max_response_bytes = 100000;
    config.max_held_bytes = 150000;
    return config;
  }

  void start(RouterConfig config = limits()) {
    config.http.port = 0;
    config.http.log_sink = [this](LogLevel, const std::string& line) {
      const std::lock_guard lock(mutex_);
      log_.push_back(line);
    };
    config.prefill = {{prefill_.url()}};
    config.decode = {decode_.url()};
    auto router = Router::make(config);
    ASSERT_TRUE(router.ok()) << router.status().to_string();
    router_ = std::move(router).value();
  }
  bool is_healthy() const { return http_get(router_->port(), "/health").status == 200; }
  nlohmann::json worker(const std::string& role) const {
    const nlohmann::json answer = nlohmann::json::parse(http_get(router_->port(), "/workers").body);
    for (const nlohmann::json& node : answer.at("workers"))
      if (node.at("role") == role) return node;
    return {};
  }
  HttpAnswer generate() const { return http_post(router_->port(), "/generate", kRequest); }
  std::string log() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const std::string& line : log_) text += line + "\n";
    return text;
  }

  mutable std::mutex mutex_;
  std::vector<std::string> log_;
  FakeNode prefill_{"prefill"}, decode_{"decode"};
  std::unique_ptr<Router> router_;
};

}  // namespace fp4moe
