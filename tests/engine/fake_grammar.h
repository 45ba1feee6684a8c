// Grammars without xgrammar: each allows one text, then the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "engine/fake_tokenizer.h"
#include "engine/grammar.h"

namespace fp4moe {

class OneTextMatcher final : public GrammarMatcher {
 public:
  explicit OneTextMatcher(std::string text) : text_(std::move(text)) {}
  Status fill_allowed(std::span<uint32_t> allowed) override {
    std::fill(allowed.begin(), allowed.end(), 0u);
    const auto id = static_cast<size_t>(next());
    allowed[id / 32] |= 1u << (id % 32);
    return {};
  }
  Status accept(int32_t id) override {
    if (has_ended() || id != next()) return internal_error("token " + std::to_string(id) + " is not allowed");
    ++num_taken_;
    return {};
  }
  bool has_ended() const override { return num_taken_ > text_.size(); }

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

 private:
  std::string text_;
};

// "slow" and "bad" wait until `open`, and "bad" is an error then.
class OneTextCompiler final : public GrammarCompiler {
 public:
  explicit OneTextCompiler(std::shared_ptr<std::atomic<bool>> open) : open_(std::move(open)) {}
  Result<std::shared_ptr<const Grammar>> compile(const GrammarSpec& spec) override {
    if (spec.text == "slow" || spec.text == "bad") open_->wait(false);
    if (spec.text == "bad") return invalid_argument("it is bad");
    return std::shared_ptr<const Grammar>(std::make_shared<OneTextGrammar>(spec.text));
  }

 private:
  std::shared_ptr<std::atomic<bool>> open_;
};

}  // namespace fp4moe
