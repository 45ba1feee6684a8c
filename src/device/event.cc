#include "device/event.h"

#include <string>
#include <utility>

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#endif

namespace fp4moe {

Event::Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

#ifdef FP4MOE_HAS_CUDA

Result<Event> Event::make() {
  if (DeviceContext::current() == nullptr) return no_current_device();
  Event event;
  const cudaError_t error = cudaEventCreate(&event.handle_);
  if (error != cudaSuccess)
    return unsupported(std::string("cannot create a CUDA event: ") + cudaGetErrorString(error));
  return event;
}

Event::~Event() {
  if (handle_ != nullptr) cudaEventDestroy(handle_);
}

void Event::record(Stream& stream) {
  const cudaError_t error = cudaEventRecord(handle_, stream.handle());
  if (error != cudaSuccess) stream.keep(cuda_failure("event", error));
}

void Event::hold(Stream& stream) const {
  const cudaError_t error = cudaStreamWaitEvent(stream.handle(), handle_, 0);
  if (error != cudaSuccess) stream.keep(cuda_failure("wait for an event", error));
}

Status Event::synchronize() const {
  const cudaError_t error = cudaEventSynchronize(handle_);
  return error == cudaSuccess ? Status() : cuda_failure("device", error);
}

Result<double> Event::microseconds_since(const Event& start) const {
  float milliseconds = 0;
  const cudaError_t error = cudaEventElapsedTime(&milliseconds, start.handle_, handle_);
  if (error != cudaSuccess) return cuda_failure("time between events", error);
  return 1e3 * static_cast<double>(milliseconds);
}

#else

Result<Event> Event::make() { return unsupported("built without CUDA"); }
Event::~Event() = default;
void Event::record(Stream&) {}
void Event::hold(Stream&) const {}
Status Event::synchronize() const { return unsupported("built without CUDA"); }
Result<double> Event::microseconds_since(const Event&) const { return unsupported("built without CUDA"); }

#endif

}  // namespace fp4moe
