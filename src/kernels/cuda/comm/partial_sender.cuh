// Sends partial sums from the kernel that computes them (PartialPeers of kernels/device_comm.h). Device code
// only.
//
// The words are those of the group's next operation, the sum, which all_reduce.cu or all_reduce_norm.cu runs
// after this kernel. They are free: this rank has ended the operation before, so each peer has sent its data
// of that operation, and had before ended the one that used these words last. A peer sends after it has ended
// an operation, whether in the next operation or in a kernel before it, so group.cuh's two buffers suffice.
#pragma once

#include "kernels/cuda/comm/group.cuh"

namespace fp4moe::cuda {

class PartialSender {
 public:
  // After the grid dependency wait, and well before the first element: only its first use waits for the load.
  __device__ __forceinline__ explicit PartialSender(const PartialPeers& peers) : peers_(peers) {
    if (peers.count > 0) load_epoch(peers.state, epoch_, poison_);
  }
  // The elements of the partials are sent once each, by any threads.
  __device__ __forceinline__ void send(int64_t element, float value) const {
    store(element, sendable(__float_as_uint(value)));
  }
  __device__ __forceinline__ void send(int64_t element, const float2& values) const {
    store(element, sendable(uint2{__float_as_uint(values.x), __float_as_uint(values.y)}));
  }

 private:
  template <class Words>
  __device__ __forceinline__ void store(int64_t element, const Words& words) const {
    if (peers_.count == 0 || poison_ != 0) return;
    const int64_t at = element * int64_t{sizeof(float)} + ((epoch_ + 1) % 2 != 0 ? peers_.odd_bytes : 0);
#pragma unroll 1
    for (int i = 0; i < peers_.count; ++i) store_words(peers_.words[i] + at, words);
  }

  const PartialPeers& peers_;
  uint32_t epoch_ = 0, poison_ = 0;
};

}  // namespace fp4moe::cuda
