// Fake grammars that do not need xgrammar. Most of them allow exactly one text and then the end token.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/fake_tokenizer.h"
#include "engine/grammar/grammar.h"

namespace fp4moe {

class OneTextMatcher final : public GrammarMatcher {
 public:
  explicit OneTextMatcher(std::string text) : text_(std::move(text)) {}
  Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget&) override {
    std::fill(allowed.begin(), allowed.end(), 0u);
    const auto id = static_cast<size_t>(next());
    allowed[id / 32] |= 1u << (id % 32);
    return {};
  }
  Status accept(int32_t id, const GrammarBudget&) override {
    if (has_ended() || id != next()) return internal_error("token " + std::to_string(id) + " is not allowed");
    ++num_taken_;
    return {};
  }
  void rollback(int64_t num_tokens) override { num_taken_ -= static_cast<size_t>(num_tokens); }
  bool has_ended() const override { return num_taken_ > text_.size(); }
  int64_t num_steps() const override { return static_cast<int64_t>(num_taken_); }

 private:
  int32_t next() const {
    return num_taken_ < text_.size() ? static_cast<unsigned char>(text_[num_taken_]) : kEosId;
  }
  std::string text_;
  size_t num_taken_ = 0;
};

class OneTextGrammar final : public Grammar {
 public:
  explicit OneTextGrammar(std::string text) : text_(std::move(text)) {}
  std::unique_ptr<GrammarMatcher> make_matcher() const override {
    return std::make_unique<OneTextMatcher>(text_);
  }
  int64_t num_bytes() const override { return static_cast<int64_t>(text_.size()); }
  int64_t num_steps() const override { return static_cast<int64_t>(text_.size()); }

 private:
  std::string text_;
};

// "slow" and "bad" wait until `open` is set or they are cancelled; "bad" then fails.
class OneTextCompiler final : public GrammarCompiler {
 public:
  explicit OneTextCompiler(std::shared_ptr<std::atomic<bool>> open) : open_(std::move(open)) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec,
                                                 const GrammarBudget& budget) override {
    while ((spec.text == "slow" || spec.text == "bad") && !open_->load()) {
      if (budget.is_cancelled->load()) return cancelled("as asked");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (spec.text == "bad") return invalid_argument("it is bad");
    return std::shared_ptr<const Grammar>(std::make_shared<OneTextGrammar>(spec.text));
  }

 private:
  std::shared_ptr<std::atomic<bool>> open_;
};

// Allows ids by a hash of the tokens accepted so far: half of the bytes, always "!", and sometimes the end.
class HashedMatcher final : public GrammarMatcher {
 public:
  Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget&) override {
    if (ended_) return internal_error("a mask after the end");
    std::fill(allowed.begin(), allowed.end(), 0u);
    for (size_t i = 0; i < 8; ++i)
      allowed[i] = static_cast<uint32_t>((hash_ + i) * 0x9e3779b97f4a7c15u >> 32);
    allowed['!' / 32] |= 1u << ('!' % 32);
    if (hash_ % 16 == 0) allowed[kEosId / 32] |= 1u << (kEosId % 32);
    return {};
  }
  Status accept(int32_t id, const GrammarBudget&) override {
    if (ended_) return internal_error("a token after the end");
    before_.push_back(hash_);
    hash_ = (hash_ ^ static_cast<uint64_t>(id)) * 1099511628211u;
    ended_ = id == kEosId;
    return {};
  }
  void rollback(int64_t num_tokens) override {
    if (num_tokens == 0) return;
    ended_ = false;
    hash_ = before_.at(before_.size() - static_cast<size_t>(num_tokens));
    before_.resize(before_.size() - static_cast<size_t>(num_tokens));
  }
  bool has_ended() const override { return ended_; }
  int64_t num_steps() const override { return std::ssize(before_); }

 private:
  uint64_t hash_ = 14695981039346656037u;
  std::vector<uint64_t> before_;  // hash_ before each accepted token
  bool ended_ = false;
};

