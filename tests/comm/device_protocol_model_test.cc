// Model check of the marked words through which GPUs exchange data (kernels/cuda/comm/group.cuh): explores
// every order of stores and reads in small cases. protocol_model_test covers the flags of group.cuh, which
// work like its signals.
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <unordered_set>
#include <vector>

namespace fp4moe {
namespace {

constexpr char kUnsentWord = 0;

// A step of a block. Stores become visible later, in any order.
struct Step {
  enum Kind : char {
    kStore,    // of `value` in `word`
    kTake,     // waits until `word` is not unsent; it must then be `value`
    kFlush,    // waits until the block's stores are visible
    kBarrier,  // waits until all blocks of the rank are here
  };
  Kind kind;
  int word = 0, value = 0;
};
// The blocks of a rank have equally many steps, with barriers at the same places.
struct Block {
  int rank = 0;
  std::vector<Step> steps;
};

class Model {
 public:
  explicit Model(std::vector<Block> blocks, int num_words)
      : blocks_(std::move(blocks)), num_words_(num_words) {}

  // Returns "" if every order completes all steps with correct reads, otherwise a description of the error.
  std::string explore() {
    visit({std::string(blocks_.size(), 0), std::string(static_cast<size_t>(num_words_), kUnsentWord), ""});
    while (!todo_.empty()) {
      const State state = std::move(todo_.front());
      todo_.pop_front();
      bool moved = false;
      for (size_t block = 0; block < blocks_.size(); ++block)
        if (const std::string wrong = run(state, block, moved); !wrong.empty()) return wrong;
      for (size_t i = 0; i < state.stores.size(); i += kStoreBytes) {
        moved = true;
        State next = state;
        next.words[static_cast<size_t>(state.stores[i + 1])] = state.stores[i + 2];
        next.stores.erase(i, kStoreBytes);
        visit(std::move(next));
      }
      if (!moved && !is_done(state)) return "all ranks are blocked";
    }
    return "";
  }
  size_t num_states() const { return seen_.size(); }

 private:
  static constexpr size_t kStoreBytes = 3;  // block, word, value
  struct State {
    std::string at;      // each block's next step
    std::string words;   // as they are visible
    std::string stores;  // issued and not yet visible
  };

  void visit(State state) {
    if (seen_.insert(state.at + state.words + state.stores).second) todo_.push_back(std::move(state));
  }
  bool is_done(const State& state) const {
    for (size_t block = 0; block < blocks_.size(); ++block)
      if (static_cast<size_t>(state.at[block]) != blocks_[block].steps.size()) return false;
    return true;
  }
  static bool has_stores(const State& state, size_t block) {
    for (size_t i = 0; i < state.stores.size(); i += kStoreBytes)
      if (static_cast<size_t>(state.stores[i]) == block) return true;
    return false;
  }
  bool all_have_come(const State& state, size_t block) const {
    for (size_t other = 0; other < blocks_.size(); ++other)
      if (blocks_[other].rank == blocks_[block].rank && state.at[other] < state.at[block]) return false;
    return true;
  }

  // Runs a block's next step unless it must wait.
  std::string run(const State& state, size_t block, bool& moved) {
    const auto at = static_cast<size_t>(state.at[block]);
    if (at == blocks_[block].steps.size()) return "";
    const Step& step = blocks_[block].steps[at];
    const char seen = state.words[static_cast<size_t>(step.word)];
    switch (step.kind) {
      case Step::kStore:
        break;
      case Step::kTake:
        if (seen == kUnsentWord) return "";
        if (seen != step.value)
          return "rank " + std::to_string(blocks_[block].rank) + " takes the word of operation " +
                 std::to_string(seen - 1) + " in operation " + std::to_string(step.value - 1);
        break;
      case Step::kFlush:
        if (has_stores(state, block)) return "";
        break;
      case Step::kBarrier:
        if (!all_have_come(state, block)) return "";
        break;
    }
    State next = state;
    ++next.at[block];
    if (step.kind == Step::kStore)
      next.stores += {static_cast<char>(block), static_cast<char>(step.word), static_cast<char>(step.value)};
    moved = true;
    visit(std::move(next));
    return "";
  }

