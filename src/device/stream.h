// Stream: the order in which a device does what a thread asks of it. Kernels go to the calling thread's
// current stream; what goes wrong is kept by the stream and returned by synchronize(), with the kernel's
// name.
#pragma once

#include <cstdint>
#include <string>

#include "fp4moe/status.h"

struct CUstream_st;

namespace fp4moe {

using StreamHandle = ::CUstream_st*;  // cudaStream_t

// What a kernel is given to note that all before it is done: *reached = kernel.
struct KernelMark {
  uint64_t* reached = nullptr;  // pinned
  uint64_t kernel = 0;          // its name's address, and above 48 bits of it the layer + 1
};

class Stream {
 public:
  // On device 0. kUnsupported without a device, or in a build without CUDA.
  static Result<Stream> make();
  Stream() = default;
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  ~Stream();

  StreamHandle handle() const { return handle_; }
  // Waits for all that was asked. The first error since the last call: of a launch, with the kernel's name,
  // or of the device (kInternal; such an error is sticky: every later call returns it).
  Status synchronize();
  // After each launch: keeps the error if there is one. With FP4MOE_CUDA_SYNC=1 in the environment it waits
  // for the kernel, so that an error of the device names it too.
  void check_launch(const char* kernel);
  // What is asked from now on belongs to layer `layer` of the model: errors name it.
  void begin_layer(int layer) { layer_ = layer; }
  void end_layers() { layer_ = -1; }
  // For the next kernel, in a graph or not: an error that is found later than made names the last kernel with
  // a mark that the device had reached; it was in it or after it. `kernel`: a literal. The stream outlives
  // graphs that were captured on it.
  KernelMark mark(const char* kernel) const;
  // Keeps `failure` if it is the first.
  void keep(Status failure);
  // What is kept, without waiting; it is forgotten.
  Status take_failure();

 private:
  std::string place(int error) const;
  StreamHandle handle_ = nullptr;
  Status failure_;
  int layer_ = -1;
  uint64_t* reached_ = nullptr;  // pinned, written by the device: KernelMark::kernel; 0: none
};

// Whether FP4MOE_CUDA_SYNC=1 asks for a wait after each kernel; no graphs then.
bool cuda_sync_is_on();

// The stream that this thread's kernels go to. Precondition: a StreamScope is alive on this thread.
Stream& current_stream();

// Makes `stream` the calling thread's current one for the object's life.
class StreamScope {
 public:
  explicit StreamScope(Stream& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  Stream* const outer_;
};

}  // namespace fp4moe
