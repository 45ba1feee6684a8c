// FaultyEndpoint: an Endpoint that misbehaves as configured, reproducibly for a seed. Wrap each rank's
// endpoint in one; a rank's faults apply to the puts, signals and waits of that rank.
#pragma once

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "comm/endpoint.h"

namespace fp4moe::test {

struct Faults {
  uint64_t seed = 1;
  int to = -1;  // faults apply only to this destination; -1: all
  // Every signal is delayed by `delay` plus up to `jitter`; before action number stall_at, the rank sleeps
  // for `stall`.
  std::chrono::microseconds delay{0}, jitter{0}, stall{0};
  int64_t stall_at = -1;
  // The number of the signal to drop, the signal to send twice and the put in which to flip a bit; -1: none.
  // Signals and puts are counted separately, from 0, only for destinations to which faults apply.
  int64_t drop_signal = -1, double_signal = -1, flip_put = -1;
  // From this action on (puts and signals counted together) the rank is dead: its actions are lost, and its
  // waits block until the job has failed.
  int64_t dead_from = -1;
  double yield_probability = 0;  // of a yield before and after each action
};

class FaultyEndpoint : public Endpoint {
 public:
  FaultyEndpoint(Endpoint& inner, const Faults& faults)
      : inner_(inner),
        faults_(faults),
        random_(faults.seed * 1000003 + static_cast<uint64_t>(inner.rank())) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  uint8_t* heap() const override { return inner_.heap(); }
  int64_t heap_bytes() const override { return inner_.heap_bytes(); }
  void fail(const Status& status) override { inner_.fail(status); }
  Status failure() const override { return inner_.failure(); }
  int waits_for(int rank) const override { return inner_.waits_for(rank); }

  Status put(int dst, int64_t offset, const void* src, int64_t num_bytes) override {
    if (!concerns(dst)) return inner_.put(dst, offset, src, num_bytes);
    if (before_action()) return {};
    if (puts_++ != faults_.flip_put || num_bytes == 0) return after(inner_.put(dst, offset, src, num_bytes));
    std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
    std::memcpy(bytes.data(), src, bytes.size());
    const uint64_t bit = random_() % (8 * bytes.size());
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ (1u << (bit % 8)));
    return after(inner_.put(dst, offset, bytes.data(), num_bytes));
  }

  Status signal(int dst, int slot, uint32_t value) override {
    if (!concerns(dst)) return inner_.signal(dst, slot, value);
    if (before_action()) return {};
    if (faults_.delay.count() + faults_.jitter.count() > 0)
      std::this_thread::sleep_for(
          faults_.delay +
          std::chrono::microseconds(random_() % static_cast<uint64_t>(faults_.jitter.count() + 1)));
    const int64_t number = signals_++;
    if (number == faults_.drop_signal) return {};
    if (number == faults_.double_signal) {
      const Status first = inner_.signal(dst, slot, value);
      if (!first.ok()) return first;
    }
    return after(inner_.signal(dst, slot, value));
  }

  Status wait(int src, int slot, uint32_t value, std::chrono::nanoseconds timeout, uint32_t* seen) override {
    maybe_yield();
    while (is_dead() && inner_.failure().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return after(inner_.wait(src, slot, value, timeout, seen));
  }

  int64_t num_puts() const { return puts_; }
  int64_t num_signals() const { return signals_; }

 private:
  bool concerns(int dst) const { return faults_.to < 0 || faults_.to == dst; }
  // Returns whether the rank is dead; its action is then lost.
  bool before_action() {
    maybe_yield();
    const int64_t action = actions_++;
    if (action == faults_.stall_at) std::this_thread::sleep_for(faults_.stall);
    return is_dead();
  }
  bool is_dead() const { return faults_.dead_from >= 0 && actions_ > faults_.dead_from; }
  Status after(Status status) {
    maybe_yield();
    return status;
  }
  void maybe_yield() {
    if (faults_.yield_probability > 0 &&
        std::uniform_real_distribution<double>()(random_) < faults_.yield_probability)
      std::this_thread::yield();
  }

  Endpoint& inner_;
  const Faults faults_;
  std::mt19937_64 random_;
  int64_t actions_ = 0, puts_ = 0, signals_ = 0;
};

}  // namespace fp4moe::test
