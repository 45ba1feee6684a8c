#include "engine/grammar/output_grammar.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <random>

#include "engine/fake_grammar.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using State = OutputGrammar::State;

constexpr int64_t kVocab = 300;
constexpr FakeCost kSlow{.steps = 5'000'000};

// Creates outputs of one grammar and counts how often the mask after each number of tokens was started.
class MaskThreadsTest : public ::testing::Test {
 protected:
  void make(const MaskLimits& limits = {}) {
    threads_ = std::make_unique<MaskThreads>(limits, [this] { ++num_done_; });
  }
  std::shared_ptr<OutputGrammar> answer(const std::string& text = "hashed", int64_t max_drafts = 0) {
    std::shared_ptr<const Grammar>& grammar = grammars_[text];
    if (grammar == nullptr)
      grammar = std::make_shared<CostlyGrammar>(text, [this](const std::string& of, int64_t n, bool is_mask) {
        const std::lock_guard lock(mutex_);
        if (is_mask) ++num_begun_;
        return costs_ ? costs_(of, n, is_mask) : FakeCost();
      });
    return std::make_shared<OutputGrammar>(grammar, kVocab, max_drafts);
  }
  std::shared_ptr<OutputGrammar> start(const std::string& text = "hashed") {
    auto made = answer(text);
    threads_->start(made);
    return made;
  }
  void advance(const std::shared_ptr<OutputGrammar>& answer, int32_t id) {
    threads_->advance(answer, {&id, 1});
  }
  void wait(OutputGrammar& answer) {
    OutputGrammar* one = &answer;
    threads_->wait_for({&one, 1}, std::chrono::steady_clock::now() + 60s);
    EXPECT_NE(answer.state(), State::kWorking);
  }
  int num_begun() {
    const std::lock_guard lock(mutex_);
    return num_begun_;
  }

  FakeCosts costs_;  // set before the first answer
  std::mutex mutex_;
  int num_begun_ = 0;
  std::atomic<int> num_done_ = 0;
  std::map<std::string, std::shared_ptr<const Grammar>> grammars_;
  std::unique_ptr<MaskThreads> threads_;
};

// Masks are equal in both lanes, even if outputs change lanes and their matchers are recreated.
TEST_F(MaskThreadsTest, MasksAreThoseOfOneMatcher) {
  for (const int num_threads : {1, 3}) {
    for (const int one_in : {0, 1, 7, 60}) {  // one call in `one_in` is too expensive for the fast lane
      std::atomic<uint32_t> calls = 0;
      costs_ = [&](const std::string&, int64_t, bool) {
        return one_in > 0 && ++calls % static_cast<uint32_t>(one_in) == 0 ? kSlow : FakeCost();
      };
      make({.num_fast_threads = num_threads, .num_slow_threads = num_threads});
      std::vector<std::shared_ptr<OutputGrammar>> answers;
      for (int i = 0; i < 5; ++i) answers.push_back(start("hashed" + std::to_string(i)));
      HashedMatcher expected;
      std::vector<uint32_t> mask((kVocab + 31) / 32);
      std::mt19937 random(1);
      for (int n = 0; n < 100; ++n) {
        const auto id = static_cast<int32_t>(random() % kEosId);
        ASSERT_TRUE(expected.fill_allowed(mask, kMaskBudget).ok());
        ASSERT_TRUE(expected.accept(id, kAcceptBudget).ok());
        for (const auto& answer : answers) {
          wait(*answer);
          ASSERT_EQ(answer->state(), State::kReady) << answer->status().to_string();
          const auto allowed = answer->allowed();
          ASSERT_EQ(std::vector<uint32_t>(allowed.begin(), allowed.end()), mask);
          advance(answer, id);
        }
      }
      for (const auto& answer : answers) wait(*answer);
      threads_.reset();
      grammars_.clear();
    }
  }
}

std::vector<uint32_t> mask_after(std::span<const int32_t> taken, std::span<const int32_t> drafts) {
  HashedMatcher matcher;
  std::vector<uint32_t> mask((kVocab + 31) / 32);
  for (const int32_t id : taken) EXPECT_TRUE(matcher.accept(id, kAcceptBudget).ok());
  for (const int32_t id : drafts) EXPECT_TRUE(matcher.accept(id, kAcceptBudget).ok());
  EXPECT_TRUE(matcher.fill_allowed(mask, kMaskBudget).ok());
  return mask;
}

