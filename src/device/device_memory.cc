#include "device/device_memory.h"

#include <string>

#include "device/device_context.h"
#include "device/placed_memory.h"

#ifdef FP4MOE_HAS_CUDA
#include "base/check.h"
#include "device/cuda_error.h"
#include "device/upload_ring.h"
#endif

namespace fp4moe {

#ifdef FP4MOE_HAS_CUDA

namespace {

constexpr int64_t kLargeUpload = int64_t{4} << 20;

class DeviceMemory final : public MemoryResource {
 public:
  explicit DeviceMemory(DeviceContext& device) : device_(device) {}
  Result<uint8_t*> allocate(int64_t num_bytes) override {
    const DeviceScope scope(device_);
    void* data = nullptr;
    if (const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(num_bytes)); error != cudaSuccess) {
      cudaGetLastError();
      size_t free_bytes = 0, total_bytes = 0;
      cudaMemGetInfo(&free_bytes, &total_bytes);
      return does_not_fit("the GPU cannot allocate " + std::to_string(num_bytes) + " bytes (" +
                          cudaGetErrorString(error) + "): " + std::to_string(free_bytes) + " of its " +
                          std::to_string(total_bytes) + " bytes are free");
    }
    return static_cast<uint8_t*>(data);
  }
  void release(uint8_t* data) override {
    const DeviceScope scope(device_);
    cudaFree(data);
  }
  Status upload(void* to, const void* from_host, int64_t num_bytes) override {
    const DeviceScope scope(device_);
    if (UploadScope* uploads = UploadScope::current(); uploads != nullptr && num_bytes >= kLargeUpload)
      return uploads->upload(to, from_host, num_bytes);
    cudaError_t error = cudaMemcpy(to, from_host, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice);
    // For pageable memory, cudaMemcpy returns once the bytes are staged. Kernels on other streams could run
    // before the transfer completes.
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
    return error == cudaSuccess ? Status() : cuda_failure("copy to the GPU", error);
  }
  Status download(void* to_host, const void* from, int64_t num_bytes) override {
    const DeviceScope scope(device_);
    const cudaError_t error =
        cudaMemcpy(to_host, from, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToHost);
    return error == cudaSuccess ? Status() : cuda_failure("copy from the GPU", error);
  }
  bool is_host() const override { return false; }

 private:
  DeviceContext& device_;
};

}  // namespace

Result<DeviceMemoryInfo> device_memory_info(int ordinal) {
  FP4MOE_ASSIGN_OR_RETURN(auto* const device, DeviceContext::of(ordinal));
  const DeviceScope scope(*device);
  size_t free_bytes = 0, total_bytes = 0;
  if (const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes); error != cudaSuccess)
    return cuda_failure("GPU memory", error);
  return DeviceMemoryInfo{static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

std::unique_ptr<MemoryResource> make_device_memory(DeviceContext& device) {
  return std::make_unique<DeviceMemory>(device);
}

#else

Result<DeviceMemoryInfo> device_memory_info(int) { return no_current_device(); }
std::unique_ptr<MemoryResource> make_device_memory(DeviceContext&) { return nullptr; }

#endif

namespace {

// device_memory() in a thread without a current GPU.
class NoMemory final : public MemoryResource {
 public:
  Result<uint8_t*> allocate(int64_t) override { return no_current_device(); }
  void release(uint8_t*) override {}
  Status upload(void*, const void*, int64_t) override { return no_current_device(); }
  Status download(void*, const void*, int64_t) override { return no_current_device(); }
  bool is_host() const override { return false; }
};

}  // namespace

MemoryResource& device_memory() {
  static NoMemory none;
  if (MemoryResource* const placed = DeviceMemoryScope::current(); placed != nullptr) return *placed;
  DeviceContext* const device = DeviceContext::current();
  return device == nullptr ? none : device->memory();
}

}  // namespace fp4moe
