#include "engine/grammar_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

class FakeGrammar final : public Grammar {
 public:
  explicit FakeGrammar(int64_t num_bytes) : num_bytes_(num_bytes) {}
  std::unique_ptr<GrammarMatcher> make_matcher() const override { return nullptr; }
  int64_t num_bytes() const override { return num_bytes_; }

 private:
  int64_t num_bytes_;
};

// What compilations wait for, and how many there were of each text.
struct Compilations {
  std::mutex mutex;
  std::condition_variable changed;
  bool gate_is_open = false;
  int num_at_gate = 0;
  std::map<std::string, int> counts;

  void open_gate() {
    std::lock_guard lock(mutex);
    gate_is_open = true;
    changed.notify_all();
  }
  void wait_for_gate(int num) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_at_gate >= num; });
  }
  int count(const std::string& text) {
    std::lock_guard lock(mutex);
    return counts[text];
  }
};

// "bad" is wrong, "slow..." waits at the gate, "throw" has no memory; a grammar has 100 bytes, "huge" 10000.
class FakeCompiler final : public GrammarCompiler {
 public:
  explicit FakeCompiler(std::shared_ptr<Compilations> log) : log_(std::move(log)) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec) override {
    {
      std::unique_lock lock(log_->mutex);
      ++log_->counts[spec.text];
      if (spec.text.starts_with("slow")) {
        ++log_->num_at_gate;
        log_->changed.notify_all();
        log_->changed.wait(lock, [&] { return log_->gate_is_open; });
      }
    }
    if (spec.text == "bad") return invalid_argument("it is bad");
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
  GrammarTicket ask(const std::string& text) { return store_->ask({GrammarSpec::Kind::kRegex, text}); }
  Status status(const std::string& text) { return ask(text).get().status(); }

  std::shared_ptr<Compilations> log_ = std::make_shared<Compilations>();
  std::atomic<int> num_ready_ = 0;
  std::unique_ptr<GrammarStore> store_;
};

TEST_F(GrammarStoreTest, CompilesOnceAndRemembers) {
  make({});
  const GrammarTicket first = ask("a");
  ASSERT_TRUE(first.get().ok());
  const GrammarTicket second = ask("a");
  EXPECT_TRUE(is_ready(second));
  EXPECT_EQ(*first.get(), *second.get());
  EXPECT_EQ(log_->count("a"), 1);
  EXPECT_TRUE(store_->ask({GrammarSpec::Kind::kEbnf, "a"}).get().ok());  // another kind: another grammar
  EXPECT_EQ(log_->count("a"), 2);
  store_.reset();
  EXPECT_EQ(num_ready_, 2);
}

TEST_F(GrammarStoreTest, WhoAsksMeanwhileGetsTheSame) {
  make({});
  const GrammarTicket first = ask("slow"), second = ask("slow");
  log_->wait_for_gate(1);
  EXPECT_FALSE(is_ready(first));
  log_->open_gate();
  EXPECT_EQ(*first.get(), *second.get());
  EXPECT_EQ(log_->count("slow"), 1);
}

TEST_F(GrammarStoreTest, ASlowOneStopsNoOther) {
  make({.max_compiling = 2});
  const GrammarTicket slow = ask("slow");
  log_->wait_for_gate(1);
  EXPECT_TRUE(ask("a").get().ok());
  EXPECT_TRUE(ask("b").get().ok());
  EXPECT_FALSE(is_ready(slow));
  log_->open_gate();
  EXPECT_TRUE(slow.get().ok());
}

TEST_F(GrammarStoreTest, TheOnesUsedLastAreKept) {
  make({.max_cache_bytes = 310});  // two of 100 bytes and their keys
  for (const char* text : {"a", "b", "a", "c"}) ASSERT_TRUE(ask(text).get().ok());
  ASSERT_TRUE(ask("a").get().ok());
  EXPECT_EQ(log_->count("a"), 1);
  for (const char* text : {"d", "e", "f"}) ASSERT_TRUE(ask(text).get().ok());
  ASSERT_TRUE(ask("a").get().ok());
  EXPECT_EQ(log_->count("a"), 2);
}

TEST_F(GrammarStoreTest, ErrorsAreToldAndNotKept) {
  make({.max_text_bytes = 10, .max_grammar_bytes = 1000});
  EXPECT_EQ(status("bad").message(), "it is bad");
  EXPECT_EQ(status("bad").message(), "it is bad");
  EXPECT_EQ(log_->count("bad"), 2);
  EXPECT_EQ(status("huge").code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status("huge").message().find("10000 bytes; at most 1000"), std::string::npos);
  EXPECT_EQ(status("throw").code(), StatusCode::kUnavailable);
  EXPECT_NE(status("01234567890").message().find("11 bytes; at most 10"), std::string::npos);
}

TEST_F(GrammarStoreTest, WhatTakesTooLongIsGivenUpButKeptWhenItComes) {
  make({.timeout = 20ms, .max_compiling = 1});
  const GrammarTicket slow = ask("slow");
  EXPECT_EQ(slow.get().status().code(), StatusCode::kDeadline);
  EXPECT_NE(slow.get().status().message().find("0.020 s"), std::string::npos);
  EXPECT_TRUE(ask("a").get().ok());  // its place is free
  log_->open_gate();
  while (!ask("slow").get().ok()) std::this_thread::sleep_for(1ms);
}

TEST_F(GrammarStoreTest, TooManyOverdueOnesEndCompiling) {
  make({.timeout = 10ms, .max_compiling = 2, .max_overdue = 2});
  const GrammarTicket slow[] = {ask("slow1"), ask("slow2")};
  for (const GrammarTicket& ticket : slow) EXPECT_EQ(ticket.get().status().code(), StatusCode::kDeadline);
  EXPECT_EQ(status("a").code(), StatusCode::kUnavailable);
  log_->open_gate();
  while (!ask("a").get().ok()) std::this_thread::sleep_for(1ms);
}

TEST_F(GrammarStoreTest, EndsWhileSomethingCompiles) {
  make({.timeout = 10ms, .max_compiling = 1});
  const GrammarTicket slow = ask("slow1"), waiting = ask("slow2");
  log_->wait_for_gate(1);
  store_.reset();
  EXPECT_TRUE(log_ != nullptr);
  log_->open_gate();  // the overdue one ends by itself
  while (log_.use_count() > 1) std::this_thread::sleep_for(1ms);
}

}  // namespace
}  // namespace fp4moe