// Chains of drafts, some of them refused or wrong, in outputs whose calls change lanes.
TEST_F(MaskThreadsTest, MasksAfterDraftsAreThoseOfOneMatcher) {
  constexpr int64_t kMaxDrafts = 5;
  int64_t num_ahead = 0, num_refused = 0, num_changed = 0;
  for (const int one_in : {0, 40}) {
    std::atomic<uint32_t> calls = 0;
    costs_ = [&](const std::string&, int64_t, bool) {
      return one_in > 0 && ++calls % static_cast<uint32_t>(one_in) == 0 ? kSlow : FakeCost();
    };
    make();
    const auto one = answer("hashed", kMaxDrafts);
    threads_->start(one);
    std::mt19937 random(1);
    std::vector<int32_t> taken;
    for (int n = 0; n < 200; ++n) {
      std::vector<int32_t> drafts;
      int64_t num_allowed = 0;
      bool is_refused = false;
      for (size_t i = random() % 9; i > 0; --i) {
        const std::vector<uint32_t> before = is_refused ? std::vector<uint32_t>() : mask_after(taken, drafts);
        drafts.push_back(random() % 3 == 0 ? static_cast<int32_t>(random() % 257) : '!');
        is_refused = is_refused || drafts.back() == kEosId || !is_allowed(before, drafts.back());
        num_allowed += is_refused ? 0 : 1;
      }
      if (random() % 4 == 0) {  // another chain first
        threads_->look_ahead(one, std::vector<int32_t>{'!', '!', '!'});
        ++num_changed;
      }
      if (random() % 2 == 0) wait(*one);
      threads_->look_ahead(one, drafts);
      wait(*one);
      ASSERT_EQ(one->state(), State::kReady) << one->status().to_string();
      if (one_in == 0) {
        ASSERT_EQ(one->num_ahead(), std::min(num_allowed, kMaxDrafts));
      }
      ASSERT_LE(one->num_ahead(), std::min(num_allowed, kMaxDrafts));
      for (int64_t depth = 0; depth <= one->num_ahead(); ++depth) {
        const auto allowed = one->allowed(depth);
        ASSERT_EQ(std::vector<uint32_t>(allowed.begin(), allowed.end()),
                  mask_after(taken, std::span(drafts).first(static_cast<size_t>(depth))))
            << n << " depth " << depth;
      }
      num_ahead += one->num_ahead();
      num_refused += is_refused ? 1 : 0;
      const auto num_kept = static_cast<std::ptrdiff_t>(random() % static_cast<size_t>(one->num_ahead() + 1));
      std::vector<int32_t> ids(drafts.begin(), drafts.begin() + num_kept);
      ids.push_back(random() % 2 == 0 ? '!' : 'a' + static_cast<int32_t>(random() % 20));
      if (random() % 8 == 0) threads_->look_ahead(one, std::vector<int32_t>{'!', '!', '!', '!'});  // late
      threads_->advance(one, ids);
      taken.insert(taken.end(), ids.begin(), ids.end());
    }
    wait(*one);
    threads_.reset();
    grammars_.clear();
  }
  EXPECT_GT(num_ahead, 300);
  EXPECT_GT(num_refused, 50);
  EXPECT_GT(num_changed, 50);
}

// A draft over the fast lane's budget ends the chain and moves the output to the slow lane, no more.
TEST_F(MaskThreadsTest, AnExpensiveDraftFailsNoAnswer) {
  std::atomic<bool> is_dear = true;
  costs_ = [&](const std::string&, int64_t n, bool) { return n == 2 && is_dear ? kSlow : FakeCost(); };
  make({.max_steps = 4'000'000});
  const auto one = answer("hashed", 3);
  threads_->start(one);
  wait(*one);
  threads_->look_ahead(one, std::vector<int32_t>{'!', '!', '!'});
  wait(*one);
  EXPECT_EQ(one->num_ahead(), 1);
  EXPECT_TRUE(one->is_slow());
  is_dear = false;
  threads_->look_ahead(one, std::vector<int32_t>{'!'});
  EXPECT_FALSE(one->is_looking_ahead()) << "the slow lane has no drafts";
  EXPECT_EQ(one->num_ahead(), 1);
  threads_->look_ahead(one, std::vector<int32_t>{'!', 'a'});
  EXPECT_EQ(one->num_ahead(), 1);
  threads_->look_ahead(one, std::vector<int32_t>{'a', '!'});
  EXPECT_EQ(one->num_ahead(), 0) << "the mask is the one after '!'";
  for (int n = 0; n < 4; ++n) {
    advance(one, '!');
    wait(*one);
    ASSERT_EQ(one->state(), State::kReady) << one->status().to_string();
  }
}

TEST_F(MaskThreadsTest, EachMaskIsFilledOnceAndReported) {
  make();
  const auto one = start();
  for (int n = 1; n <= 20; ++n) {
    wait(*one);
    EXPECT_EQ(num_begun(), n);
    EXPECT_TRUE(eventually([&] { return num_done_ == n; }));
    advance(one, '!');
  }
}