  const std::vector<Block> blocks_;
  const int num_words_;
  std::unordered_set<std::string> seen_;
  std::deque<State> todo_;
};

// ---- sums ------------------------------------------------------------------------------------------

// In operation n, each rank stores the word n + 1 at every peer, then takes the word of every peer.
struct Sums {
  int num_ranks = 2, num_operations = 4;
  int num_buffers = 2;  // used in turn
  // The stores of a kernel are visible before the rank's next kernel starts.
  bool kernels_flush = true;
  // The reader marks a word as unsent again after it has read it; otherwise the word keeps its old value.
  bool marks_again = true;
  // The kernel before the operation sends (kernels/cuda/comm/partial_sender.cuh).
  bool kernel_before_sends = false;

  int word(int reader, int source, int operation) const {
    return (reader * num_ranks + source) * num_buffers + operation % num_buffers;
  }
  Model model() const {
    std::vector<Block> blocks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      Block& block = blocks.emplace_back(Block{rank, {}});
      for (int n = 0; n < num_operations; ++n) {
        for (int i = 1; i < num_ranks; ++i)
          block.steps.push_back({Step::kStore, word((rank + i) % num_ranks, rank, n), n + 1});
        if (kernel_before_sends) block.steps.push_back({Step::kFlush});
        for (int i = 1; i < num_ranks; ++i) {
          const int from = word(rank, (rank + i) % num_ranks, n);
          block.steps.push_back({Step::kTake, from, n + 1});
          if (marks_again) block.steps.push_back({Step::kStore, from, kUnsentWord});
        }
        if (kernels_flush) block.steps.push_back({Step::kFlush});
      }
    }
    return Model(std::move(blocks), num_ranks * num_ranks * num_buffers);
  }
};

TEST(MarkedWords, TwoBuffersAreEnough) {
  for (const Sums& sums :
       {Sums{.num_ranks = 2, .num_operations = 6}, Sums{.num_ranks = 3, .num_operations = 4},
        Sums{.num_ranks = 3, .num_operations = 4, .num_buffers = 3},
        Sums{.num_ranks = 2, .num_operations = 6, .kernel_before_sends = true},
        Sums{.num_ranks = 3, .num_operations = 4, .kernel_before_sends = true}}) {
    Model model = sums.model();
    EXPECT_EQ(model.explore(), "") << sums.num_ranks << " ranks";
    EXPECT_GT(model.num_states(), 100u);
  }
}

TEST(MarkedWords, OneBufferIsNotEnough) {
  EXPECT_NE((Sums{.num_buffers = 1}).model().explore(), "");
  EXPECT_NE((Sums{.num_ranks = 3, .num_operations = 3, .num_buffers = 1}).model().explore(), "");
}

TEST(MarkedWords, AnOldWordIsTakenIfItIsNotMarkedAgain) {
  const std::string wrong = (Sums{.marks_again = false}).model().explore();
  EXPECT_NE(wrong.find("takes the word of operation 0 in operation 2"), std::string::npos) << wrong;
}

// Without the flush, a mark can become visible after the peer's next word and overwrite it, or the next
// kernel can read the old word.
TEST(MarkedWords, KernelsMustFlushTheirMarks) {
  EXPECT_NE((Sums{.kernels_flush = false}).model().explore(), "");
}

// ---- sums of shared rows ---------------------------------------------------------------------------

// Each rank has one row of its own (kernels/cuda/comm/reduce_norm_gather.cu): it takes the partial sum of
// every peer, stores the row on all ranks, whose copies have one buffer, and raises a flag, here a marked
// word. The rank's next kernel reads all rows.
struct NormShares {
  int num_ranks = 2, num_operations = 3;
  bool takes_partials_first = true;  // before it stores its row

