// A prefill engine and a decode engine on fake models, over real connections.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/disagg/prefill_node.h"
#include "engine/test_loop.h"
#include "support/eventually.h"

namespace fp4moe {

inline const KvHello kHello{0, {{"protocol", "1"}, {"--page-size", "4"}}};

inline std::vector<int32_t> prompt_of(int64_t num_tokens, int32_t salt = 0) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < num_tokens; ++i) ids.push_back(3 + (i * 7 + salt) % 200);
  return ids;
}

// Both engines; the prefill engine can be killed and restarted on its port.
struct Nodes {
  explicit Nodes(LoopShape decode_shape = {}, LoopShape prefill_shape = {}, FakeLogits logits = hashed_logits,
                 std::function<void(const Batch&)> before_prefill = {},
                 std::function<void(const Batch&)> before_decode = {})
      : prefill_shape_(prefill_shape), logits_(logits), before_prefill_(std::move(before_prefill)) {
    start_prefill(kHello);
    decode_shape.hello = kHello;
    decode.emplace(logits, decode_shape, std::move(before_decode));
  }
  void start_prefill(const KvHello& hello) {
    prefill.emplace(logits_, prefill_shape_, before_prefill_);
    auto made = PrefillNode::make(**prefill, hello, "127.0.0.1", port_);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    node = std::move(*made);
    port_ = node->port();
  }
  void kill_prefill() {
    node.reset();
    prefill.reset();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  Result<std::string> submit(std::vector<int32_t> prompt, const SamplingParams& sampling, Collector& out) {
    Request request{"", std::move(prompt), sampling};
    request.prefill_node = address();
    return (*decode)->submit(std::move(request), out.callback());
  }
  Answer run(std::vector<int32_t> prompt, const SamplingParams& sampling) {
    Collector collector;
    const auto id = submit(std::move(prompt), sampling, collector);
    EXPECT_TRUE(id.ok()) << id.status().to_string();
    return id.ok() ? collector.wait() : Answer{};
  }
  bool prefill_is_empty() {
    return eventually([&] {
      const EngineStats s = (*prefill)->stats();
      return s.num_held_reqs == 0 && s.num_used_pages == 0 && s.num_used_window_pages == 0 &&
             s.num_used_state_slots == 0 && s.num_leaked_pages == 0;
    });
  }
  bool decode_is_empty() {
    return eventually([&] {
      const EngineStats s = (*decode)->stats();
      return s.num_used_pages == 0 && s.num_used_window_pages == 0 && s.num_used_state_slots == 0 &&
             s.num_leaked_pages == 0 && s.num_transferring_reqs == 0 && s.num_awaited_reqs == 0;
    });
  }

  std::optional<TestLoop> prefill;
  std::unique_ptr<PrefillNode> node;  // destroyed before the loop that it uses
  std::optional<TestLoop> decode;

 private:
  int port_ = 0;
  LoopShape prefill_shape_;
  FakeLogits logits_;
  std::function<void(const Batch&)> before_prefill_;
};

// One or both executors sample and run ahead.
class SomeSample : public testing::TestWithParam<std::pair<bool, bool>> {
 public:
  LoopShape decode_shape() const { return {.samples = GetParam().first}; }
  LoopShape prefill_shape() const { return {.samples = GetParam().second}; }
  static std::string name(const testing::TestParamInfo<std::pair<bool, bool>>& which) {
    return std::string(which.param.first ? "DecodeSamples" : "DecodeDoesNot") +
           (which.param.second ? "PrefillSamples" : "PrefillDoesNot");
  }
};
inline const auto kSomeSample = testing::Values(std::pair(false, false), std::pair(false, true),
                                                std::pair(true, false), std::pair(true, true));

}  // namespace fp4moe
