#include "engine/answer_grammar.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>

#include "engine/fake_grammar.h"

namespace fp4moe {
namespace {

constexpr int64_t kVocab = 300;

// Allows ids by a hash of what it has taken; counts masks, and waits before each until `open`.
class HashedMatcher final : public GrammarMatcher {
 public:
  struct Gate {
    std::atomic<bool> open = true;
    std::atomic<int> num_begun = 0;
  };
  explicit HashedMatcher(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  static uint32_t word(uint64_t hash, size_t i) {
    return static_cast<uint32_t>((hash + i) * 0x9e3779b97f4a7c15u >> 32) | 1;
  }
  Status fill_allowed(std::span<uint32_t> allowed) override {
    if (has_ended()) return internal_error("a mask after the end");
    ++gate_->num_begun;
    gate_->num_begun.notify_all();
    gate_->open.wait(false);
    for (size_t i = 0; i < allowed.size(); ++i) allowed[i] = word(hash_, i);
    return {};
  }
  Status accept(int32_t id) override {
    hash_ = hash_ * 31 + static_cast<uint64_t>(id) + 1;
    ended_ = id == kEosId;
    return {};
  }
  bool has_ended() const override { return ended_; }

 private:
  std::shared_ptr<Gate> gate_;
  uint64_t hash_ = 7;
  bool ended_ = false;
};

std::vector<uint32_t> mask_of(AnswerGrammar& answer) {
  const auto allowed = answer.allowed();
  EXPECT_TRUE(allowed.ok());
  return {allowed->begin(), allowed->end()};
}

TEST(AnswerGrammar, MasksFilledAheadAreThoseFilledWhenAsked) {
  std::mt19937 random(1);
  for (const int num_threads : {0, 1, 3}) {
    MaskThreads threads(num_threads);
    const auto gate = std::make_shared<HashedMatcher::Gate>();
    constexpr int kNumAnswers = 5, kNumTokens = 200;
    std::vector<std::shared_ptr<AnswerGrammar>> answers;
    for (int i = 0; i < kNumAnswers; ++i)
      answers.push_back(std::make_shared<AnswerGrammar>(std::make_unique<HashedMatcher>(gate), kVocab));
    HashedMatcher expected(std::make_shared<HashedMatcher::Gate>());
    std::vector<uint32_t> mask((kVocab + 31) / 32);
    for (int n = 0; n < kNumTokens; ++n) {
      for (const auto& answer : answers) threads.fill_ahead(answer);
      const auto id = static_cast<int32_t>(random() % kEosId);
      ASSERT_TRUE(expected.fill_allowed(mask).ok());
      ASSERT_TRUE(expected.accept(id).ok());
      for (const auto& answer : answers) {
        ASSERT_EQ(mask_of(*answer), mask);
        ASSERT_TRUE(answer->accept(id).ok());
      }
    }
    for (const auto& answer : answers) mask_of(*answer);
    EXPECT_EQ(gate->num_begun, kNumAnswers * (kNumTokens + 1)) << "a mask was filled twice";
  }
}

TEST(AnswerGrammar, FilledWithoutBeingAskedFor) {
  MaskThreads threads(1);
  const auto gate = std::make_shared<HashedMatcher::Gate>();
  threads.fill_ahead(std::make_shared<AnswerGrammar>(std::make_unique<HashedMatcher>(gate), kVocab));
  const auto kept = std::make_shared<AnswerGrammar>(std::make_unique<HashedMatcher>(gate), kVocab);
  threads.fill_ahead(kept);
  while (gate->num_begun == 0) gate->num_begun.wait(0);
  mask_of(*kept);
  EXPECT_EQ(gate->num_begun, 1) << "the first answer has nobody left";
}

TEST(AnswerGrammar, AnswersThatEndWhileTheirMaskIsFilled) {
  const auto gate = std::make_shared<HashedMatcher::Gate>();
  gate->open = false;
  MaskThreads threads(1);
  auto answer = std::make_shared<AnswerGrammar>(std::make_unique<HashedMatcher>(gate), kVocab);
  threads.fill_ahead(answer);
  gate->num_begun.wait(0);
  answer.reset();
  gate->open = true;
  gate->open.notify_all();
}

TEST(AnswerGrammar, ThereIsNoMaskAfterTheEnd) {
  const auto gate = std::make_shared<HashedMatcher::Gate>();
  AnswerGrammar answer(std::make_unique<HashedMatcher>(gate), kVocab);
  mask_of(answer);
  ASSERT_TRUE(answer.accept(kEosId).ok());
  EXPECT_TRUE(answer.has_ended());
  answer.fill();
  EXPECT_EQ(gate->num_begun, 1);
}

}  // namespace
}  // namespace fp4moe
