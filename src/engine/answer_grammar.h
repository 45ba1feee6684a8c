// AnswerGrammar: one answer's way through its grammar. MaskThreads fill the mask of its next token while the
// model computes the logits it is for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "engine/grammar.h"

namespace fp4moe {

// All methods from any thread; allowed() and accept() are called in turn.
class AnswerGrammar {
 public:
  AnswerGrammar(std::unique_ptr<GrammarMatcher> matcher, int64_t vocab_size);

  // Fills the mask of the next token, unless that is done, or the text has ended.
  void fill();
  // The mask, [ceil(V / 32)] as in GrammarMatcher, until accept(). Fills it, or waits for who is at it.
  Result<std::span<const uint32_t>> allowed();
  // As GrammarMatcher's.
  Status accept(int32_t id);
  bool has_ended() const;

 private:
  void fill_locked();

  mutable std::mutex mutex_;
  const std::unique_ptr<GrammarMatcher> matcher_;
  std::vector<uint32_t> allowed_;
  Status status_;  // of the mask
  bool is_filled_ = false;
};

class MaskThreads {
 public:
  // Fewer, with a warning, if the system refuses: masks without a thread are filled when they are asked for.
  explicit MaskThreads(int num_threads);
  ~MaskThreads();

  void fill_ahead(std::shared_ptr<AnswerGrammar> answer);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<AnswerGrammar>> waiting_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fp4moe
