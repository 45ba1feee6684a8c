// Model checks of the protocols in communicator.cc and rank_memory.cc: they explore every order of events in
// small cases (F19). A run on a machine exercises few of these orders, and x86 has fewer of them than the
// memory model allows.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace fp4moe {
namespace {

// ---- Puts and signals between ranks

struct Instruction {
  enum Kind : uint8_t { kPut, kSignal, kWait, kRead } kind;
  int peer;   // put, signal: destination; wait, read: source
  int at;     // put, read: place at the reader for this pair; signal, wait: slot
  int value;  // put, signal: new value; wait: at least this; read: exactly this
};
using Program = std::vector<Instruction>;

// Explores programs of puts and signals. A put becomes visible to the reader some time after it is issued,
// but before any signal issued after it. It can overtake signals issued before it, but no other put. Signals
// stay in order.
class Explorer {
 public:
  Explorer(std::vector<Program> programs, int num_places, int num_slots)
      : programs_(std::move(programs)),
        n_(static_cast<int>(programs_.size())),
        num_places_(num_places),
        num_slots_(num_slots) {}

  // Returns "" if every order completes all programs with correct reads, otherwise a description of the
  // error.
  std::string explore() {
    visit(State(*this));
    while (!todo_.empty()) {
      State state = todo_.front();
      todo_.pop_front();
      bool moved = false;
      for (int rank = 0; rank < n_; ++rank) {
        State next = state;
        const std::string wrong = run(next, rank, moved);
        if (!wrong.empty()) return wrong;
        if (next.counters != state.counters) visit(next);
      }
      for (size_t channel = 0; channel < state.channels.size(); ++channel) deliver(state, channel, moved);
      if (!moved && !is_done(state)) return "all ranks are blocked";
    }
    return "";
  }
  size_t num_states() const { return seen_.size(); }

 private:
  struct State {
    explicit State(const Explorer& e)
        : counters(static_cast<size_t>(e.n_), 0),
          places(static_cast<size_t>(e.n_ * e.n_ * e.num_places_), 0),
          cells(static_cast<size_t>(e.n_ * e.n_ * e.num_slots_), 0),
          channels(static_cast<size_t>(e.n_ * e.n_)) {}
    std::string key() const {
      std::string k = counters + places + cells;
      // The lengths of the channels make the key unambiguous.
      for (const auto& channel : channels) k += static_cast<char>(channel.size());
      return k + pending();
    }
    std::string pending() const {
      std::string k;
      for (const auto& channel : channels)
        for (const Instruction& i : channel)
          k += {static_cast<char>(i.kind), static_cast<char>(i.at), static_cast<char>(i.value)};
      return k;
    }
    std::string counters, places, cells;             // one byte each
    std::vector<std::vector<Instruction>> channels;  // [from][to], issued and not yet visible
  };

  size_t place(int reader, int from, int at) const {
    return static_cast<size_t>((reader * n_ + from) * num_places_ + at);
  }
  size_t cell(int reader, int from, int slot) const {
    return static_cast<size_t>((reader * n_ + from) * num_slots_ + slot);
  }
  void visit(const State& state) {
    if (seen_.insert(state.key()).second) todo_.push_back(state);
  }
  bool is_done(const State& state) const {
    for (int rank = 0; rank < n_; ++rank)
      if (static_cast<size_t>(state.counters[static_cast<size_t>(rank)]) !=
          programs_[static_cast<size_t>(rank)].size())
        return false;
    return true;
  }

  std::string run(State& state, int rank, bool& moved) const {
    const size_t r = static_cast<size_t>(rank), pc = static_cast<size_t>(state.counters[r]);
    if (pc == programs_[r].size()) return "";
    const Instruction& i = programs_[r][pc];
    if (i.kind == Instruction::kWait && state.cells[cell(rank, i.peer, i.at)] < i.value) return "";
    if (i.kind == Instruction::kRead && state.places[place(rank, i.peer, i.at)] != i.value)
      return "rank " + std::to_string(rank) + " reads " +
             std::to_string(state.places[place(rank, i.peer, i.at)]) + ", not " + std::to_string(i.value);
    if (i.kind == Instruction::kPut || i.kind == Instruction::kSignal)
      state.channels[static_cast<size_t>(rank * n_ + i.peer)].push_back(i);
    ++state.counters[r];
    moved = true;
    return "";
  }

