// A prefill engine and a decode engine whose sequences have a state: outputs are those of one engine, the
// state travels with the pages, and no slot leaks if one side cancels, is full, fails or dies.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/conversations.h"
#include "engine/test_nodes.h"
#include "engine/test_peer.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

std::vector<int32_t> expected(const std::vector<int32_t>& prompt, int64_t num_tokens) {
  return expected_greedy(prompt, num_tokens, hashed_logits_and_state);
}

LoopShape with_slots(LoopShape shape, int64_t num_slots) {
  shape.num_slots = num_slots;
  return shape;
}

class StateNodes : public SomeSample {
 protected:
  LoopShape decode_with(int64_t num_slots) const { return with_slots(decode_shape(), num_slots); }
  LoopShape prefill_with(int64_t num_slots) const { return with_slots(prefill_shape(), num_slots); }
};
INSTANTIATE_TEST_SUITE_P(StepLoopNodes, StateNodes, kSomeSample, SomeSample::name);

// Prompts of every length around a page, twice: cold, and with pages and snapshots on both sides.
TEST_P(StateNodes, AnswersAreThoseOfOneEngine) {
  for (const bool reuses : {true, false}) {
    LoopShape decode = decode_with(20), prefill = prefill_with(20);
    decode.reuses_prefixes = prefill.reuses_prefixes = reuses;
    prefill.scheduler.chunked_prefill_size = 5;
    Nodes nodes(decode, prefill);
    for (const int64_t num_tokens : {1, 3, 4, 5, 8, 16, 37})
      for (const int64_t num_answer : {1, 2, 20})
        for (int round = 0; round < 2; ++round) {
          const auto prompt = prompt_of(num_tokens, static_cast<int32_t>(num_tokens));
          EXPECT_EQ(nodes.run(prompt, exactly(num_answer)).token_ids, expected(prompt, num_answer))
              << num_tokens << " " << num_answer << " " << round;
        }
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

// The state is sent once, with the pages that the decode engine does not have, snapshot or not. If it has the
// whole prompt and a snapshot at its end, nothing is sent.
TEST_P(StateNodes, TheStateTravelsWithTheMissingPages) {
  Nodes nodes(decode_with(20), prefill_with(20));  // pages of 4
  const int64_t token_bytes = nodes.decode->executor().kv_token_bytes();
  const int64_t state_bytes = nodes.decode->executor().state_bytes();
  ASSERT_GT(state_bytes, 0);
  int64_t bytes = 0;
  const auto run = [&](const std::vector<int32_t>& prompt, int64_t num_answer, int64_t sent) {
    const Answer answer = nodes.run(prompt, exactly(num_answer));
    EXPECT_EQ(answer.token_ids, expected(prompt, num_answer));
    bytes += sent;
    EXPECT_TRUE(eventually([&] { return (*nodes.decode)->stats().kv_transfer_bytes_total == bytes; }))
        << prompt.size() << ": " << (*nodes.decode)->stats().kv_transfer_bytes_total << " not " << bytes;
    return answer.token_ids;
  };
  const auto prompt = prompt_of(18);
  run(prompt, 4, 18 * token_bytes + state_bytes);
  run(prompt, 4, 2 * token_bytes + state_bytes);
  const auto begin = prompt_of(16);
  run(begin, 4, state_bytes);
  // The last step of 5 outputs after 12 tokens ends at a page boundary, where the sequence leaves a snapshot.
  auto turn = prompt_of(12, 50);
  const auto output = run(turn, 5, 12 * token_bytes + state_bytes);
  turn.insert(turn.end(), output.begin(), output.end() - 1);
  run(turn, 7, 0);
  turn.push_back(output.back());
  run(turn, 7, token_bytes + state_bytes);
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// Many requests at once, groups on one side, and pools of the decode engine so small that requests wait for a
// slot or a page, and some are retracted.
TEST_P(StateNodes, FullPoolsQueueAndRetractWithoutLoss) {
  int64_t num_retracted = 0;
  for (const int64_t num_slots : {2, 3, 5, 12})
    for (const bool reuses : {false, true}) {
      LoopShape decode = decode_with(num_slots), prefill = prefill_with(14 - num_slots);
      decode.num_pages = 12;
      decode.context_length = 40;
      decode.reuses_prefixes = prefill.reuses_prefixes = reuses;
      (num_slots % 2 == 0 ? prefill : decode).num_groups = 2;
      prefill.num_pages = 32;
      Nodes nodes(decode, prefill);
      std::vector<Collector> collectors(24);
      std::vector<std::vector<int32_t>> prompts;
      for (int i = 0; i < 24; ++i) {
        prompts.push_back(prompt_of(5 + i % 13, i % 5));
        ASSERT_TRUE(nodes.submit(prompts.back(), exactly(20), collectors[static_cast<size_t>(i)]).ok());
      }
      for (size_t i = 0; i < collectors.size(); ++i)
        EXPECT_EQ(collectors[i].wait().token_ids, expected(prompts[i], 20)) << i << " " << num_slots;
      num_retracted += (*nodes.decode)->stats().num_retracted_reqs;
      EXPECT_TRUE(nodes.prefill_is_empty());
      EXPECT_TRUE(nodes.decode_is_empty());
    }
  EXPECT_GT(num_retracted, 0);
}

// Conversations over nodes of random sizes, with twins that are cancelled at any point.
TEST_P(StateNodes, ConversationsAreThoseOfEachAlone) {
  std::mt19937 random(11);
  const auto below = [&](int n) { return fp4moe::below(random, n); };
  for (int round = 0; round < 12; ++round) {
    const auto random_shape = [&](LoopShape shape) {
      shape.page_size = 1 + round % 5;
      shape.num_slots = 2 + below(12);
      shape.scheduler = {.max_running_requests = 1 + below(8),
                         .chunked_prefill_size = 1 + below(12),
                         .max_prefill_tokens = 1 + below(20),
                         .state_interval = 1 + below(20)};
      shape.context_length = 100;
      shape.num_groups = 1 + below(2);
      shape.reuses_prefixes = below(8) > 0;
      shape.num_pages = (100 + shape.page_size - 1) / shape.page_size + below(12);
      return shape;
    };
    Nodes nodes(random_shape(decode_shape()), random_shape(prefill_shape()));
    const std::vector<int32_t> system(static_cast<size_t>(below(20)), 200);
    run_conversations(*nodes.decode, std::vector<std::vector<int32_t>>(8, system), random, expected,
                      "round " + std::to_string(round), nodes.address());
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

// The prefill engine's only slot is held until its state has been taken; the other prompts wait for it.
TEST_P(StateNodes, HeldPromptsKeepTheirSlots) {
  Nodes nodes(decode_with(9), prefill_with(2));
  std::vector<Collector> collectors(8);
  for (size_t i = 0; i < collectors.size(); ++i)
    ASSERT_TRUE(nodes.submit(prompt_of(9, static_cast<int32_t>(i)), exactly(9), collectors[i]).ok());
  for (size_t i = 0; i < collectors.size(); ++i)
    EXPECT_EQ(collectors[i].wait().token_ids, expected(prompt_of(9, static_cast<int32_t>(i)), 9)) << i;
  EXPECT_TRUE(nodes.prefill_is_empty());
}

// A state that an executor cannot read or write fails its request.
TEST_P(StateNodes, StatesThatCannotBeReadOrWrittenFailTheirRequest) {
  for (const bool on_prefill : {true, false}) {
    Nodes nodes(decode_with(4), prefill_with(4));
    (on_prefill ? nodes.prefill : nodes.decode)->executor().state_failure = internal_error("no such slot");
    const Answer answer = nodes.run(prompt_of(9), greedy(4));
    EXPECT_EQ(answer.last.error_code, StatusCode::kInternal);
    EXPECT_NE(answer.last.error.find("no such slot"), std::string::npos) << answer.last.error;
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

// Holds the threads that copy states until it is opened.
struct CopyGate {
  std::atomic<bool> is_reached = false, is_open = false;
  std::function<void()> hook() {
    return [this] {
      is_reached = true;
      is_open.wait(false);
    };
  }
  void open() {
    is_open = true;
    is_open.notify_all();
  }
};

// While a state is on its way, steps of other requests run, and an abort gives its slot back.
TEST_P(StateNodes, AnAbortDuringTheTransferReturnsTheSlot) {
  for (const bool on_prefill : {true, false}) {
    CopyGate gate;
    Nodes nodes(decode_with(3), prefill_with(3));
    Collector running, aborted, next;
    ASSERT_TRUE(nodes.submit(prompt_of(9), exactly(100), running).ok());
    ASSERT_TRUE(eventually([&] { return running.num_deltas() > 2; }));
    (on_prefill ? nodes.prefill : nodes.decode)->executor().before_state_copy = gate.hook();
    const auto id = nodes.submit(prompt_of(10, 3), exactly(20), aborted);
    ASSERT_TRUE(eventually([&] { return gate.is_reached.load(); }));
    EXPECT_EQ(running.wait().token_ids, expected(prompt_of(9), 100));
    std::thread opener([&] {
      std::this_thread::sleep_for(30ms);
      gate.open();
    });
    (*nodes.decode)->cancel(*id);
    EXPECT_EQ(aborted.wait().reason(), FinishReason::kAbort);
    opener.join();
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
    EXPECT_EQ(nodes.run(prompt_of(10, 3), exactly(20)).token_ids, expected(prompt_of(10, 3), 20));
  }
}

// Delays a decode engine's steps while it is set.
struct Brake {
  std::atomic<bool> is_set = false;
  std::function<void(const Batch&)> hook() {
    return [this](const Batch&) {
      if (is_set) std::this_thread::sleep_for(20ms);
    };
  }
};

// A sequence takes a snapshot in every step, and the next one gets the slot of the last snapshot. Its state
// arrives before that step would have copied the snapshot.
TEST_P(StateNodes, PlannedCopiesDoNotOverwriteAStateThatArrives) {
  LoopShape decode = decode_with(3);
  decode.page_size = 1;
  decode.scheduler.state_interval = 1;
  LoopShape prefill = prefill_with(9);
  prefill.page_size = 1;
  Brake brake;
  Nodes nodes(decode, prefill, hashed_logits, {}, brake.hook());
  Collector running;
  brake.is_set = true;
  ASSERT_TRUE(nodes.submit(prompt_of(9), exactly(110), running).ok());
  ASSERT_TRUE(eventually([&] { return running.num_deltas() > 2; }));
  for (int32_t i = 0; i < 3; ++i)
    EXPECT_EQ(nodes.run(prompt_of(10, i), exactly(3)).token_ids, expected(prompt_of(10, i), 3)) << i;
  EXPECT_LT(running.num_deltas(), 110);
  brake.is_set = false;
  EXPECT_EQ(running.wait().token_ids, expected(prompt_of(9), 110));
  // An engine that runs ahead takes no snapshots after tokens that are not known yet.
  EXPECT_EQ(nodes.decode->executor().num_early_copies >= 3, !GetParam().first);
  EXPECT_TRUE(nodes.decode_is_empty());
}

// A request that waits for the only slot, and one whose prompt is being computed, are aborted.
TEST_P(StateNodes, AnAbortBeforeTheTransferLeavesNothing) {
  Brake brake;
  Nodes nodes(decode_with(2), prefill_with(3), hashed_logits, {}, brake.hook());
  Collector running, waiting;
  brake.is_set = true;
  ASSERT_TRUE(nodes.submit(prompt_of(9), exactly(110), running).ok());
  ASSERT_TRUE(eventually([&] { return running.num_deltas() > 2; }));
  const auto id = nodes.submit(prompt_of(10, 3), exactly(20), waiting);
  ASSERT_TRUE(eventually([&] { return waiting.num_deltas() == 1; }));
  EXPECT_LT(running.num_deltas(), 110);
  (*nodes.decode)->cancel(*id);
  EXPECT_EQ(waiting.wait().reason(), FinishReason::kAbort);
  brake.is_set = false;
  EXPECT_EQ(running.wait().token_ids, expected(prompt_of(9), 110));
  std::vector<Collector> collectors(12);
  for (size_t i = 0; i < collectors.size(); ++i) {
    const auto one = nodes.submit(prompt_of(20, static_cast<int32_t>(i)), exactly(20), collectors[i]);
    if (i % 2 == 1) (*nodes.decode)->cancel(*one);
  }
  for (size_t i = 0; i < collectors.size(); i += 2)
    EXPECT_EQ(collectors[i].wait().token_ids, expected(prompt_of(20, static_cast<int32_t>(i)), 20)) << i;
  EXPECT_TRUE(nodes.prefill_is_empty());
  EXPECT_TRUE(nodes.decode_is_empty());
}

// The prefill engine dies while it sends a state.
TEST_P(StateNodes, ADeadPrefillEngineLeavesNoSlotBehind) {
  CopyGate gate;
  Nodes nodes(decode_with(3), prefill_with(3));
  nodes.prefill->executor().before_state_copy = gate.hook();
  Collector lost;
  ASSERT_TRUE(nodes.submit(prompt_of(9), exactly(20), lost).ok());
  ASSERT_TRUE(eventually([&] { return gate.is_reached.load(); }));
  std::thread opener([&] {
    lost.wait();
    gate.open();
  });
  nodes.kill_prefill();
  opener.join();
  EXPECT_EQ(lost.wait().last.error_code, StatusCode::kUnavailable);
  EXPECT_NE(lost.wait().last.error.find("prefill node " + nodes.address()), std::string::npos);
  EXPECT_TRUE(nodes.decode_is_empty());
  nodes.start_prefill(kHello);
  EXPECT_EQ(nodes.run(prompt_of(9), exactly(20)).token_ids, expected(prompt_of(9), 20));
  EXPECT_TRUE(nodes.decode_is_empty());
}

TEST_P(StateNodes, ADeadDecodeEngineLeavesNoSlotHeld) {
  LoopShape small = decode_with(2);
  Nodes nodes(small, prefill_with(12));
  std::vector<Collector> collectors(6);
  for (size_t i = 0; i < collectors.size(); ++i)
    ASSERT_TRUE(nodes.submit(prompt_of(9, static_cast<int32_t>(i)), exactly(100), collectors[i]).ok());
  nodes.decode.reset();
  EXPECT_TRUE(nodes.prefill_is_empty());
  small.hello = kHello;
  nodes.decode.emplace(hashed_logits, small);
  EXPECT_EQ(nodes.run(prompt_of(9), exactly(20)).token_ids, expected(prompt_of(9), 20));
}

// Returns a part as a frame's payload.
std::string part_of(int64_t index, int64_t num_tokens, int64_t num_bytes) {
  const KvPageHeader header{index, num_tokens};
  std::string payload(sizeof header + static_cast<size_t>(num_bytes), '\1');
  std::memcpy(payload.data(), &header, sizeof header);
  return payload;
}

struct Attack {
  std::string message;  // part of the error
  std::vector<std::string> parts;
  std::function<void(std::vector<uint8_t>& frame)> mangle = {};  // the last part's frame
};

// A prefill node that sends parts after the first token of a prompt, and then nothing more.
void serve_parts(TestPort& port, const Attack& attack) {
  const auto socket = port.accept();
  ASSERT_TRUE(
      greet_decode_node(*socket, {7, kHello.facts}, {}, in_seconds(20), [] { return Status(); }).ok());
  const KvLegal legal{.stage = KvStage::kToPrefill, .epoch = 7};
  const auto prompt = socket->receive(legal, in_seconds(20));
  ASSERT_TRUE(prompt.ok()) << prompt.status().to_string();
  const uint64_t room = prompt->header.room;
  const std::string first = encode_first_token({.token = {.token_id = 5}});
  ASSERT_TRUE(socket->send(kv_frame(KvFrameType::kFirstToken, 7, room, std::string_view(first))).ok());
  ASSERT_TRUE(socket->receive(legal, in_seconds(20)).ok());  // kTake
  for (const std::string& part : attack.parts) {
    std::vector<uint8_t> frame = kv_frame(KvFrameType::kPage, 7, room, std::string_view(part));
    if (attack.mangle && &part == &attack.parts.back()) attack.mangle(frame);
    if (!socket->send(frame).ok()) return;
  }
  if (attack.mangle) return;
  EXPECT_FALSE(socket->receive(legal, in_seconds(20)).ok());  // the decode node ends the connection
}

// A malformed or truncated state fails the requests of its own connection; the state of a request from
// another prefill node, on its way meanwhile, arrives.
TEST(StepLoopNodes, MalformedStatesHarmNobodyElse) {
  Nodes nodes(with_slots({}, 4), with_slots({}, 4));
  const int64_t page_bytes = 3 * nodes.decode->executor().kv_token_bytes();
  const int64_t state_bytes = nodes.decode->executor().state_bytes();
  const std::string page = part_of(0, 3, page_bytes);
  const std::string state = part_of(1, 0, state_bytes);
  const std::vector<Attack> attacks{
      {"page 1 has 15 bytes, expected 16", {page, part_of(1, 0, state_bytes - 1)}},
      {"page 1 has 17 bytes, expected 16", {page, part_of(1, 0, state_bytes + 1)}},
      {"page 1 has 3 tokens, expected 0", {page, part_of(1, 3, state_bytes)}},
      {"received page 1, expected page 0", {state}},
      {"received page 0, expected page 1", {page, page}},
      {"page 2 of a prompt of 3 tokens and a state of 16 bytes; expected 0 to 1", {page, part_of(2, 0, 16)}},
      {"a frame's payload has 1000024 bytes; expected 0 to ", {page, part_of(1, 0, 1'000'000)}},
      {"a page of 3 bytes; expected at least 24", {page, "abc"}},
      {"a frame's checksum is ", {page, state}, [](std::vector<uint8_t>& frame) { frame.back() ^= 1; }},
      {"closed by the other side", {page, state}, [](std::vector<uint8_t>& frame) { frame.pop_back(); }},
      {"a frame's payload has 9223372036854775807 bytes",
       {page, state},
       [](std::vector<uint8_t>& frame) {
         const int64_t most = INT64_MAX;
         std::memcpy(frame.data() + offsetof(KvFrameHeader, num_bytes), &most, sizeof most);
       }},
  };
  for (const Attack& attack : attacks) {
    CopyGate gate;
    nodes.prefill->executor().before_state_copy = gate.hook();
    Collector other, victim;
    ASSERT_TRUE(nodes.submit(prompt_of(9), exactly(9), other).ok());
    ASSERT_TRUE(eventually([&] { return gate.is_reached.load(); }));
    TestPort port;
    Request request{"", prompt_of(3), exactly(9)};
    request.prefill_node = port.address();
    ASSERT_TRUE((*nodes.decode)->submit(request, victim.callback()).ok());
    std::thread hostile([&] { serve_parts(port, attack); });
    const Answer& answer = victim.wait();
    hostile.join();
    EXPECT_EQ(answer.last.error_code, StatusCode::kUnavailable);
    EXPECT_NE(answer.last.error.find(attack.message), std::string::npos)
        << attack.message << ": " << answer.last.error;
    EXPECT_NE(answer.last.error.find("prefill node " + port.address()), std::string::npos);
    gate.open();
    EXPECT_EQ(other.wait().token_ids, expected(prompt_of(9), 9));
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
    nodes.prefill->executor().before_state_copy = nullptr;
  }
}

// Either node may copy other numbers of pages together, while the parts of several requests take turns.
TEST(StepLoopNodes, PagesThatAreCopiedTogetherChangeNoAnswer) {
  for (const auto& [on_prefill, on_decode] : {std::pair{3, 0}, {0, 3}, {2, 3}, {100, 100}}) {
    SCOPED_TRACE(testing::Message() << on_prefill << " and " << on_decode << " pages");
    Nodes nodes({.num_slots = 16}, {.num_slots = 16});
    const auto copy_together = [](FakeExecutor& executor, int64_t num_pages) {
      executor.batch_bytes = num_pages * executor.page_size() * executor.kv_token_bytes();
    };
    copy_together(nodes.prefill->executor(), on_prefill);
    copy_together(nodes.decode->executor(), on_decode);
    std::vector<Collector> answers(4);
    for (size_t i = 0; i < answers.size(); ++i)
      ASSERT_TRUE(nodes.submit(prompt_of(30, static_cast<int32_t>(i)), exactly(9), answers[i]).ok());
    for (size_t i = 0; i < answers.size(); ++i)
      EXPECT_EQ(answers[i].wait().token_ids, expected(prompt_of(30, static_cast<int32_t>(i)), 9)) << i;
    EXPECT_TRUE(nodes.prefill_is_empty());
    EXPECT_TRUE(nodes.decode_is_empty());
  }
}

}  // namespace
}  // namespace fp4moe