  int row(int reader, int owner) const { return reader * num_ranks + owner; }
  int word(int reader, int source, int operation, bool is_flag) const {
    return num_ranks * num_ranks * (1 + 2 * is_flag + operation % 2) + row(reader, source);
  }
  std::vector<Step> steps(int rank) const {
    std::vector<Step> steps;
    const auto exchange = [&](int n, bool is_flag, bool takes) {
      for (int i = 1; i < num_ranks; ++i) {
        const int peer = (rank + i) % num_ranks, from = word(rank, peer, n, is_flag);
        if (!takes)
          steps.push_back({Step::kStore, word(peer, rank, n, is_flag), n + 1});
        else
          steps.insert(steps.end(), {{Step::kTake, from, n + 1}, {Step::kStore, from, kUnsentWord}});
      }
    };
    for (int n = 0; n < num_operations; ++n) {
      exchange(n, false, false);
      if (takes_partials_first) exchange(n, false, true);
      for (int r = 0; r < num_ranks; ++r) steps.push_back({Step::kStore, row(r, rank), n + 1});
      if (!takes_partials_first) exchange(n, false, true);
      steps.push_back({Step::kFlush});
      exchange(n, true, false);
      exchange(n, true, true);
      steps.push_back({Step::kFlush});
      for (int r = 0; r < num_ranks; ++r) steps.push_back({Step::kTake, row(rank, r), n + 1});
    }
    return steps;
  }
  Model model() const {
    std::vector<Block> blocks;
    for (int rank = 0; rank < num_ranks; ++rank) blocks.push_back({rank, steps(rank)});
    return Model(std::move(blocks), num_ranks * num_ranks * 5);
  }
};

TEST(NormShares, AllOrdersAreRight) {
  Model model = NormShares{}.model();
  EXPECT_EQ(model.explore(), "");
  EXPECT_GT(model.num_states(), 1000u);
}

// A peer can still read the row of the operation before.
TEST(NormShares, PartialsMustBeTakenBeforeRowsAreStored) {
  EXPECT_NE((NormShares{.takes_partials_first = false}).model().explore(), "");
}

// ---- direct rounds ---------------------------------------------------------------------------------

// Two ranks with two blocks each (kernels/cuda/comm/a2a_direct.cuh). A block sends one word of a row; both
// blocks of the experts' kernel take both words, and each returns and adds one word of the sums.
struct DirectRounds {
  int num_rounds = 3;
  int num_buffers = 2;      // of rows
  bool has_barrier = true;  // between the marks of a rank's blocks and its sums

  static constexpr int kBlocks = 2;
  int row(int rank, int block, int round) const {
    return (rank * kBlocks + block) * num_buffers + round % num_buffers;
  }
  int sum(int rank, int block) const { return 2 * kBlocks * num_buffers + rank * kBlocks + block; }
  std::vector<Step> steps(int rank, int block) const {
    const int peer = 1 - rank;
    std::vector<Step> steps;
    for (int n = 0; n < num_rounds; ++n) {
      steps.push_back({Step::kStore, row(peer, block, n), n + 1});
      for (int i = 0; i < kBlocks; ++i) steps.push_back({Step::kTake, row(rank, i, n), n + 1});
      steps.push_back({Step::kStore, row(rank, block, n + 1), kUnsentWord});
      if (has_barrier) steps.insert(steps.end(), {{Step::kFlush}, {Step::kBarrier}});
      steps.push_back({Step::kStore, sum(peer, block), n + 1});
      steps.push_back({Step::kTake, sum(rank, block), n + 1});
      steps.push_back({Step::kStore, sum(rank, block), kUnsentWord});
      steps.insert(steps.end(), {{Step::kFlush}, {Step::kBarrier}});  // the end of the kernel
    }
    return steps;
  }
  Model model() const {
    std::vector<Block> blocks;
    for (const int rank : {0, 1})
      for (int block = 0; block < kBlocks; ++block) blocks.push_back({rank, steps(rank, block)});
    return Model(std::move(blocks), 2 * kBlocks * (num_buffers + 1));
  }
};

TEST(DirectRounds, AllOrdersAreRight) {
  Model model = DirectRounds{}.model();
  EXPECT_EQ(model.explore(), "");
  EXPECT_GT(model.num_states(), 1000u);
}

// With one buffer, a block marks words that another block has yet to take.
TEST(DirectRounds, OneBufferIsNotEnough) {
  EXPECT_NE((DirectRounds{.num_buffers = 1}).model().explore(), "");
}

// Without it, the peer can send the row after the next before the buffer's last row has been marked.
TEST(DirectRounds, MarksMustPrecedeSums) {
  EXPECT_NE((DirectRounds{.has_barrier = false}).model().explore(), "");
}

}  // namespace
}  // namespace fp4moe
