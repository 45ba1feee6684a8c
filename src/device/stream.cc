#include "device/stream.h"

#include <utility>

#include "base/check.h"

#ifdef FP4MOE_HAS_CUDA
#include <cstdlib>
#include <string_view>

#include "device/cuda_error.h"
#include "device/device_info.h"
#endif

namespace fp4moe {
namespace {

thread_local Stream* t_current = nullptr;

#ifdef FP4MOE_HAS_CUDA
bool waits_for_kernels(StreamHandle stream) {
  static const bool waits = [] {
    const char* value = std::getenv("FP4MOE_CUDA_SYNC");
    return value != nullptr && std::string_view(value) == "1";
  }();
  if (!waits) return false;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &capture) == cudaSuccess && capture == cudaStreamCaptureStatusNone;
}
#endif

}  // namespace

Stream::Stream(Stream&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), failure_(std::exchange(other.failure_, {})) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(failure_, other.failure_);
  return *this;
}

#ifdef FP4MOE_HAS_CUDA

Result<Stream> Stream::make() {
  Stream stream;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream.handle_, cudaStreamNonBlocking);
  if (error == cudaSuccess) return stream;
  cudaGetLastError();
  const auto info = device_info();
  return info.ok() ? cuda_failure("CUDA stream", error) : info.status();
}

Stream::~Stream() {
  if (handle_ != nullptr) cudaStreamDestroy(handle_);
}

Status Stream::synchronize() {
  const cudaError_t error = cudaStreamSynchronize(handle_);
  if (error != cudaSuccess) keep(cuda_failure("device", error));
  return take_failure();
}

void Stream::check_launch(const char* kernel) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && waits_for_kernels(handle_)) error = cudaStreamSynchronize(handle_);
  if (error != cudaSuccess) keep(cuda_failure(std::string("kernel ") + kernel, error));
}

#else

Result<Stream> Stream::make() { return unsupported("built without CUDA"); }
Stream::~Stream() = default;
Status Stream::synchronize() { return take_failure(); }
void Stream::check_launch(const char*) {}

#endif

void Stream::keep(Status failure) {
  if (failure_.ok()) failure_ = std::move(failure);
}

Status Stream::take_failure() { return std::exchange(failure_, {}); }

Stream& current_stream() {
  FP4MOE_CHECK(t_current != nullptr, "no current stream");
  return *t_current;
}

StreamScope::StreamScope(Stream& stream) : outer_(std::exchange(t_current, &stream)) {}
StreamScope::~StreamScope() { t_current = outer_; }

}  // namespace fp4moe
