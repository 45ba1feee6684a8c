#include "serve/stream_output.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace fp4moe {

Result<Delta> stream_output(Engine& engine, Request request,
                            const std::function<void(const std::string&)>& on_text,
                            const std::function<bool()>& is_stopped) {
  constexpr auto kPoll = std::chrono::milliseconds(50);
  std::mutex mutex;
  std::condition_variable ended;
  Delta last;  // the final delta; finish_reason is kNone until it arrives
  const auto id = engine.submit(std::move(request), [&](const Delta& delta) {
    on_text(delta.text);
    if (delta.finish_reason == FinishReason::kNone) return;
    std::lock_guard<std::mutex> lock(mutex);
    last = delta;
    ended.notify_all();
  });
  if (!id.ok()) return id.status();
  std::unique_lock<std::mutex> lock(mutex);
  bool is_cancelled = false;
  while (!ended.wait_for(lock, kPoll, [&] { return last.finish_reason != FinishReason::kNone; })) {
    if (is_cancelled || !is_stopped()) continue;
    is_cancelled = true;
    lock.unlock();
    engine.cancel(*id);
    lock.lock();
  }
  if (last.finish_reason == FinishReason::kError) return internal_error(last.error);
  return last;
}

}  // namespace fp4moe
