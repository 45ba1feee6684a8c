#include "device/stream.h"

#include <atomic>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "device/side_stream.h"

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#endif

namespace fp4moe {
namespace {

thread_local Stream* t_stream = nullptr;

#ifdef FP4MOE_HAS_CUDA
// Returns whether `error` was caused by a kernel's execution. Any later call may be the first to return it.
bool is_of_device(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

constexpr int kNameBits = 48;  // of KernelMark::kernel

// Returns text such as "layer 7, kernel rms_norm".
std::string marked_kernel(uint64_t mark) {
  const auto layer = static_cast<int64_t>(mark >> kNameBits) - 1;
  const auto* name = reinterpret_cast<const char*>(mark & ((uint64_t{1} << kNameBits) - 1));
  return (layer < 0 ? "" : "layer " + std::to_string(layer) + ", ") + "kernel " + name;
}

bool is_recording(StreamHandle stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone;
}
#endif

}  // namespace

Stream::Stream(Stream&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      handle_(std::exchange(other.handle_, nullptr)),
      failure_(std::exchange(other.failure_, {})),
      layer_(std::exchange(other.layer_, -1)),
      has_peers_(std::exchange(other.has_peers_, false)),
      side_(std::exchange(other.side_, nullptr)),
      reached_(std::exchange(other.reached_, nullptr)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  std::swap(failure_, other.failure_);
  std::swap(layer_, other.layer_);
  std::swap(has_peers_, other.has_peers_);
  std::swap(side_, other.side_);
  std::swap(reached_, other.reached_);
  return *this;
}

#ifdef FP4MOE_HAS_CUDA

Result<Stream> Stream::make() {
  if (DeviceContext::current() == nullptr) return no_current_device();
  Stream stream;
  stream.device_ = DeviceContext::current();
  cudaError_t error = cudaStreamCreateWithFlags(&stream.handle_, cudaStreamNonBlocking);
  void* reached = nullptr;
  if (error == cudaSuccess) error = cudaHostAlloc(&reached, sizeof(uint64_t), cudaHostAllocMapped);
  if (error == cudaSuccess) {
    stream.reached_ = static_cast<uint64_t*>(reached);
    *stream.reached_ = 0;
    return stream;
  }
  cudaGetLastError();
  return cuda_failure("CUDA stream", error);
}

Stream::~Stream() {
  if (device_ == nullptr) return;
  const DeviceScope scope(*device_);
  if (handle_ != nullptr) cudaStreamDestroy(handle_);
  if (reached_ != nullptr) cudaFreeHost(reached_);
}

Status Stream::synchronize() {
  const cudaError_t error = cudaStreamSynchronize(handle_);
  if (error != cudaSuccess) keep(cuda_failure("device" + place(error), error));
  return take_failure();
}

// Returns where the error happened: for asynchronous errors, the last marked kernel that the device reached.
std::string Stream::place(int error) const {
  const bool found_later = is_of_device(static_cast<cudaError_t>(error)) && !cuda_sync_is_on();
  if (!found_later) return layer_ < 0 ? "" : ", layer " + std::to_string(layer_);
  const uint64_t kernel = std::atomic_ref(*reached_).load();
  const uint64_t beside = side_ == nullptr ? 0 : std::atomic_ref(*side_->stream().reached_).load();
  return (kernel == 0 ? "" : ", in or after " + marked_kernel(kernel)) +
         (beside == 0 ? "" : ", or on the side stream in or after " + marked_kernel(beside));
}

KernelMark Stream::mark(const char* kernel) const {
  return {reached_, reinterpret_cast<uint64_t>(kernel) | static_cast<uint64_t>(layer_ + 1) << kNameBits};
}

void Stream::check_launch(const char* kernel) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && cuda_sync_is_on() && !is_recording(handle_))
    error = cudaStreamSynchronize(handle_);
  if (error == cudaSuccess) return;
  const bool found_later = is_of_device(error) && !cuda_sync_is_on();
  keep(cuda_failure((found_later ? std::string("device") : std::string("kernel ") + kernel) + place(error),
                    error));
}

#else

Result<Stream> Stream::make() { return unsupported("built without CUDA"); }
Stream::~Stream() = default;
Status Stream::synchronize() { return take_failure(); }
void Stream::check_launch(const char*) {}
std::string Stream::place(int) const { return ""; }
KernelMark Stream::mark(const char*) const { return {}; }

#endif

bool cuda_sync_is_on() {
  static const bool is_on = [] {
    const char* value = std::getenv("FP4MOE_CUDA_SYNC");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return is_on;
}

DeviceContext& Stream::device() const {
  FP4MOE_CHECK(device_ != nullptr, "the stream is empty");
  return *device_;
}

void Stream::keep(Status failure) {
  if (failure_.ok()) failure_ = std::move(failure);
}

Status Stream::take_failure() { return std::exchange(failure_, {}); }

Stream& current_stream() {
  FP4MOE_CHECK(t_stream != nullptr, "this thread has no current stream");
  return *t_stream;
}

StreamScope::StreamScope(Stream& stream)
    : device_(stream.device()), outer_(std::exchange(t_stream, &stream)) {}
StreamScope::~StreamScope() { t_stream = outer_; }

}  // namespace fp4moe
