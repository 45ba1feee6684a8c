// Stream: a CUDA stream. Kernels are enqueued on the calling thread's current stream. The stream keeps errors
// until synchronize() returns them, with the kernel's name.
#pragma once

#include <cstdint>
#include <string>

#include "device/device_context.h"
#include "fp4moe/status.h"

struct CUstream_st;

namespace fp4moe {

using StreamHandle = ::CUstream_st*;  // cudaStream_t

class SideStream;  // device/side_stream.h

// A kernel with a mark writes *reached = kernel once all work before it is complete.
struct KernelMark {
  uint64_t* reached = nullptr;  // pinned
  uint64_t kernel = 0;          // bits 0 to 47: address of the kernel's name; above: layer + 1
};

class Stream {
 public:
  // Makes a stream on the current GPU. kUnsupported in a thread without one, or in a build without CUDA.
  static Result<Stream> make();
  Stream() = default;
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  StreamHandle handle() const { return handle_; }
  // Returns the GPU on which make() made the stream.
  DeviceContext& device() const;
  // Waits for all enqueued work. Returns the first error since the last call: a launch error, with the
  // kernel's name, or a device error (kInternal; sticky: every later call returns it).
  Status synchronize();
  // Call after each launch: keeps the launch error, if any. With FP4MOE_CUDA_SYNC=1 in the environment, also
  // waits for the kernel, so that a device error names its kernel too.
  void check_launch(const char* kernel);
  // Declares that other ranks' kernels wait for this stream's kernels, so that nothing may be loaded or
  // allocated for a kernel after the rehearsal (DeviceCommunicator::rehearse()).
  void set_has_peers() { has_peers_ = true; }
  bool has_peers() const { return has_peers_; }
  // Assigns work enqueued from now on to model layer `layer`, which error messages name.
  void begin_layer(int layer) { layer_ = layer; }
  void end_layers() { layer_ = -1; }
  int layer() const { return layer_; }  // -1: none
  // Sets a stream, or null, for work that may run beside this stream's. It must outlive the use of this one.
  void set_side(SideStream* side) { side_ = side; }
  SideStream* side() const { return side_; }
  // Returns a mark for the next kernel, in a graph or not. For asynchronous errors, messages name the last
  // marked kernel that the device reached, on this stream and on its side stream: the error occurred in or
  // after one of them. `kernel` must be a string literal, and the stream must outlive graphs captured on it.
  KernelMark mark(const char* kernel) const;
  // Keeps `failure` unless an earlier failure is kept.
  void keep(Status failure);
  // Returns and clears the kept error, without waiting.
  Status take_failure();

 private:
  std::string place(int error) const;
  DeviceContext* device_ = nullptr;
  StreamHandle handle_ = nullptr;
  Status failure_;
  int layer_ = -1;
  bool has_peers_ = false;
  SideStream* side_ = nullptr;
  uint64_t* reached_ = nullptr;  // pinned; the last KernelMark::kernel that the device wrote; 0: none
};

// Returns whether FP4MOE_CUDA_SYNC=1 is set, that is, whether to wait after each kernel and use no graphs.
bool cuda_sync_is_on();

// Returns the stream on which this thread enqueues kernels. Precondition: this thread has a StreamScope.
Stream& current_stream();

// Thread-local: makes `stream` the calling thread's current stream, and the stream's GPU its current GPU,
// during the scope's lifetime. Precondition: make() made the stream.
class StreamScope {
 public:
  explicit StreamScope(Stream& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  const DeviceScope device_;
  Stream* const outer_;
};

}  // namespace fp4moe
