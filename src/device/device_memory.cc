#include "device/device_memory.h"

#include <string>

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#include "device/upload_ring.h"
#endif

namespace fp4moe {

#ifdef FP4MOE_HAS_CUDA

namespace {

constexpr int64_t kLargeUpload = int64_t{4} << 20;

class DeviceMemory final : public MemoryResource {
 public:
  Result<uint8_t*> allocate(int64_t num_bytes) override {
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
  void release(uint8_t* data) override { cudaFree(data); }
  Status upload(void* to, const void* from_host, int64_t num_bytes) override {
    if (UploadScope* scope = UploadScope::current(); scope != nullptr && num_bytes >= kLargeUpload)
      return scope->upload(to, from_host, num_bytes);
    cudaError_t error = cudaMemcpy(to, from_host, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice);
    // For pageable memory cudaMemcpy returns once the bytes are staged. Kernels of other streams could run
    // before the transfer completes.
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);
    return error == cudaSuccess ? Status() : cuda_failure("copy to the GPU", error);
  }
  Status download(void* to_host, const void* from, int64_t num_bytes) override {
    const cudaError_t error =
        cudaMemcpy(to_host, from, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToHost);
    return error == cudaSuccess ? Status() : cuda_failure("copy from the GPU", error);
  }
  bool is_host() const override { return false; }
};

}  // namespace

Result<DeviceMemoryInfo> device_memory_info() {
  size_t free_bytes = 0, total_bytes = 0;
  if (const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes); error != cudaSuccess)
    return cuda_failure("GPU memory", error);
  return DeviceMemoryInfo{static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

#else

namespace {

class DeviceMemory final : public MemoryResource {
 public:
  Result<uint8_t*> allocate(int64_t) override { return no_cuda(); }
  void release(uint8_t*) override {}
  Status upload(void*, const void*, int64_t) override { return no_cuda(); }
  Status download(void*, const void*, int64_t) override { return no_cuda(); }
  bool is_host() const override { return false; }

 private:
  static Status no_cuda() { return unsupported("built without CUDA"); }
};

}  // namespace

Result<DeviceMemoryInfo> device_memory_info() { return unsupported("built without CUDA"); }

#endif

MemoryResource& device_memory() {
  static DeviceMemory memory;
  return memory;
}

}  // namespace fp4moe
