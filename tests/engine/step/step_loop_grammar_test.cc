#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "engine/fake_grammar.h"
#include "engine/test_loop.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// With the host's sampler and with an executor that samples.
class StepLoopGrammar : public ::testing::TestWithParam<bool> {
 protected:
  ~StepLoopGrammar() override { open(); }
  LoopShape shape() {
    LoopShape shape;
    shape.samples = GetParam();
    shape.grammars = [this] { return std::make_unique<OneTextCompiler>(open_); };
    return shape;
  }
  void open() {
    open_->store(true);
    open_->notify_all();
  }
  static SamplingParams must_say(const std::string& text, int64_t max_new_tokens = 50) {
    SamplingParams sampling = greedy(max_new_tokens);
    sampling.grammar = {GrammarSpec::Kind::kRegex, text};
    return sampling;
  }
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

INSTANTIATE_TEST_SUITE_P(Samplers, StepLoopGrammar, ::testing::Bool());

TEST_P(StepLoopGrammar, TheTextIsTheGrammars) {
  TestLoop loop(hashed_logits, shape());
  for (const float temperature : {0.f, 1.f}) {
    SamplingParams sampling = must_say("what it must say");
    sampling.temperature = temperature;
    const Answer answer = loop.run({7}, sampling);
    EXPECT_EQ(answer.text, "what it must say");
    EXPECT_EQ(answer.reason(), FinishReason::kStop);
    EXPECT_EQ(answer.last.matched_stop_token, kEosId);
  }
  loop.finish();
}

TEST_P(StepLoopGrammar, TooFewTokensGiveItsBeginning) {
  TestLoop loop(hashed_logits, shape());
  const Answer answer = loop.run({7}, must_say("what it must say", 6));
  EXPECT_EQ(answer.text, "what i");
  EXPECT_EQ(answer.reason(), FinishReason::kLength);
}

TEST_P(StepLoopGrammar, EndsWithTheGrammarThoughEosIsIgnored) {
  TestLoop loop(hashed_logits, shape());
  SamplingParams sampling = must_say("ab");
  sampling.ignore_eos = true;
  const Answer answer = loop.run({7}, sampling);
  EXPECT_EQ(answer.text, "ab");
  EXPECT_EQ(answer.reason(), FinishReason::kStop);
}

TEST_P(StepLoopGrammar, LogprobsAreTheModelsOwn) {
  TestLoop loop(says("xyz"), shape());
  SamplingParams sampling = must_say("q");
  sampling.top_logprobs = 1;
  const Answer answer = loop.run({7}, sampling);
  ASSERT_EQ(answer.logprobs.size(), 2u);
  EXPECT_EQ(answer.logprobs[0].chosen.token_id, 'q');
  EXPECT_EQ(answer.logprobs[0].top.at(0).token_id, 'x');
  EXPECT_LT(answer.logprobs[0].chosen.logprob, answer.logprobs[0].top[0].logprob);
}

TEST_P(StepLoopGrammar, OthersInTheBatchAreNotTouched) {
  TestLoop loop(hashed_logits, shape());
  const Answer alone = loop.run({1, 2, 3}, greedy(40));
  Collector free, bound[4];
  ASSERT_TRUE(loop->submit({"", {1, 2, 3}, greedy(40)}, free.callback()).ok());
  for (Collector& b : bound)
    ASSERT_TRUE(loop->submit({"", {5}, must_say("some text to be said")}, b.callback()).ok());
  EXPECT_EQ(free.wait().token_ids, alone.token_ids);
  for (Collector& b : bound) EXPECT_EQ(b.wait().text, "some text to be said");
  loop.finish();
}

TEST_P(StepLoopGrammar, AWrongGrammarEndsItsRequestAlone) {
  TestLoop loop(says("hello"), shape());
  Collector bad, empty;  // empty: has no tokens to choose
  EXPECT_TRUE(loop->submit({"", {7}, must_say("bad")}, bad.callback()).ok());
  EXPECT_TRUE(loop->submit({"", {7}, must_say("bad", 0)}, empty.callback()).ok());
  open();
  for (Collector* collector : {&bad, &empty}) {
    const Answer& answer = collector->wait();
    EXPECT_EQ(answer.reason(), FinishReason::kError);
    EXPECT_EQ(answer.last.error, "it is bad");
    EXPECT_EQ(answer.last.error_code, StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(loop.run({7}, greedy(20)).text, "hello");
  loop.finish();
}

TEST_P(StepLoopGrammar, ASlowOneHoldsNobodyUp) {
  TestLoop loop(says("hello"), shape());
  Collector slow, cancelled;
  const auto id = loop->submit({"", {7}, must_say("slow")}, slow.callback());
  const auto other = loop->submit({"", {7}, must_say("slow")}, cancelled.callback());
  ASSERT_TRUE(id.ok() && other.ok());
  EXPECT_EQ(loop.run({7}, greedy(20)).text, "hello");
  EXPECT_EQ(loop->stats().num_queue_reqs, 2);
  loop->cancel(*other);
  EXPECT_EQ(cancelled.wait().reason(), FinishReason::kAbort);
  open();
  EXPECT_EQ(slow.wait().text, "slow");
  loop.finish();
}

TEST_P(StepLoopGrammar, DrainingAbortsWhatStillWaits) {
  TestLoop loop(says("hello"), shape());
  Collector slow;
  ASSERT_TRUE(loop->submit({"", {7}, must_say("slow")}, slow.callback()).ok());
  loop->drain(0.01);
  EXPECT_EQ(slow.wait().reason(), FinishReason::kAbort);
  open();
}

// A grammar with one text that counts the masks it has filled.
class CountedGrammar final : public Grammar, public GrammarCompiler {
 public:
  explicit CountedGrammar(std::atomic<int>& num_masks) : num_masks_(num_masks) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec&, const GrammarBudget&) override {
    return std::shared_ptr<const Grammar>(std::make_shared<CountedGrammar>(num_masks_));
  }
  std::unique_ptr<GrammarMatcher> make_matcher() const override {
    class Matcher final : public GrammarMatcher {
     public:
      explicit Matcher(std::atomic<int>& num_masks) : num_masks_(num_masks) {}
      Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget& budget) override {
        ++num_masks_;
        return text_.fill_allowed(allowed, budget);
      }
      Status accept(int32_t id, const GrammarBudget& budget) override { return text_.accept(id, budget); }
      void rollback(int64_t num_tokens) override { text_.rollback(num_tokens); }
      bool has_ended() const override { return text_.has_ended(); }
      int64_t num_steps() const override { return text_.num_steps(); }

     private:
      std::atomic<int>& num_masks_;
      OneTextMatcher text_{"in good time"};
    };
    return std::make_unique<Matcher>(num_masks_);
  }
  int64_t num_bytes() const override { return 1; }
  int64_t num_steps() const override { return 1; }

 private:
  std::atomic<int>& num_masks_;
};

TEST_P(StepLoopGrammar, MasksAreFilledWhileTheModelRuns) {
  std::atomic<int> num_masks = 0;
  LoopShape with = shape();
  with.grammars = [&] { return std::make_unique<CountedGrammar>(num_masks); };
  TestLoop loop(hashed_logits, with);
  int num_steps = 0;
  loop.executor().on_step = [&](std::span<const Batch>) {
    ++num_steps;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (num_masks < num_steps && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(num_masks, num_steps) << "masks must be filled before the step has its logits";
  };
  EXPECT_EQ(loop.run({7}, must_say("")).text, "in good time");
  EXPECT_EQ(num_masks, num_steps);
  loop.finish();
}

// ---- grammars whose calls take long ---------------------------------------------------------------

// A call of "endless" never ends, for masks or for tokens.
FakeCost endless_masks(const std::string& text, int64_t, bool is_mask) {
  return text == "endless" && is_mask ? kEndless : FakeCost();
}
FakeCost endless_tokens(const std::string& text, int64_t, bool is_mask) {
  return text == "endless" && !is_mask ? kEndless : FakeCost();
}

SamplingParams on_and_on(int64_t num_tokens) {
  SamplingParams sampling = greedy(num_tokens);
  sampling.ignore_eos = true;
  return sampling;
}

class StepLoopSlowGrammar : public StepLoopGrammar {
 protected:
  LoopShape shape(FakeCosts costs) {
    LoopShape shape = StepLoopGrammar::shape();
    shape.grammars = [costs] { return std::make_unique<CostlyCompiler>(costs); };
    return shape;
  }
};

INSTANTIATE_TEST_SUITE_P(Samplers, StepLoopSlowGrammar, ::testing::Bool());

TEST_P(StepLoopSlowGrammar, OthersGetTheirTokensMeanwhile) {
  for (const auto costs : {endless_masks, endless_tokens}) {
    LoopShape with = shape(costs);
    with.watchdog_timeout = 0.3;
    TestLoop loop(hashed_logits, with);
    Collector endless[3];
    for (Collector& e : endless) ASSERT_TRUE(loop->submit({"", {7}, must_say("endless")}, e.callback()).ok());
    const auto begin = Clock::now();
    while (Clock::now() - begin < 600ms) {
      EXPECT_EQ(loop.run({1, 2, 3}, on_and_on(40)).token_ids, expected_greedy({1, 2, 3}, 40));
      EXPECT_EQ(loop.run({5}, must_say("some text")).text, "some text");
    }
    EXPECT_TRUE(eventually([&] { return loop->stats().num_grammar_queue_reqs == 3; }));
    EXPECT_TRUE(loop->failure().ok()) << "the watchdog mistook a slow grammar for a stuck step";
    for (Collector& e : endless) EXPECT_LE(e.num_deltas(), 1);
    loop->drain(0.01);
    for (Collector& e : endless) EXPECT_EQ(e.wait().reason(), FinishReason::kAbort);
    loop.finish();
  }
}

// Takes the best of several attempts, because the machine can be busy.
TEST_P(StepLoopSlowGrammar, TimeoutsAndCancelsAreKeptWhileACallIsUnderWay) {
  for (const auto costs : {endless_masks, endless_tokens}) {
    TestLoop loop(hashed_logits, shape(costs));
    auto best_timeout = Clock::duration::max(), best_cancel = best_timeout;
    for (int i = 0; i < 20 && (best_timeout > 150ms || best_cancel > 50ms); ++i) {
      Request request{"", {7}, must_say("endless")};
      request.timeout_seconds = 0.1;
      const auto begin = Clock::now();
      const Answer answer = loop.run(request);
      best_timeout = std::min(best_timeout, Clock::now() - begin);
      EXPECT_EQ(answer.last.error_code, StatusCode::kDeadline);
      EXPECT_NE(answer.last.error.find("0.1 s"), std::string::npos) << answer.last.error;

      Collector cancelled;
      const auto id = loop->submit({"", {7}, must_say("endless")}, cancelled.callback());
      ASSERT_TRUE(id.ok());
      EXPECT_TRUE(eventually([&] { return loop->stats().num_grammar_queue_reqs == 1; }));
      const auto cancel = Clock::now();
      loop->cancel(*id);
      EXPECT_EQ(cancelled.wait().reason(), FinishReason::kAbort);
      best_cancel = std::min(best_cancel, Clock::now() - cancel);
    }
    EXPECT_LE(best_timeout, 150ms);
    EXPECT_LE(best_cancel, 50ms);
    loop.finish();
  }
}

TEST_P(StepLoopSlowGrammar, EndsWhileCallsAreUnderWay) {
  for (const auto costs : {endless_masks, endless_tokens}) {
    TestLoop loop(hashed_logits, shape(costs));
    Collector endless[3];
    for (Collector& e : endless) ASSERT_TRUE(loop->submit({"", {7}, must_say("endless")}, e.callback()).ok());
    EXPECT_TRUE(eventually([&] { return loop->stats().num_grammar_queue_reqs == 3; }));
    loop.destroy();
    for (Collector& e : endless) EXPECT_EQ(e.wait().reason(), FinishReason::kAbort);
  }
}

TEST_P(StepLoopSlowGrammar, OverTheBudgetARequestFailsAlone) {
  for (const bool in_mask : {false, true}) {
    TestLoop loop(hashed_logits, shape([in_mask](const std::string& text, int64_t n, bool is_mask) {
                    const bool is_over = text == "a (b){1,9}" && n == 4 && is_mask == in_mask;
                    return FakeCost{.steps = is_over ? int64_t{1} << 40 : 1};
                  }));
    Collector over, other;
    ASSERT_TRUE(loop->submit({"", {7}, must_say("a (b){1,9}")}, over.callback()).ok());
    ASSERT_TRUE(loop->submit({"", {7}, must_say("some text to be said")}, other.callback()).ok());
    EXPECT_EQ(over.wait().reason(), FinishReason::kError);
    EXPECT_EQ(over.wait().last.error_code, StatusCode::kInvalidArgument);
    EXPECT_NE(over.wait().last.error.find("a (b){1,9} takes"), std::string::npos) << over.wait().last.error;
    EXPECT_EQ(over.wait().text, in_mask ? "a (b" : "a (b)");
    EXPECT_EQ(other.wait().text, "some text to be said");
    loop.finish();
  }
}

// A sequence that waits for its mask yields its pages to others and later continues where it was.
TEST_P(StepLoopSlowGrammar, IsRetractedWhileItAwaitsItsMask) {
  std::atomic<bool> is_open = false;
  LoopShape small = shape([&](const std::string& text, int64_t n, bool is_mask) {
    return text == "some text" && n == 3 && is_mask ? FakeCost{.steps = 5'000'000, .until = &is_open}
                                                    : FakeCost();
  });
  small.num_pages = 12;
  small.context_length = 48;
  TestLoop loop(hashed_logits, small);
  Collector first, parked, others[4];
  ASSERT_TRUE(loop->submit({"", {1}, on_and_on(40)}, first.callback()).ok());
  ASSERT_TRUE(loop->submit({"", std::vector<int32_t>(14, 2), must_say("some text")}, parked.callback()).ok());
  EXPECT_EQ(first.wait().token_ids, expected_greedy({1}, 40));
  EXPECT_TRUE(eventually([&] { return parked.num_deltas() == 3; }));
  // Each of the other requests needs 11 of the 12 pages, so none can end while `parked` keeps its pages.
  for (int32_t i = 0; i < 4; ++i)
    ASSERT_TRUE(loop->submit({"", {i, 9}, on_and_on(40)}, others[i].callback()).ok());
  for (int32_t i = 0; i < 4; ++i) EXPECT_EQ(others[i].wait().token_ids, expected_greedy({i, 9}, 40));
  EXPECT_EQ(parked.num_deltas(), 3);
  EXPECT_GT(loop->stats().num_retracted_reqs, 0);
  is_open = true;
  EXPECT_EQ(parked.wait().text, "some text");
  loop.finish();
}

// Even if slow grammars could occupy the whole batch, other requests are admitted at once.
TEST_P(StepLoopSlowGrammar, GivesItsPlaceToOthers) {
  LoopShape with = shape(endless_masks);
  with.scheduler.max_running_requests = 4;
  for (const int num_groups : {1, 2}) {
    with.num_groups = num_groups;
    TestLoop loop(hashed_logits, with);
    std::vector<Collector> endless(9);
    for (Collector& e : endless) ASSERT_TRUE(loop->submit({"", {7}, must_say("endless")}, e.callback()).ok());
    EXPECT_TRUE(eventually([&] { return loop->stats().num_grammar_queue_reqs == 9; }));
    EXPECT_EQ(loop.run({1, 2, 3}, on_and_on(40)).token_ids, expected_greedy({1, 2, 3}, 40));
    EXPECT_EQ(loop.run({5}, must_say("some text")).text, "some text");
    loop->drain(0.01);
    loop.finish();
  }
}

// Every output equals the output with calls that take no time, also if sequences have a state, which a row
// that is computed again must not change twice.
TEST_P(StepLoopSlowGrammar, AnswersDoNotDependOnTheTimeOfMasks) {
  const auto run_all = [&](FakeCosts costs, int64_t num_pages, int64_t num_slots, int* num_steps) {
    LoopShape with = shape(std::move(costs));
    with.num_slots = num_slots;
    with.num_pages = num_pages;
    with.context_length = 48;
    with.num_groups = 2;
    with.masks = {.num_fast_threads = 2, .num_slow_threads = 2};
    TestLoop loop(hashed_logits, with);
    loop.executor().on_step = [&](std::span<const Batch>) {
      if (num_steps != nullptr) ++*num_steps;
      std::this_thread::sleep_for(100us);
    };
    std::vector<Collector> collectors(16);
    for (size_t i = 0; i < collectors.size(); ++i) {
      SamplingParams sampling = i % 4 == 3 ? greedy(25) : must_say("hashed" + std::to_string(i % 3), 25);
      sampling.temperature = i % 2 == 0 ? 0.8f : 0;
      sampling.seed = i;
      if (i % 3 == 0) sampling.frequency_penalty = 0.7f;
      if (i % 5 == 0) sampling.top_logprobs = 2;
      std::vector<int32_t> prompt(1 + i % 11, static_cast<int32_t>(i));
      Request request{"", std::move(prompt), sampling};
      if (i % 5 == 0) request.prompt_logprobs_from = 0;
      EXPECT_TRUE(loop->submit(std::move(request), collectors[i].callback()).ok());
    }
    std::vector<Answer> answers;
    for (Collector& c : collectors) answers.push_back(c.wait());
    loop.finish();
    return answers;
  };
  for (const int64_t num_slots : {0, 14}) {
    const std::vector<Answer> expected =
        run_all([](auto&&...) { return FakeCost(); }, 256, num_slots, nullptr);
    for (const uint32_t seed : {1u, 2u, 3u, 4u}) {
      std::atomic<uint32_t> calls = seed * 1000;
      int num_steps = 0;
      const std::vector<Answer> answers = run_all(
          [&](const std::string&, int64_t, bool) {
            const uint32_t draw = calls++ * 2654435761u >> 16;
            return FakeCost{.steps = draw % 5 == 0 ? 5'000'000 : 1,
                            .time = std::chrono::microseconds(draw % 3 == 0 ? draw % 1500 : 0)};
          },
          seed % 2 == 0 ? 14 : 256, num_slots, &num_steps);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(answers[i].token_ids, expected[i].token_ids) << seed << " " << i << " " << num_slots;
        EXPECT_EQ(answers[i].text, expected[i].text);
        EXPECT_EQ(answers[i].reason(), expected[i].reason());
        ASSERT_EQ(answers[i].logprobs.size(), expected[i].logprobs.size());
        for (size_t t = 0; t < expected[i].logprobs.size(); ++t)
          EXPECT_EQ(answers[i].logprobs[t].chosen.logprob, expected[i].logprobs[t].chosen.logprob);
        EXPECT_EQ(answers[i].prompt_logprobs.size(), expected[i].prompt_logprobs.size());
      }
      EXPECT_GT(num_steps, 25) << "rows of late masks were not computed again";
    }
  }
}

// The model has no end tokens: the end is only known once the last token has been accepted.
TEST_P(StepLoopSlowGrammar, WithoutEndTokensTheGrammarEndsTheAnswer) {
  class EndsWithItsText final : public GrammarMatcher {
   public:
    Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget& budget) override {
      return text_.fill_allowed(allowed, budget);
    }
    Status accept(int32_t id, const GrammarBudget& budget) override {
      std::this_thread::sleep_for(3ms);
      ++num_taken_;
      return text_.accept(id, budget);
    }
    void rollback(int64_t num_tokens) override {
      num_taken_ -= num_tokens;
      text_.rollback(num_tokens);
    }
    bool has_ended() const override { return num_taken_ == 4; }
    int64_t num_steps() const override { return num_taken_; }

   private:
    OneTextMatcher text_{"text"};
    int64_t num_taken_ = 0;
  };
  class TextGrammar final : public Grammar, public GrammarCompiler {
   public:
    Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec&, const GrammarBudget&) override {
      return std::shared_ptr<const Grammar>(std::make_shared<TextGrammar>());
    }
    std::unique_ptr<GrammarMatcher> make_matcher() const override {
      return std::make_unique<EndsWithItsText>();
    }
    int64_t num_bytes() const override { return 1; }
    int64_t num_steps() const override { return 1; }
  };
  LoopShape with = StepLoopGrammar::shape();
  with.eos_token_ids = {};
  with.grammars = [] { return std::make_unique<TextGrammar>(); };
  TestLoop loop(hashed_logits, with);
  for (const int64_t max_new_tokens : {3, 4, 5}) {
    const Answer answer = loop.run({7}, must_say("text", max_new_tokens));
    EXPECT_EQ(answer.text, max_new_tokens == 3 ? "tex" : "text");
    EXPECT_EQ(answer.reason(), max_new_tokens == 3 ? FinishReason::kLength : FinishReason::kStop);
  }
  loop.finish();
}

TEST(StepLoopWithoutGrammars, RefusesThem) {
  TestLoop loop;
  SamplingParams sampling = greedy(5);
  sampling.grammar = {GrammarSpec::Kind::kRegex, "a"};
  Collector collector;
  const auto id = loop->submit({"", {7}, sampling}, collector.callback());
  EXPECT_EQ(id.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(id.status().message().find("--grammar-backend"), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