  // A channel's first put can become visible now, and its first signal if no put precedes it.
  void deliver(const State& state, size_t channel, bool& moved) {
    const auto& waiting = state.channels[channel];
    const int from = static_cast<int>(channel) / n_, to = static_cast<int>(channel) % n_;
    for (size_t k = 0; k < waiting.size(); ++k) {
      const bool is_put = waiting[k].kind == Instruction::kPut;
      if (!is_put && k > 0) continue;
      State next = state;
      auto& left = next.channels[channel];
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(k));
      char& target =
          is_put ? next.places[place(to, from, waiting[k].at)] : next.cells[cell(to, from, waiting[k].at)];
      target = static_cast<char>(waiting[k].value);
      moved = true;
      visit(next);
      if (is_put) break;
    }
  }

  const std::vector<Program> programs_;
  const int n_, num_places_, num_slots_;
  std::unordered_set<std::string> seen_;
  std::deque<State> todo_;
};

// Returns programs with steps as in communicator_step.cc, with `num_places` places per source.
std::vector<Program> lockstep(int num_ranks, int steps, int num_places) {
  std::vector<Program> programs(static_cast<size_t>(num_ranks));
  for (int me = 0; me < num_ranks; ++me)
    for (int step = 1; step <= steps; ++step) {
      Program& p = programs[static_cast<size_t>(me)];
      for (int i = 1; i < num_ranks; ++i) {
        p.push_back({Instruction::kPut, (me + i) % num_ranks, step % num_places, step});
        p.push_back({Instruction::kSignal, (me + i) % num_ranks, 0, step});
      }
      for (int i = 1; i < num_ranks; ++i) {
        const int from = (me + num_ranks - i) % num_ranks;
        p.push_back({Instruction::kWait, from, 0, step});
        p.push_back({Instruction::kRead, from, step % num_places, step});
      }
    }
  return programs;
}

TEST(ProtocolModel, TwoPlacesAreEnoughForLockstep) {
  for (const auto& [ranks, steps] : {std::pair{2, 6}, {3, 3}}) {
    Explorer explorer(lockstep(ranks, steps, 2), 2, 1);
    EXPECT_EQ(explorer.explore(), "") << ranks << " ranks";
    EXPECT_GT(explorer.num_states(), 100u);
  }
}

TEST(ProtocolModel, OnePlaceIsNotEnough) {
  EXPECT_NE(Explorer(lockstep(2, 3, 1), 1, 1).explore().find("reads"), std::string::npos);
}

// Returns programs with rounds over one dispatch region (place 0) and one combine region (place 1). combine =
// false omits the return path, which frees the dispatch region.
std::vector<Program> rounds(int num_ranks, int num_rounds, bool combine) {
  std::vector<Program> programs(static_cast<size_t>(num_ranks));
  for (int me = 0; me < num_ranks; ++me)
    for (int round = 0; round < num_rounds; ++round)
      for (int way = 0; way < (combine ? 2 : 1); ++way) {
        Program& p = programs[static_cast<size_t>(me)];
        const int value = (combine ? 2 : 1) * round + way + 1;
        for (int peer = 0; peer < num_ranks; ++peer) {
          if (peer == me) continue;
          p.push_back({Instruction::kPut, peer, way, value});
          p.push_back({Instruction::kSignal, peer, 0, value});
        }
        for (int peer = 0; peer < num_ranks; ++peer) {
          if (peer == me) continue;
          p.push_back({Instruction::kWait, peer, 0, value});
          p.push_back({Instruction::kRead, peer, way, value});
        }
      }
  return programs;
}

