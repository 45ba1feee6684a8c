// Conversations on a step loop, for tests of what later turns reuse.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "engine/test_loop.h"

namespace fp4moe {

inline SamplingParams exactly(int64_t num_tokens) {
  SamplingParams sampling = greedy(num_tokens);
  sampling.ignore_eos = true;
  return sampling;
}

// A number below n.
inline int below(std::mt19937& random, int n) {
  return static_cast<int>(random() % static_cast<unsigned>(n));
}

// Runs three turns of every conversation, all conversations together; some requests have a twin that is
// cancelled. Each turn contains the previous turn's prompt and output. expected(prompt, num_tokens) returns
// the tokens of a request that runs alone. `prefill_node`: as in Request.
template <class Expected>
void run_conversations(TestLoop& loop, std::vector<std::vector<int32_t>> histories, std::mt19937& random,
                       const Expected& expected, const std::string& what,
                       const std::string& prefill_node = "") {
  constexpr int64_t kTokens = 12;
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<Collector> collectors(histories.size());
    for (size_t i = 0; i < histories.size(); ++i) {
      for (int n = 1 + below(random, 6); n > 0; --n) histories[i].push_back(below(random, 3));
      const std::string id = std::to_string(turn) + " " + std::to_string(i);
      Request request{id, histories[i], exactly(kTokens)};
      request.prefill_node = prefill_node;
      ASSERT_TRUE(loop->submit(request, collectors[i].callback()).ok());
      Collector twin;
      if (below(random, 3) == 0) {
        request.id += " twin";
        ASSERT_TRUE(loop->submit(request, twin.callback()).ok());
        loop->cancel(id + " twin");
        twin.wait();
      }
    }
    for (size_t i = 0; i < histories.size(); ++i) {
      const Answer& answer = collectors[i].wait();
      EXPECT_EQ(answer.token_ids, expected(histories[i], kTokens)) << what;
      histories[i].insert(histories[i].end(), answer.token_ids.begin(), answer.token_ids.end());
    }
  }
}

// Runs four rounds of 64 requests for 25 tokens, whose prompts have common beginnings, and cancels some of
// them at random times. expected(prompt, num_tokens): as above.
template <class Expected>
void run_cancelled_streams(TestLoop& loop, std::mt19937& random, const Expected& expected) {
  constexpr int64_t kTokens = 25;
  for (int round = 0; round < 4; ++round) {
    std::vector<Collector> collectors(64);
    std::vector<std::vector<int32_t>> prompts(collectors.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      prompts[i].assign(static_cast<size_t>(below(random, 30)), 5);
      for (int n = 1 + below(random, 30); n > 0; --n) prompts[i].push_back(below(random, 4));
      const auto id_of = [&](size_t number) { return std::to_string(round) + " " + std::to_string(number); };
      ASSERT_TRUE(loop->submit({id_of(i), prompts[i], exactly(kTokens)}, collectors[i].callback()).ok());
      if (below(random, 2) == 0)
        loop->cancel(id_of(static_cast<size_t>(below(random, static_cast<int>(i) + 1))));
    }
    for (size_t i = 0; i < collectors.size(); ++i) {
      const Answer& answer = collectors[i].wait();
      if (answer.reason() == FinishReason::kAbort) continue;
      EXPECT_EQ(answer.token_ids, expected(prompts[i], kTokens)) << "round " << round << " stream " << i;
    }
  }
}

}  // namespace fp4moe
