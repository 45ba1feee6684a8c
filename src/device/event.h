// Event: a point in a stream's order, for timing and for other streams to wait for.
#pragma once

#include "device/stream.h"
#include "fp4moe/status.h"

struct CUevent_st;

namespace fp4moe {

class Event {
 public:
  // On the current GPU. kUnsupported in a thread without one, or in a build without CUDA.
  static Result<Event> make();
  Event() = default;
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  ~Event();

  // Records the event behind all work enqueued on `stream` so far. Errors are kept by the stream.
  void record(Stream& stream);
  // Work enqueued on `stream` from now on waits for the last record(). Errors are kept by the stream.
  void hold(Stream& stream) const;
  // Blocks the calling thread until the event has completed.
  Status synchronize() const;
  // Microseconds from `start` to this event; both must be completed, and recorded outside graphs.
  Result<double> microseconds_since(const Event& start) const;

 private:
  ::CUevent_st* handle_ = nullptr;  // cudaEvent_t
};

}  // namespace fp4moe
