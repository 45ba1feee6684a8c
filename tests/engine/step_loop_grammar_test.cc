#include <gtest/gtest.h>

#include "engine/fake_grammar.h"
#include "engine/test_loop.h"

namespace fp4moe {
namespace {

// By the host's sampler and by the executor's.
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
  Collector bad;
  EXPECT_TRUE(loop->submit({"", {7}, must_say("bad")}, bad.callback()).ok());
  open();
  const Answer& answer = bad.wait();
  EXPECT_EQ(answer.reason(), FinishReason::kError);
  EXPECT_EQ(answer.last.error, "it is bad");
  EXPECT_EQ(answer.last.error_code, StatusCode::kInvalidArgument);
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

// One text's grammar that counts the masks it has filled.
class CountedGrammar final : public Grammar, public GrammarCompiler {
 public:
  explicit CountedGrammar(std::atomic<int>& num_masks) : num_masks_(num_masks) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec&) override {
    return std::shared_ptr<const Grammar>(std::make_shared<CountedGrammar>(num_masks_));
  }
  std::unique_ptr<GrammarMatcher> make_matcher() const override {
    class Matcher final : public GrammarMatcher {
     public:
      explicit Matcher(std::atomic<int>& num_masks) : num_masks_(num_masks) {}
      Status fill_allowed(std::span<uint32_t> allowed) override {
        ++num_masks_;
        return text_.fill_allowed(allowed);
      }
      Status accept(int32_t id) override { return text_.accept(id); }
      bool has_ended() const override { return text_.has_ended(); }

     private:
      std::atomic<int>& num_masks_;
      OneTextMatcher text_{"in good time"};
    };
    return std::make_unique<Matcher>(num_masks_);
  }
  int64_t num_bytes() const override { return 1; }

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
    EXPECT_EQ(num_masks, num_steps) << "before the step has its logits";
  };
  EXPECT_EQ(loop.run({7}, must_say("")).text, "in good time");
  EXPECT_EQ(num_masks, num_steps);
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
