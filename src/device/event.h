// Event: a point in a stream's order, for timing and for other streams to wait for.
#pragma once

#include "device/stream.h"
#include "fp4moe/status.h"

struct CUevent_st;

namespace fp4moe {

class Event {
 public:
  // Makes an event on the current GPU. kUnsupported in a thread without one, or in a build without CUDA.
  static Result<Event> make();
  Event() = default;
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  ~Event();

  // Records the event after all work enqueued on `stream` so far. The stream keeps any error.
  void record(Stream& stream);
  // Makes work enqueued on `stream` from now on wait for the last record(). The stream keeps any error.
  void hold(Stream& stream) const;
  // Blocks the calling thread until the event has completed.
  Status synchronize() const;
  // Returns the microseconds from `start` to this event. Both must have been recorded outside graphs and have
  // completed.
  Result<double> microseconds_since(const Event& start) const;

 private:
  ::CUevent_st* handle_ = nullptr;  // cudaEvent_t
};

}  // namespace fp4moe
