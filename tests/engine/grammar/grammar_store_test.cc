#include "engine/grammar/grammar_store.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/eventually.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

class FakeGrammar final : public Grammar {
 public:
  explicit FakeGrammar(int64_t num_bytes) : num_bytes_(num_bytes) {}
  std::unique_ptr<GrammarMatcher> make_matcher() const override { return nullptr; }
  int64_t num_bytes() const override { return num_bytes_; }
  int64_t num_steps() const override { return 1; }

 private:
  int64_t num_bytes_;
};

// Controls how long compilations wait, and records them.
struct Compilations {
  std::mutex mutex;
  std::condition_variable changed;
  bool gate_is_open = false;
  int num_running = 0, num_cancelled = 0;
  std::vector<std::string> begun;  // texts, in order
  int nice = 0;                    // nice value of the last compilation's thread

  void open_gate() {
    std::lock_guard lock(mutex);
    gate_is_open = true;
  }
  void wait_for_running(int num) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_running >= num; });
  }
  int64_t count(const std::string& text) {
    std::lock_guard lock(mutex);
    return std::ranges::count(begun, text);
  }
  int cancelled() {
    std::lock_guard lock(mutex);
    return num_cancelled;
  }
};

// "bad" is invalid, "slow..." waits for the gate or its cancellation, "throw" runs out of memory. A grammar
// takes 100 bytes, "huge" 10000.
class FakeCompiler final : public GrammarCompiler {
 public:
  explicit FakeCompiler(std::shared_ptr<Compilations> log) : log_(std::move(log)) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec,
                                                 const GrammarBudget& budget) override {
    {
      std::unique_lock lock(log_->mutex);
      log_->begun.push_back(spec.text);
      log_->nice = getpriority(PRIO_PROCESS, static_cast<id_t>(gettid()));
      ++log_->num_running;
      log_->changed.notify_all();
      while (spec.text.starts_with("slow") && !log_->gate_is_open && !budget.is_cancelled->load())
        log_->changed.wait_for(lock, 1ms);
      --log_->num_running;
      if (budget.is_cancelled->load()) {
        ++log_->num_cancelled;
        return cancelled("as asked");
      }
    }
    if (spec.text == "bad") return invalid_argument("it is bad");
    if (spec.text == "costly" && budget.max_steps < 1000) return invalid_argument("it is costly");
    if (spec.text == "throw") throw std::bad_alloc();
    return std::shared_ptr<const Grammar>(std::make_shared<FakeGrammar>(spec.text == "huge" ? 10000 : 100));
  }

 private:
  std::shared_ptr<Compilations> log_;
};

class GrammarStoreTest : public ::testing::Test {
 protected:
  void make(const GrammarLimits& limits) {
    store_ = std::make_unique<GrammarStore>(std::make_unique<FakeCompiler>(log_), limits,
                                            [this] { ++num_ready_; });
  }
  GrammarTicket ask(const std::string& text, const std::string& client = "me") {
    return store_->ask({GrammarSpec::Kind::kRegex, text}, client);
  }
  Status status(const std::string& text) { return ask(text).get().status(); }

  std::shared_ptr<Compilations> log_ = std::make_shared<Compilations>();
  std::atomic<int> num_ready_ = 0;
  std::unique_ptr<GrammarStore> store_;
};

TEST_F(GrammarStoreTest, CompilesAtALowPriority) {
  make({});
  const int own = getpriority(PRIO_PROCESS, static_cast<id_t>(gettid()));
  ASSERT_TRUE(ask("a").get().ok());
  EXPECT_EQ(log_->nice, std::min(own + 8, 19));
  EXPECT_EQ(getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())), own);
}

TEST_F(GrammarStoreTest, CompilesOnceAndRemembers) {
  make({});
  const GrammarTicket first = ask("a");
  ASSERT_TRUE(first.get().ok());
  const GrammarTicket second = ask("a", "another client");
  EXPECT_TRUE(second.is_ready());
  EXPECT_EQ(*first.get(), *second.get());
  EXPECT_EQ(log_->count("a"), 1);
  EXPECT_TRUE(
      store_->ask({GrammarSpec::Kind::kEbnf, "a"}, "me").get().ok());  // another kind is another grammar
  EXPECT_EQ(log_->count("a"), 2);
  store_.reset();
  EXPECT_EQ(num_ready_, 2);
}