TEST_F(MaskThreadsTest, ExpensiveAnswersLeaveTheFastLaneAndComeBack) {
  costs_ = [](const std::string&, int64_t n, bool is_mask) { return n == 3 && is_mask ? kSlow : FakeCost(); };
  make();
  const auto one = start();
  for (int n = 0; n <= 3 + MaskThreads::kPromoteAfter; ++n) {
    wait(*one);
    EXPECT_EQ(one->is_slow(), n >= 3 && n < 3 + MaskThreads::kPromoteAfter) << n;
    advance(one, '!');
  }
  wait(*one);
  const auto later = start();
  wait(*later);
  EXPECT_TRUE(later->is_slow()) << "its grammar was slow before";
  const auto other = start("hashed, another one");
  wait(*other);
  EXPECT_FALSE(other->is_slow());
}

// The fast lane has one thread; endless calls must leave it.
TEST_F(MaskThreadsTest, EndlessCallsHoldNoCheapOneUp) {
  costs_ = [](const std::string& text, int64_t, bool) { return text == "endless" ? kEndless : FakeCost(); };
  make({.num_fast_threads = 1, .num_slow_threads = 1});
  std::vector<std::shared_ptr<OutputGrammar>> endless;
  for (int i = 0; i < 5; ++i) endless.push_back(start("endless"));
  const auto cheap = start();
  for (int n = 0; n < 50; ++n) {
    wait(*cheap);
    advance(cheap, '!');
  }
  wait(*cheap);
  for (const auto& one : endless) EXPECT_EQ(one->state(), State::kWorking);
}

TEST_F(MaskThreadsTest, RetiredAnswersAreCancelledAndFreed) {
  costs_ = [](const std::string& text, int64_t, bool) { return text == "endless" ? kEndless : FakeCost(); };
  make({.num_fast_threads = 1, .num_slow_threads = 1});
  std::vector<std::weak_ptr<OutputGrammar>> gone;
  for (int i = 0; i < 5; ++i) {
    auto one = start(i % 2 == 0 ? "endless" : "hashed");
    gone.push_back(one);
    threads_->retire(std::move(one));
  }
  for (const auto& one : gone) EXPECT_TRUE(eventually([&] { return one.expired(); }));
  const auto last = start();
  wait(*last);
}

TEST_F(MaskThreadsTest, EndsWhileCallsAreUnderWay) {
  costs_ = [](const std::string&, int64_t, bool) { return kEndless; };
  make({.num_fast_threads = 1, .num_slow_threads = 2});
  std::vector<std::shared_ptr<OutputGrammar>> answers;
  for (int i = 0; i < 5; ++i) answers.push_back(start("hashed" + std::to_string(i)));
  EXPECT_TRUE(eventually([&] { return num_begun() >= 7; }));  // two of them are in the slow lane
  threads_.reset();
  EXPECT_EQ(num_done_, 0);
}

TEST_F(MaskThreadsTest, OverTheBudgetAnAnswerFailsAndSaysWhy) {
  costs_ = [](const std::string& text, int64_t n, bool is_mask) {
    return FakeCost{.steps = text == "of masks" && is_mask && n == 2     ? 2'000'000
                             : text == "of tokens" && !is_mask && n == 1 ? 3'000'000
                                                                         : 1};
  };
  make({.max_steps = 1'000'000});
  for (const std::string text : {"of masks", "of tokens"}) {
    const auto one = start(text);
    for (size_t n = 0; n < 2; ++n) {
      wait(*one);
      ASSERT_EQ(one->state(), State::kReady);
      advance(one, text[n]);
    }
    wait(*one);
    ASSERT_EQ(one->state(), State::kFailed);
    EXPECT_EQ(one->status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(one->status().message().find(text), std::string::npos) << one->status().message();
    EXPECT_NE(one->status().message().find("at most 1000000"), std::string::npos) << one->status().message();
  }
}

TEST_F(MaskThreadsTest, TheEndIsAStateAndHasNoMask) {
  make();
  const auto one = start("a");
  wait(*one);
  advance(one, 'a');
  wait(*one);
  advance(one, kEosId);
  wait(*one);
  EXPECT_EQ(one->state(), State::kEnded);
  EXPECT_EQ(num_begun(), 2);
}

TEST_F(MaskThreadsTest, AFirstTokenFromElsewhereIsTaken) {
  make();
  const auto one = answer("ab");
  threads_->start(one, 'a');
  wait(*one);
  ASSERT_EQ(one->state(), State::kReady);
  EXPECT_EQ(one->allowed()['b' / 32], 1u << ('b' % 32));
  EXPECT_EQ(num_begun(), 1);
}

TEST_F(MaskThreadsTest, ATokenAgainstTheGrammarIsOurMistake) {
  make();
  const auto one = start("ab");
  wait(*one);
  advance(one, 'x');
  wait(*one);
  ASSERT_EQ(one->state(), State::kFailed);
  EXPECT_EQ(one->status().code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace fp4moe