// Cost of one matcher call. After `time`, the call runs on until *until is set, if given, or it is cancelled.
struct FakeCost {
  int64_t steps = 1;
  std::chrono::microseconds time{0};
  const std::atomic<bool>* until = nullptr;
};
inline const std::atomic<bool> kNever = false;
inline const FakeCost kEndless{.steps = 5'000'000, .until = &kNever};

// Returns the cost of the call that fills the mask (or accepts the token) after num_tokens tokens of `text`.
using FakeCosts = std::function<FakeCost(const std::string& text, int64_t num_tokens, bool is_mask)>;

class CostlyMatcher final : public GrammarMatcher {
 public:
  CostlyMatcher(std::string text, FakeCosts costs, std::unique_ptr<GrammarMatcher> inner)
      : text_(std::move(text)), costs_(std::move(costs)), inner_(std::move(inner)) {}
  Status fill_allowed(std::span<uint32_t> allowed, const GrammarBudget& budget) override {
    const Status status = spend(true, budget);
    return status.ok() ? inner_->fill_allowed(allowed, budget) : status;
  }
  Status accept(int32_t id, const GrammarBudget& budget) override {
    const Status status = spend(false, budget);
    ++num_tokens_;
    return status.ok() ? inner_->accept(id, budget) : status;
  }
  void rollback(int64_t num_tokens) override {
    num_tokens_ -= num_tokens;
    inner_->rollback(num_tokens);
  }
  bool has_ended() const override { return inner_->has_ended(); }
  int64_t num_steps() const override { return num_steps_; }

 private:
  Status spend(bool is_mask, const GrammarBudget& budget) {
    if (std::exchange(is_broken_, true)) return internal_error("a matcher is used after its error");
    const FakeCost cost = costs_(text_, num_tokens_, is_mask);
    num_steps_ += std::min(cost.steps, budget.max_steps);
    if (cost.steps > budget.max_steps)
      return invalid_argument(text_ + " takes " + std::to_string(cost.steps) + " steps; at most " +
                              std::to_string(budget.max_steps) + " are allowed");
    const auto end = std::chrono::steady_clock::now() + cost.time;
    while (std::chrono::steady_clock::now() < end || (cost.until != nullptr && !*cost.until)) {
      if (budget.is_cancelled != nullptr && budget.is_cancelled->load()) return cancelled("as asked");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    is_broken_ = false;
    return {};
  }

  const std::string text_;
  const FakeCosts costs_;
  const std::unique_ptr<GrammarMatcher> inner_;
  int64_t num_tokens_ = 0, num_steps_ = 0;
  bool is_broken_ = false;
};

class CostlyGrammar final : public Grammar {
 public:
  CostlyGrammar(std::string text, FakeCosts costs) : text_(std::move(text)), costs_(std::move(costs)) {}
  std::unique_ptr<GrammarMatcher> make_matcher() const override {
    std::unique_ptr<GrammarMatcher> inner = std::make_unique<HashedMatcher>();
    if (!text_.starts_with("hashed")) inner = std::make_unique<OneTextMatcher>(text_);
    return std::make_unique<CostlyMatcher>(text_, costs_, std::move(inner));
  }
  int64_t num_bytes() const override { return static_cast<int64_t>(text_.size()); }
  int64_t num_steps() const override { return 1; }

 private:
  const std::string text_;
  const FakeCosts costs_;
};

// A text that starts with "hashed" compiles to a HashedMatcher; any other text allows only itself.
class CostlyCompiler final : public GrammarCompiler {
 public:
  explicit CostlyCompiler(FakeCosts costs) : costs_(std::move(costs)) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec, const GrammarBudget&) override {
    return std::shared_ptr<const Grammar>(std::make_shared<CostlyGrammar>(spec.text, costs_));
  }

 private:
  const FakeCosts costs_;
};

}  // namespace fp4moe
