// KvTraffic: counts the KV pages and states that a node has sent or received.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "fp4moe/engine.h"

namespace fp4moe {

struct KvTrafficTotals {
  int64_t num_bytes = 0;
  // Over all prompts. Prefill node: from the request for a prompt's parts to the last of them, without the
  // time when no further part was complete. Decode node: from that request, or the first token if it came
  // later.
  double transfer_seconds = 0;
  double copy_seconds = 0;  // for the parts' copies between frames and the executor's memory
};

inline void put_traffic(const KvTrafficTotals& totals, EngineStats& stats) {
  stats.kv_transfer_bytes_total = totals.num_bytes;
  stats.kv_transfer_seconds_total = totals.transfer_seconds;
  stats.kv_transfer_copy_seconds_total = totals.copy_seconds;
}

// Thread-safe.
class KvTraffic {
 public:
  using Clock = std::chrono::steady_clock;

  // Parts of a transfer. `copy`: the duration of their copy between frames and the executor's memory.
  void count_parts(int64_t num_bytes, Clock::duration copy) {
    num_bytes_ += num_bytes;
    copy_ns_ += nanoseconds(copy);
  }
  // A transfer has ended: all its parts have been sent or have arrived.
  void count_transfer(Clock::duration whole) { transfer_ns_ += nanoseconds(whole); }

  KvTrafficTotals totals() const {
    return {num_bytes_, static_cast<double>(transfer_ns_) * 1e-9, static_cast<double>(copy_ns_) * 1e-9};
  }

 private:
  static int64_t nanoseconds(Clock::duration time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  }
  std::atomic<int64_t> num_bytes_{0}, transfer_ns_{0}, copy_ns_{0};
};

}  // namespace fp4moe
