// Event: a moment in a stream's order, to measure time by and for other streams to wait for.
#pragma once

#include "device/stream.h"
#include "fp4moe/status.h"

struct CUevent_st;

namespace fp4moe {

class Event {
 public:
  // kUnsupported without a device, or in a build without CUDA.
  static Result<Event> make();
  Event() = default;
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  ~Event();

  // The moment when all that `stream` was asked before has been done. What goes wrong is kept by the stream.
  void record(Stream& stream);
  // What `stream` is asked from now on waits for the moment last recorded.
  void hold(Stream& stream) const;
  // The calling thread waits for it.
  Status synchronize() const;
  // Microseconds from `start` to this event; both recorded outside graphs and passed.
  Result<double> microseconds_since(const Event& start) const;

 private:
  ::CUevent_st* handle_ = nullptr;  // cudaEvent_t
};

}  // namespace fp4moe
