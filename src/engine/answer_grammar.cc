#include "engine/answer_grammar.h"

#include <string>
#include <system_error>
#include <utility>

#include "base/log.h"

namespace fp4moe {

AnswerGrammar::AnswerGrammar(std::unique_ptr<GrammarMatcher> matcher, int64_t vocab_size)
    : matcher_(std::move(matcher)), allowed_(static_cast<size_t>((vocab_size + 31) / 32)) {}

void AnswerGrammar::fill_locked() {
  if (is_filled_ || matcher_->has_ended()) return;
  status_ = matcher_->fill_allowed(allowed_);
  is_filled_ = true;
}

void AnswerGrammar::fill() {
  std::lock_guard lock(mutex_);
  fill_locked();
}

Result<std::span<const uint32_t>> AnswerGrammar::allowed() {
  std::lock_guard lock(mutex_);
  fill_locked();
  if (!status_.ok()) return status_;
  return std::span<const uint32_t>(allowed_);
}

Status AnswerGrammar::accept(int32_t id) {
  std::lock_guard lock(mutex_);
  is_filled_ = false;
  return matcher_->accept(id);
}

bool AnswerGrammar::has_ended() const {
  std::lock_guard lock(mutex_);
  return matcher_->has_ended();
}

MaskThreads::MaskThreads(int num_threads) {
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error& error) {
    log_warning("only " + std::to_string(threads_.size()) + " of " + std::to_string(num_threads) +
                " threads for the masks of grammars: " + error.what());
  }
}

MaskThreads::~MaskThreads() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MaskThreads::fill_ahead(std::shared_ptr<AnswerGrammar> answer) {
  if (threads_.empty()) return;
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(answer));
  }
  changed_.notify_one();
}

void MaskThreads::run() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<AnswerGrammar> answer = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    if (answer.use_count() > 1) answer->fill();  // or its request has ended
  }
}

}  // namespace fp4moe