TEST_F(GrammarStoreTest, RequestsForOneGrammarShareItsCompilation) {
  make({});
  GrammarTicket first = ask("slow");
  const GrammarTicket second = ask("slow", "another client");
  log_->wait_for_running(1);
  EXPECT_FALSE(second.is_ready());
  first = {};  // the other ticket still waits
  log_->open_gate();
  EXPECT_TRUE(second.get().ok());
  EXPECT_EQ(log_->count("slow"), 1);
  EXPECT_EQ(log_->cancelled(), 0);
}

TEST_F(GrammarStoreTest, ASlowOneStopsNoOtherClient) {
  make({.max_compiling = 2, .max_compiling_of_client = 1});
  const GrammarTicket slow = ask("slow"), own = ask("a");
  log_->wait_for_running(1);
  EXPECT_TRUE(ask("b", "another client").get().ok());
  EXPECT_TRUE(ask("c", "another client").get().ok());
  EXPECT_FALSE(slow.is_ready());
  EXPECT_FALSE(own.is_ready()) << "a client has one compilation at a time";
  log_->open_gate();
  EXPECT_TRUE(slow.get().ok());
  EXPECT_TRUE(own.get().ok());
}

// If one client queues a thousand hostile grammars, another client's ordinary grammar is compiled next.
TEST_F(GrammarStoreTest, ClientsTakeTurns) {
  make({.max_compiling = 1, .max_waiting = 2000, .max_waiting_of_client = 1000});
  std::vector<GrammarTicket> hostile;
  for (int i = 0; i < 1000; ++i) hostile.push_back(ask("slow" + std::to_string(i), "attacker"));
  log_->wait_for_running(1);
  const GrammarTicket first = ask("a"), second = ask("b"), third = ask("c", "a third client");
  const GrammarTicket shared = ask("slow999", "a fourth client");
  log_->open_gate();
  for (const GrammarTicket* ticket : {&first, &second, &third, &shared}) EXPECT_TRUE(ticket->get().ok());
  hostile.clear();
  store_.reset();
  const std::vector<std::string> expected = {"slow0", "slow1", "a", "c", "slow999", "slow2", "b"};
  ASSERT_GE(log_->begun.size(), expected.size());
  log_->begun.resize(expected.size());
  EXPECT_EQ(log_->begun, expected);
}

TEST_F(GrammarStoreTest, AClientsWaitingGrammarsAreLimited) {
  make({.max_compiling = 1, .max_waiting_of_client = 3, .max_waiting_bytes_of_client = 40});
  std::vector<GrammarTicket> waiting = {ask("slow")};
  log_->wait_for_running(1);
  for (const char* text : {"a", "b", "c"}) waiting.push_back(ask(text));
  const GrammarTicket refused = ask("d");
  ASSERT_TRUE(refused.is_ready());
  EXPECT_EQ(refused.get().status().code(), StatusCode::kUnavailable);
  EXPECT_NE(refused.get().status().message().find("3 grammars of this client"), std::string::npos)
      << refused.get().status().message();
  waiting.push_back(ask("e", "another client"));
  EXPECT_FALSE(waiting.back().is_ready());
  const GrammarTicket large = ask(std::string(41, 'x'), "a third client");
  ASSERT_TRUE(large.is_ready());
  EXPECT_EQ(large.get().status().code(), StatusCode::kUnavailable);
  waiting[1] = {};  // leaves the queue
  waiting.push_back(ask("d"));
  log_->open_gate();
  for (const GrammarTicket& ticket : waiting)
    if (ticket.valid()) {
      EXPECT_TRUE(ticket.get().ok());
    }
  EXPECT_EQ(log_->count("a"), 0);
}

TEST_F(GrammarStoreTest, TheOnesUsedLastAreKept) {
  make({.max_cache_bytes = 310});  // room for two grammars of 100 bytes with their keys
  for (const char* text : {"a", "b", "a", "c"}) ASSERT_TRUE(ask(text).get().ok());
  ASSERT_TRUE(ask("a").get().ok());
  EXPECT_EQ(log_->count("a"), 1);
  for (const char* text : {"d", "e", "f"}) ASSERT_TRUE(ask(text).get().ok());
  ASSERT_TRUE(ask("a").get().ok());
  EXPECT_EQ(log_->count("a"), 2);
}