TEST(ProtocolModel, AlternatingRoundsReuseOneRegionEach) {
  EXPECT_EQ(Explorer(rounds(2, 4, true), 2, 1).explore(), "");
  EXPECT_EQ(Explorer(rounds(3, 2, true), 2, 1).explore(), "");
}

TEST(ProtocolModel, RoundsWithoutAWayBackOverwrite) {
  EXPECT_NE(Explorer(rounds(2, 3, false), 1, 1).explore().find("reads"), std::string::npos);
}

TEST(ProtocolModel, ALostSignalStandsStill) {
  std::vector<Program> programs = lockstep(2, 2, 2);
  std::erase_if(programs[1],
                [](const Instruction& i) { return i.kind == Instruction::kSignal && i.value == 2; });
  EXPECT_EQ(Explorer(programs, 2, 1).explore(), "all ranks are blocked");
}

// ---- A waiter's sleep: rank_memory.cc, one event per line there

enum class Order { kAsBuilt, kBellReadLast, kNoSecondLook };

struct Sleep {
  int waiter = 0, raiser = 0;  // next event of each
  int awaited = 0, cell = 0, bell = 0, bell_read = 0;
  bool asleep = false, ring = false;
  std::string key() const {
    return {static_cast<char>(waiter), static_cast<char>(raiser), static_cast<char>(awaited),
            static_cast<char>(cell),   static_cast<char>(bell),   static_cast<char>(bell_read),
            static_cast<char>(asleep), static_cast<char>(ring)};
  }
};
constexpr int kWaiterDone = 10, kRaiserDone = 10;

// Publish, read the bell, check the cell, sleep on the bell's value; when awake, start again from the bell.
bool step_waiter(Sleep& s, Order order) {
  if (s.asleep || s.waiter == kWaiterDone) return false;
  const int event =
      order == Order::kBellReadLast && (s.waiter == 1 || s.waiter == 2) ? 3 - s.waiter : s.waiter;
  if (event == 0) s.awaited = 1;
  if (event == 1) s.bell_read = s.bell;
  if (event == 2 && order != Order::kNoSecondLook && s.cell == 1) {
    s.waiter = kWaiterDone;
    return true;
  }
  if (s.waiter == 3) {
    s.asleep = s.bell == s.bell_read;  // the kernel compares and sleeps in one atomic step
    s.waiter = 1;
    if (order == Order::kNoSecondLook && s.cell == 1 && !s.asleep) s.waiter = kWaiterDone;
    return true;
  }
  ++s.waiter;
  return true;
}

// Store the cell, check for a waiter, change the bell, wake.
bool step_raiser(Sleep& s) {
  if (s.raiser == kRaiserDone) return false;
  if (s.raiser == 0) s.cell = 1;
  if (s.raiser == 1) s.ring = s.awaited == 1;
  if (s.raiser == 2 && s.ring) ++s.bell;
  if (s.raiser == 3 && s.ring) s.asleep = false;
  s.raiser = s.raiser == 3 ? kRaiserDone : s.raiser + 1;
  return true;
}

// Returns whether some order leaves the waiter asleep forever.
bool can_miss(Order order) {
  std::unordered_set<std::string> seen;
  bool missed = false;
  const std::function<void(const Sleep&)> visit = [&](const Sleep& state) {
    if (!seen.insert(state.key()).second) return;
    Sleep waiter = state, raiser = state;
    const bool waiter_moves = step_waiter(waiter, order), raiser_moves = step_raiser(raiser);
    if (waiter_moves) visit(waiter);
    if (raiser_moves) visit(raiser);
    if (!waiter_moves && !raiser_moves && state.waiter != kWaiterDone) missed = true;
  };
  visit({});
  return missed;
}

TEST(ProtocolModel, NoOrderLosesAWakeUp) { EXPECT_FALSE(can_miss(Order::kAsBuilt)); }

TEST(ProtocolModel, TheOrderOfTheWaiterMatters) {
  EXPECT_TRUE(can_miss(Order::kBellReadLast));
  EXPECT_TRUE(can_miss(Order::kNoSecondLook));
}

}  // namespace
}  // namespace fp4moe
