#include "device/device_context.h"

#include <string>
#include <vector>

#include "base/check.h"
#include "device/device_memory.h"

#ifdef FP4MOE_HAS_CUDA
#include "device/cuda_error.h"
#endif

namespace fp4moe {
namespace {

thread_local DeviceContext* t_device = nullptr;

#ifdef FP4MOE_HAS_CUDA

thread_local int t_selected = -1;  // this thread's last cudaSetDevice(); -1: none

Status select_device(int ordinal) {
  if (t_selected == ordinal) return {};
  if (const cudaError_t error = cudaSetDevice(ordinal); error != cudaSuccess) {
    cudaGetLastError();
    return cuda_failure("GPU " + std::to_string(ordinal), error);
  }
  t_selected = ordinal;
  return {};
}

#else

Status select_device(int) { return unsupported("built without CUDA"); }

#endif

}  // namespace

DeviceContext::DeviceContext(int ordinal, DeviceInfo info)
    : ordinal_(ordinal), info_(std::move(info)), memory_(make_device_memory(*this)) {}

Result<DeviceContext*> DeviceContext::of(int ordinal) {
  struct Contexts {
    std::mutex mutex;
    std::vector<std::unique_ptr<DeviceContext>> made;
  };
  static auto& contexts = *new Contexts;  // not destroyed: static objects may still own streams and memory
  const std::lock_guard lock(contexts.mutex);
  for (const auto& context : contexts.made)
    if (context->ordinal() == ordinal) return context.get();
  FP4MOE_ASSIGN_OR_RETURN(DeviceInfo info, device_info(ordinal));
  std::unique_ptr<DeviceContext> context(new DeviceContext(ordinal, std::move(info)));
  const DeviceScope scope(*context);
  FP4MOE_RETURN_IF_ERROR(select_device(ordinal));
  return contexts.made.emplace_back(std::move(context)).get();
}

DeviceContext* DeviceContext::current() { return t_device; }

DeviceContext& current_device() {
  FP4MOE_CHECK(t_device != nullptr, no_current_device().message());
  return *t_device;
}

Status no_current_device() {
#ifdef FP4MOE_HAS_CUDA
  return unsupported("this thread has no current GPU (DeviceScope)");
#else
  return unsupported("built without CUDA");
#endif
}

// of() has already selected this GPU once. A later failure is due to a device error, which every call that
// uses the GPU returns too.
DeviceScope::DeviceScope(DeviceContext& device) : outer_(std::exchange(t_device, &device)) {
  static_cast<void>(select_device(device.ordinal()));
}

// Without an outer scope, the thread stays on this GPU, so that the next scope need not select it again.
DeviceScope::~DeviceScope() {
  t_device = outer_;
  if (outer_ != nullptr) static_cast<void>(select_device(outer_->ordinal()));
}

}  // namespace fp4moe
