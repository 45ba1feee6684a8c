#include "device/pinned_memory.h"

#include <cstring>
#include <string>

#include "device/device_context.h"
#include "device/stream.h"

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#endif

namespace fp4moe {
namespace {

class PinnedMemory final : public MemoryResource {
 public:
#ifdef FP4MOE_HAS_CUDA
  Result<uint8_t*> allocate(int64_t num_bytes) override {
    if (DeviceContext::current() == nullptr) return no_current_device();
    void* data = nullptr;
    const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(num_bytes), cudaHostAllocPortable);
    if (error == cudaSuccess) return static_cast<uint8_t*>(data);
    cudaGetLastError();
    const std::string text = std::to_string(num_bytes) +
                             " bytes of page-locked memory cannot be allocated: " + cudaGetErrorString(error);
    return error == cudaErrorMemoryAllocation ? does_not_fit(text) : unsupported(text);
  }
  void release(uint8_t* data) override { cudaFreeHost(data); }
#else
  Result<uint8_t*> allocate(int64_t) override { return unsupported("built without CUDA"); }
  void release(uint8_t*) override {}
#endif
  Status upload(void* to, const void* from_host, int64_t num_bytes) override {
    std::memcpy(to, from_host, static_cast<size_t>(num_bytes));
    return {};
  }
  Status download(void* to_host, const void* from, int64_t num_bytes) override {
    std::memcpy(to_host, from, static_cast<size_t>(num_bytes));
    return {};
  }
  bool is_host() const override { return true; }
};

}  // namespace

MemoryResource& pinned_memory() {
  static PinnedMemory memory;
  return memory;
}

#ifdef FP4MOE_HAS_CUDA

void copy_async(void* to, const void* from, int64_t num_bytes) {
  Stream& stream = current_stream();
  const cudaError_t error =
      cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, stream.handle());
  if (error != cudaSuccess) stream.keep(cuda_failure("copy", error));
}

void copy_rows_async(const RowCopy& c) {
  if (c.num_rows == 0 || c.row_bytes == 0) return;
  Stream& stream = current_stream();
  const auto stride = static_cast<size_t>(c.stride_bytes);
  const cudaError_t error =
      cudaMemcpy2DAsync(c.to, stride, c.from, stride, static_cast<size_t>(c.row_bytes),
                        static_cast<size_t>(c.num_rows), cudaMemcpyDefault, stream.handle());
  if (error != cudaSuccess) stream.keep(cuda_failure("copy", error));
}

#else

void copy_async(void*, const void*, int64_t) {}
void copy_rows_async(const RowCopy&) {}

#endif

}  // namespace fp4moe