TEST_F(GrammarStoreTest, FailuresAreReportedAndRememberedForAWhile) {
  make({.max_text_bytes = 10, .max_grammar_bytes = 1000, .max_steps = 100, .failure_time = 200ms});
  for (const char* text : {"bad", "costly", "huge"}) {
    EXPECT_EQ(status(text).code(), StatusCode::kInvalidArgument);
    const GrammarTicket again = ask(text);
    EXPECT_EQ(again.get().status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(status("bad").message(), "it is bad");
  EXPECT_EQ(status("costly").message(), "it is costly");
  EXPECT_NE(status("huge").message().find("10000 bytes; at most 1000"), std::string::npos);
  EXPECT_EQ(status("throw").code(), StatusCode::kUnavailable);
  EXPECT_NE(status("01234567890").message().find("11 bytes; at most 10"), std::string::npos);
  EXPECT_TRUE(eventually([&] {
    EXPECT_EQ(status("bad").message(), "it is bad");
    return log_->count("bad") >= 2;
  })) << "the failure is remembered for too long";
}

TEST_F(GrammarStoreTest, FewFailuresAreRemembered) {
  make({.max_failures = 1});
  EXPECT_FALSE(status("bad").ok());
  EXPECT_FALSE(status("bad").ok());
  EXPECT_EQ(log_->count("bad"), 1);
  EXPECT_TRUE(store_->ask({GrammarSpec::Kind::kEbnf, "bad"}, "me").get().status().code() ==
              StatusCode::kInvalidArgument);
  EXPECT_FALSE(status("bad").ok());
  EXPECT_EQ(log_->count("bad"), 3);
}

TEST_F(GrammarStoreTest, WhatTakesTooLongIsCancelledAndRemembered) {
  make({.timeout = 200ms, .max_compiling = 1});
  const GrammarTicket slow = ask("slow");
  EXPECT_EQ(slow.get().status().code(), StatusCode::kDeadline);
  EXPECT_NE(slow.get().status().message().find("within 0.2 s"), std::string::npos);
  EXPECT_TRUE(ask("a").get().ok());  // the timed-out compilation no longer occupies a slot
  EXPECT_EQ(log_->cancelled(), 1);
  log_->open_gate();
  const GrammarTicket again = ask("slow", "another client");
  ASSERT_TRUE(again.is_ready());
  EXPECT_EQ(again.get().status().code(), StatusCode::kDeadline);
  EXPECT_EQ(log_->count("slow"), 1);
}

// Four or more such grammars used to disable structured output for all clients.
TEST_F(GrammarStoreTest, ManyThatTakeTooLongDelayNobodyForLong) {
  make({.timeout = 200ms, .max_compiling = 2});
  std::vector<GrammarTicket> slow;
  for (int i = 0; i < 12; ++i)
    slow.push_back(ask("slow" + std::to_string(i), "attacker " + std::to_string(i % 3)));
  EXPECT_TRUE(ask("a").get().ok());
  for (const GrammarTicket& ticket : slow) EXPECT_EQ(ticket.get().status().code(), StatusCode::kDeadline);
  EXPECT_TRUE(ask("b").get().ok());
}

TEST_F(GrammarStoreTest, WhatNobodyWaitsForIsCancelled) {
  make({.max_compiling = 1});
  GrammarTicket running = ask("slow"), waiting = ask("a");
  log_->wait_for_running(1);
  waiting = {};
  running = {};
  EXPECT_TRUE(ask("b").get().ok());
  EXPECT_EQ(log_->cancelled(), 1);
  EXPECT_EQ(log_->count("a"), 0);
  log_->open_gate();
  EXPECT_TRUE(ask("slow").get().ok()) << "a cancelled grammar cannot be requested again";
}

TEST_F(GrammarStoreTest, EndsWhileSomethingCompiles) {
  make({.max_compiling = 1});
  const GrammarTicket running = ask("slow1"), waiting = ask("slow2");
  log_->wait_for_running(1);
  store_.reset();
  EXPECT_EQ(log_->cancelled(), 1);
  EXPECT_FALSE(running.get().ok());
  EXPECT_EQ(waiting.get().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(log_.use_count(), 1);
}

}  // namespace
}  // namespace fp4moe
