#include "device/peer_heap.h"

#include <set>
#include <string>

#include "device/device_context.h"

#ifdef FP4MOE_HAS_CUDA
#include <cuda.h>
#include <dlfcn.h>

#include "device/cuda_error.h"
#endif

namespace fp4moe {

#ifdef FP4MOE_HAS_CUDA

namespace {

// The driver's functions for virtual memory. The driver library is opened on first use, as in the
// CUDA runtime.
struct Driver {
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  std::string missing;  // the first function that this driver lacks
};

template <class Function>
void bind(void* library, const char* symbol, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr && missing.empty()) missing = symbol;
}

Result<const Driver*> driver() {
  static const Driver driver = [] {
    Driver d;
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      d.missing = "libcuda.so.1";
      return d;
    }
    bind(library, "cuDeviceGet", d.device_get, d.missing);
    bind(library, "cuGetErrorString", d.error_string, d.missing);
    bind(library, "cuMemGetAllocationGranularity", d.granularity, d.missing);
    bind(library, "cuMemCreate", d.create, d.missing);
    bind(library, "cuMemRelease", d.release, d.missing);
    bind(library, "cuMemAddressReserve", d.reserve, d.missing);
    bind(library, "cuMemAddressFree", d.free_address, d.missing);
    bind(library, "cuMemMap", d.map, d.missing);
    bind(library, "cuMemUnmap", d.unmap, d.missing);
    bind(library, "cuMemSetAccess", d.set_access, d.missing);
    return d;
  }();
  if (!driver.missing.empty()) return unsupported("the NVIDIA driver has no " + driver.missing);
  return &driver;
}

Status failed(const Driver& driver, const std::string& what, CUresult result) {
  const char* text = nullptr;
  if (driver.error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  return result == CUDA_ERROR_OUT_OF_MEMORY ? does_not_fit(what + ": " + text)
                                            : internal_error(what + ": " + text);
}

std::string gpu_text(int ordinal) { return "GPU " + std::to_string(ordinal); }

Status check_pair(int a, int b) {
  FP4MOE_ASSIGN_OR_RETURN(auto* const first, DeviceContext::of(a));
  FP4MOE_ASSIGN_OR_RETURN(auto* const second, DeviceContext::of(b));
  if (first->info().name != second->info().name)
    return unsupported("ranks on different GPUs: " + gpu_text(a) + " is " + first->info().name + " but " +
                       gpu_text(b) + " is " + second->info().name + "; legal: GPUs of one model");
  int can_access = 0;
  if (const cudaError_t error = cudaDeviceCanAccessPeer(&can_access, a, b); error != cudaSuccess)
    return cuda_failure("peer access from " + gpu_text(a) + " to " + gpu_text(b), error);
  if (can_access == 0)
    return unsupported(gpu_text(a) + " has no peer access to " + gpu_text(b) +
                       ": ranks need GPUs that are connected by NVLink or by PCIe with peer-to-peer enabled");
  return {};
}

CUmemAllocationProp properties(CUdevice device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

}  // namespace

Status check_peers(std::span<const int> ordinals) {
  for (const int a : ordinals) {
    FP4MOE_RETURN_IF_ERROR(DeviceContext::of(a).status());
    for (const int b : ordinals)
      if (a != b) FP4MOE_RETURN_IF_ERROR(check_pair(a, b));
  }
  return {};
}

Result<std::unique_ptr<PeerHeap>> PeerHeap::make(std::span<const int> ordinals, int64_t num_bytes) {
  FP4MOE_RETURN_IF_ERROR(check_peers(ordinals));
  FP4MOE_ASSIGN_OR_RETURN(const Driver* const cu, driver());
  std::unique_ptr<PeerHeap> heap(new PeerHeap);
  for (const int ordinal : ordinals) {
    CUdevice device = 0;
    if (const CUresult r = cu->device_get(&device, ordinal); r != CUDA_SUCCESS)
      return failed(*cu, gpu_text(ordinal), r);
    const CUmemAllocationProp prop = properties(device);
    size_t granularity = 0;
    if (const CUresult r = cu->granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
        r != CUDA_SUCCESS)
      return failed(*cu, "allocation granularity of " + gpu_text(ordinal), r);
    const auto unit = static_cast<int64_t>(granularity);
    heap->num_bytes_ = std::max(heap->num_bytes_, (num_bytes + unit - 1) / unit * unit);
  }
  for (const int ordinal : ordinals) FP4MOE_RETURN_IF_ERROR(heap->add(ordinal, ordinals));
  return heap;
}

Status PeerHeap::add(int ordinal, std::span<const int> ordinals) {
  FP4MOE_ASSIGN_OR_RETURN(const Driver* const cu, driver());
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(ordinal));
  const DeviceScope scope(*gpu);
  const std::string what = "heap of rank " + std::to_string(parts_.size()) + ", " +
                           std::to_string(num_bytes_) + " bytes on " + gpu_text(ordinal);
  CUdevice device = 0;
  if (const CUresult r = cu->device_get(&device, ordinal); r != CUDA_SUCCESS) return failed(*cu, what, r);
  const CUmemAllocationProp prop = properties(device);
  const auto size = static_cast<size_t>(num_bytes_);
  CUmemGenericAllocationHandle handle = 0;
  if (const CUresult r = cu->create(&handle, size, &prop, 0); r != CUDA_SUCCESS) return failed(*cu, what, r);
  Part& part = parts_.emplace_back();
  part.handle = handle;
  CUdeviceptr address = 0;
  if (const CUresult r = cu->reserve(&address, size, 0, 0, 0); r != CUDA_SUCCESS) return failed(*cu, what, r);
  part.base = reinterpret_cast<uint8_t*>(address);
  if (const CUresult r = cu->map(address, size, 0, handle, 0); r != CUDA_SUCCESS) return failed(*cu, what, r);
  part.is_mapped = true;
  std::vector<CUmemAccessDesc> access;
  for (const int other : std::set<int>(ordinals.begin(), ordinals.end())) {
    CUdevice peer = 0;
    if (const CUresult r = cu->device_get(&peer, other); r != CUDA_SUCCESS) return failed(*cu, what, r);
    access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, peer}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  }
  if (const CUresult r = cu->set_access(address, size, access.data(), access.size()); r != CUDA_SUCCESS)
    return failed(*cu, what + ", access for its peers", r);
  if (const cudaError_t error = cudaMemset(part.base, 0, size); error != cudaSuccess)
    return cuda_failure(what, error);
  const cudaError_t error = cudaStreamSynchronize(cudaStreamLegacy);
  return error == cudaSuccess ? Status() : cuda_failure(what, error);
}

PeerHeap::~PeerHeap() {
  const auto opened = driver();
  if (!opened.ok()) return;
  const Driver& cu = **opened;
  const auto size = static_cast<size_t>(num_bytes_);
  for (const Part& part : parts_) {
    const auto address = reinterpret_cast<CUdeviceptr>(part.base);
    if (part.is_mapped) cu.unmap(address, size);
    if (part.base != nullptr) cu.free_address(address, size);
    cu.release(part.handle);
  }
}

#else

Status check_peers(std::span<const int>) { return no_current_device(); }
Result<std::unique_ptr<PeerHeap>> PeerHeap::make(std::span<const int>, int64_t) {
  return no_current_device();
}
Status PeerHeap::add(int, std::span<const int>) { return no_current_device(); }
PeerHeap::~PeerHeap() = default;

#endif

}  // namespace fp4moe
