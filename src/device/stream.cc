#include "device/stream.h"

#include <utility>

#include "base/check.h"

#ifdef FP4MOE_HAS_CUDA
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string_view>
#endif

namespace fp4moe {
namespace {

thread_local Stream* t_current = nullptr;

#ifdef FP4MOE_HAS_CUDA
Status cuda_failure(const std::string& what, cudaError_t error) {
  const std::string text = what + ": " + cudaGetErrorString(error);
  return error == cudaErrorMemoryAllocation ? does_not_fit(text) : internal_error(text);
}

bool waits_for_kernels() {
  static const bool waits = [] {
    const char* value = std::getenv("FP4MOE_CUDA_SYNC");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return waits;
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
  if (error != cudaSuccess) return unsupported(std::string("no CUDA stream: ") + cudaGetErrorString(error));
  return stream;
}

Stream::~Stream() {
  if (handle_ != nullptr) cudaStreamDestroy(handle_);
}

Status Stream::synchronize() {
  const cudaError_t error = cudaStreamSynchronize(handle_);
  Status failure = std::exchange(failure_, {});
  if (failure.ok() && error != cudaSuccess) failure = cuda_failure("device", error);
  return failure;
}

void Stream::check_launch(const char* kernel) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && waits_for_kernels()) error = cudaStreamSynchronize(handle_);
  if (error != cudaSuccess && failure_.ok()) failure_ = cuda_failure(std::string("kernel ") + kernel, error);
}

#else

Result<Stream> Stream::make() { return unsupported("built without CUDA"); }
Stream::~Stream() = default;
Status Stream::synchronize() { return std::exchange(failure_, {}); }
void Stream::check_launch(const char*) {}

#endif

Stream& current_stream() {
  FP4MOE_CHECK(t_current != nullptr, "no current stream");
  return *t_current;
}

StreamScope::StreamScope(Stream& stream) : outer_(std::exchange(t_current, &stream)) {}
StreamScope::~StreamScope() { t_current = outer_; }

}  // namespace fp4moe
