// Shows the progress of loading weights on stderr: a bar on a terminal, otherwise a line every few seconds.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "fp4moe/sinks.h"

namespace fp4moe {

class LoadProgress {
 public:
  // The sink may be called from another thread while the engine loads. It may outlive this object, because
  // the engine also calls it when weights are updated.
  ProgressSink sink() {
    return [bytes = bytes_](int64_t done, int64_t total) {
      bytes->total.store(total);
      bytes->done.store(done);
    };
  }

  void draw() {
    const auto now = Clock::now();
    if (bytes_->total.load() <= 0 ||
        now - last_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(5)))
      return;
    last_ = now;
    std::fputs((terminal_ ? "\r" + line() + "\x1b[K" : line() + "\n").c_str(), stderr);
  }

  void finish() {
    if (terminal_ && bytes_->total.load() > 0) std::fputs("\r\x1b[K", stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Bytes {
    std::atomic<int64_t> done{0}, total{0};
  };

  // "loading  42% [########            ]  5.1 / 12.2 GB, 1.31 GB/s, 5 s left"
  std::string line() const {
    const auto done = static_cast<double>(bytes_->done.load());
    const auto total = static_cast<double>(bytes_->total.load());
    const double rate = done / std::chrono::duration<double>(Clock::now() - start_).count();
    const double part = done / total;
    const auto filled = static_cast<size_t>(20 * part);
    return fmt::format("loading {:3.0f}% [{}{}] {:.1f} / {:.1f} GB, {:.2f} GB/s, {:.0f} s left", 100 * part,
                       std::string(filled, '#'), std::string(20 - filled, ' '), done / 1e9, total / 1e9,
                       rate / 1e9, rate > 0 ? (total - done) / rate : 0);
  }

  const bool terminal_ = isatty(STDERR_FILENO) == 1;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  const std::shared_ptr<Bytes> bytes_ = std::make_shared<Bytes>();
};

}  // namespace fp4moe
