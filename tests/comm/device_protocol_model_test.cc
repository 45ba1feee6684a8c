// Model check of the marked words through which GPUs exchange their sums (kernels/cuda/comm/group.cuh):
// explores every order of stores and reads in small cases. protocol_model_test covers the flags of group.cuh,
// which work like its signals.
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <unordered_set>

namespace fp4moe {
namespace {

struct Protocol {
  int num_ranks = 2, num_operations = 4;
  int num_buffers = 2;  // used in turn
  // The stores of a kernel are visible before the rank's next kernel starts.
  bool kernels_flush = true;
  // The reader marks a word as unsent again after it has read it; otherwise the word keeps its old value.
  bool marks_again = true;
};

// In operation n, each rank stores the word n at every peer, then takes the word of every peer.
class MarkedWords {
 public:
  explicit MarkedWords(const Protocol& protocol) : p_(protocol), ranks_(protocol.num_ranks) {}

  // Returns "" if every order completes all operations with correct reads, otherwise a description of the
  // error.
  std::string explore() {
    State first;
    first.steps.assign(static_cast<size_t>(ranks_), 0);
    first.words.assign(static_cast<size_t>(ranks_ * ranks_ * p_.num_buffers), kUnsentWord);
    visit(first);
    while (!todo_.empty()) {
      const State state = todo_.front();
      todo_.pop_front();
      bool moved = false;
      for (int rank = 0; rank < ranks_; ++rank)
        if (const std::string wrong = run(state, rank, moved); !wrong.empty()) return wrong;
      for (size_t i = 0; i < state.stores.size(); i += kStoreBytes) {
        moved = true;
        State next = state;
        next.words[static_cast<size_t>(state.stores[i + 1])] = state.stores[i + 2];
        next.stores.erase(i, kStoreBytes);
        visit(next);
      }
      if (!moved && !is_done(state)) return "all ranks are blocked";
    }
    return "";
  }
  size_t num_states() const { return seen_.size(); }

 private:
  static constexpr char kUnsentWord = 0;
  static constexpr size_t kStoreBytes = 3;  // rank, word, value

  // A rank's operation has 2 (R - 1) + 1 steps: its stores, its reads, its end.
  struct State {
    std::string steps;   // one byte per rank
    std::string words;   // [reader][source][buffer]
    std::string stores;  // issued and not yet visible
  };

  int steps_per_operation() const { return 2 * (ranks_ - 1) + 1; }
  char word(int reader, int source, int operation) const {
    return static_cast<char>((reader * ranks_ + source) * p_.num_buffers + operation % p_.num_buffers);
  }
  void visit(const State& state) {
    if (seen_.insert(state.steps + state.words + state.stores).second) todo_.push_back(state);
  }
  bool is_done(const State& state) const {
    for (const char step : state.steps)
      if (step != p_.num_operations * steps_per_operation()) return false;
    return true;
  }
  static bool has_stores(const State& state, int rank) {
    for (size_t i = 0; i < state.stores.size(); i += kStoreBytes)
      if (state.stores[i] == rank) return true;
    return false;
  }

  // Runs a rank's next step unless it must wait.
  std::string run(const State& state, int rank, bool& moved) {
    const int at = state.steps[static_cast<size_t>(rank)], operation = at / steps_per_operation();
    const int step = at % steps_per_operation(), others = ranks_ - 1;
    if (operation == p_.num_operations) return "";
    State next = state;
    ++next.steps[static_cast<size_t>(rank)];
    const auto store = [&](char to, int value) {
      next.stores += {static_cast<char>(rank), to, static_cast<char>(value)};
    };
    if (step < others) {
      store(word((rank + 1 + step) % ranks_, rank, operation), operation + 1);
    } else if (step < 2 * others) {
      const char from = word(rank, (rank + 1 + step - others) % ranks_, operation);
      const char seen = state.words[static_cast<size_t>(from)];
      if (seen == kUnsentWord) return "";
      if (seen != operation + 1)
        return "rank " + std::to_string(rank) + " takes the word of operation " + std::to_string(seen - 1) +
               " in operation " + std::to_string(operation);
      if (p_.marks_again) store(from, kUnsentWord);
    } else if (p_.kernels_flush && has_stores(state, rank)) {
      return "";
    }
    moved = true;
    visit(next);
    return "";
  }

  const Protocol p_;
  const int ranks_;
  std::unordered_set<std::string> seen_;
  std::deque<State> todo_;
};

TEST(MarkedWords, TwoBuffersAreEnough) {
  for (const Protocol& protocol :
       {Protocol{.num_ranks = 2, .num_operations = 6}, Protocol{.num_ranks = 3, .num_operations = 4},
        Protocol{.num_ranks = 3, .num_operations = 4, .num_buffers = 3}}) {
    MarkedWords model(protocol);
    EXPECT_EQ(model.explore(), "") << protocol.num_ranks << " ranks";
    EXPECT_GT(model.num_states(), 100u);
  }
}

TEST(MarkedWords, OneBufferIsNotEnough) {
  EXPECT_NE(MarkedWords({.num_buffers = 1}).explore(), "");
  EXPECT_NE(MarkedWords({.num_ranks = 3, .num_operations = 3, .num_buffers = 1}).explore(), "");
}

TEST(MarkedWords, AnOldWordIsTakenIfItIsNotMarkedAgain) {
  const std::string wrong = MarkedWords({.marks_again = false}).explore();
  EXPECT_NE(wrong.find("takes the word of operation 0 in operation 2"), std::string::npos) << wrong;
}

// Without the flush, a mark can become visible after the peer's next word and overwrite it, or the next
// kernel can read the old word.
TEST(MarkedWords, KernelsMustFlushTheirMarks) {
  EXPECT_NE(MarkedWords({.kernels_flush = false}).explore(), "");
}

}  // namespace
}  // namespace fp4moe
