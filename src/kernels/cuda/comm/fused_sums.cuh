// The two halves of a fused sum (kernels/device_comm.h): a kernel that computes partial sums sends them, and
// the next kernel of the stream takes those of all ranks. Device code only.
//
// Operands are marked words (group.cuh), in buffers of their own. All blocks of the taking kernel read all
// words, so no block can mark them as unsent again; instead, the taking kernel of a fused sum clears the
// buffer of the sum before. With kSentBuffers = 3 buffers, used in turn:
//   - The sending kernel of sum n uses buffer n, which the taking kernel of sum n - 2 has cleared.
//   - No block reads buffer n - 1 during the taking kernel of sum n: its readers were the blocks of this
//     rank's previous taking kernel, which has ended.
//   - No peer writes buffer n - 1 = n + 2 before it is clear: a peer sends sum n + 2 after it has taken this
//     rank's words of sum n + 1, and this rank sends those after its taking kernel of sum n has ended.
// "Ended" holds because the sending kernel waits for the previous ones of its stream (griddepcontrol.wait)
// before it sends, and the end of a kernel makes its stores visible to the next one.
// tests/comm/device_protocol_model_test.cc explores the orders of these steps.
//
// The taking kernel does not wait for the end of the sending kernel, which comes 1 to 2 us after the words.
// Once it is past its own wait, the sending kernel announces the sum: all kernels before it have ended, so
// the taking kernel may read what they wrote, and the buffer's words are either unsent or those of this sum.
// Once a block of the taking kernel has all words of its own rank, the sending kernel has read its inputs,
// and the block may write to memory that they share. It waits for the end of the sending kernel last, so that
// the next kernel can rely on it. The announcement has a tag, by which a block that started very early sees
// that it is not that of the sum before.
//
// The two kernels are one operation of the group. The sending kernel finds the epoch and the buffer as the
// previous operation left them and changes neither; the taking kernel advances both. Other operations of the
// group may precede and follow: they have buffers of their own, and a rank that has taken a sum has received
// data from every peer, as after any other operation. Kernels between the two halves must not be operations
// of the group.
#pragma once

#include "kernels/cuda/comm/group.cuh"
#include "kernels/cuda/ptx/ptx_order.cuh"

namespace fp4moe::cuda {

__device__ __forceinline__ uint8_t* sent_at(const CommGroup& group, int rank, uint32_t buffer, int source) {
  return group.regions[rank] + group.layout.sent +
         (int64_t{buffer} * group.size + source) * group.layout.sent_bytes;
}
__device__ __forceinline__ uint32_t load_sent_buffer(const CommGroup& group) {
  uint32_t buffer;
  asm volatile("ld.volatile.global.u32 %0, [%1];"
               : "=r"(buffer)
               : "l"(&state_of(group, group.rank)->sent_buffer));
  return buffer;
}

// The sending half, for one thread. The elements of the rows [T, H] are sent once each, by any threads.
class SumSender {
 public:
  // After the grid dependency wait and well before the first element: the loads take a trip through the L2,
  // for which only the first use waits.
  __device__ __forceinline__ explicit SumSender(const SumsToSend& sums)
      : group_(sums.group),
        buffer_(load_sent_buffer(sums.group)),
        poison_(*reinterpret_cast<const volatile uint32_t*>(&state_of(group_, group_.rank)->poison)) {}
  // With the buffer() of another thread's sender.
  __device__ __forceinline__ SumSender(const SumsToSend& sums, uint32_t buffer)
      : group_(sums.group), buffer_(buffer), poison_(0) {}

  __device__ __forceinline__ uint32_t buffer() const { return poison_ != 0 ? kFailed : buffer_; }
  // Lets the taking kernel begin. One thread of the kernel calls it, after the grid dependency wait.
  __device__ __forceinline__ void announce(uint32_t tag) const {
    ptx::store_release(&state_of(group_, group_.rank)->announced, tag * (kSentBuffers + 1) + buffer_);
  }
  __device__ __forceinline__ void send(int64_t element, float value) const {
    store(element, sendable(__float_as_uint(value)));
  }
  __device__ __forceinline__ void send(int64_t element, const float2& values) const {
    store(element, sendable(uint2{__float_as_uint(values.x), __float_as_uint(values.y)}));
  }

 private:
  static constexpr uint32_t kFailed = ~0u;  // a group that has failed is sent nothing

  template <class Words>
  __device__ __forceinline__ void store(int64_t element, const Words& words) const {
    const uint32_t to = buffer();
    if (to == kFailed) return;
    int r = group_.rank;
#pragma unroll 1
    for (int i = 0; i < group_.size; ++i) {  // the peers first
      r = r + 1 < group_.size ? r + 1 : 0;
      store_words(sent_at(group_, r, to, group_.rank) + element * 4, words);
    }
  }

  const CommGroup& group_;
  uint32_t buffer_, poison_;
};

// Where a thread is among those of all blocks that take rows.
struct TakingThread {
  int number, count;
};

// The taking half, for one block. All threads of the block that take rows make it; then take() (or
// clear_previous()), enter() and leave() are called in this order.
class SumTaker {
 public:
  // Waits until the sending kernel is past its grid dependency wait, for which a kernel needs no deadline,
  // and returns the sum's buffer.
  static __device__ __forceinline__ uint32_t await_sender(const SumsToTake& sums) {
    const uint32_t* const from = &state_of(sums.group, sums.group.rank)->announced;
    uint32_t word;
    do {
      word = ptx::load_acquire(from);
    } while (word / (kSentBuffers + 1) != sums.tag);
    return word % (kSentBuffers + 1);
  }
  __device__ __forceinline__ SumTaker(const SumsToTake& sums, const TakingThread& thread)
      : buffer_(await_sender(sums)), operation_(sums.group, sums.op, Entered{}), thread_(thread) {
    ++operation_.epoch;
  }

  // Calls add(j, sum) for each j < kCount with vector_of(j) >= 0: the sum over the ranks, in rank order, of
  // the four elements from 4 * vector_of(j) on of the rows [T, H]. In a group that has failed, sums are
  // unspecified.
  template <int kCount, class VectorOf, class Add>
  __device__ __forceinline__ void take(const VectorOf& vector_of, const Add& add) {
    const int size = operation_.group.size;
    float4 sum[kCount] = {};
    uint4 words[kCount] = {};
    {  // the words of two ranks are on their way together
      uint4 second[kCount] = {};
      const bool has_second = size > 1;
      const auto second_of = [&](int j) { return has_second ? vector_of(j) : -1; };
      load<kCount>(buffer_, 0, vector_of, words);
      load<kCount>(buffer_, 1, second_of, second);
      clear_previous();
      add_words<kCount>(0, vector_of, words, sum);
      if (has_second) add_words<kCount>(1, vector_of, second, sum);
    }
#pragma unroll 1
    for (int r = 2; r < size; ++r) {
      load<kCount>(buffer_, r, vector_of, words);
      add_words<kCount>(r, vector_of, words, sum);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (vector_of(j) >= 0) add(j, sum[j]);
  }

  // Clears this thread's share of this rank's buffer of the previous sum, at the first call. take() calls it
  // while its words are on their way; threads that may not take anything must call it too.
  __device__ __forceinline__ void clear_previous() {
    const CommGroup& g = operation_.group;
    const auto vectors = static_cast<int>(g.size * g.layout.sent_bytes / int64_t{sizeof(uint4)});
    auto* const words = reinterpret_cast<uint4*>(
        sent_at(g, g.rank, buffer_ == 0 ? kSentBuffers - 1 : buffer_ - 1, /*source=*/0));
#pragma unroll 1  // few have more than one
    for (; thread_.number < vectors; thread_.number += thread_.count) mark_unsent(words + thread_.number);
  }

  // Call it after a barrier that follows the constructor in all threads that made a SumTaker.
  __device__ __forceinline__ void enter() {
    if (threadIdx.x == 0)
      ticket_ = atomicAdd(&state_of(operation_.group, operation_.group.rank)->num_entered, 1u);
  }
  // At the end of the kernel. The last of the `blocks` blocks that have entered ends the operation: all
  // threads have read the epoch and the buffer. Waits for the sending kernel.
  __device__ __forceinline__ void leave(uint32_t blocks) const {
    if (threadIdx.x == 0 && ticket_ == blocks - 1) {
      CommState* const state = state_of(operation_.group, operation_.group.rank);
      state->num_entered = 0;
      state->sent_buffer = buffer_ == kSentBuffers - 1 ? 0 : buffer_ + 1;
      *reinterpret_cast<volatile uint32_t*>(&state->epoch) = operation_.epoch;
    }
    ptx::grid_dependency_wait();
  }

 private:
  template <int kCount, class VectorOf>
  __device__ __forceinline__ void load(uint32_t buffer, int rank, const VectorOf& vector_of,
                                       uint4 (&words)[kCount]) const {
    const CommGroup& g = operation_.group;
    const auto* const from = reinterpret_cast<const uint4*>(sent_at(g, g.rank, buffer, rank));
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (const int i = vector_of(j); i >= 0) words[j] = load_words(from + i);
  }
  // Waits for the words that have not arrived, and adds all of them.
  template <int kCount, class VectorOf>
  __device__ __forceinline__ void add_words(int rank, const VectorOf& vector_of, uint4 (&words)[kCount],
                                            float4 (&sum)[kCount]) const {
    const auto have_arrived = [&] {
      bool all = true;
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (vector_of(j) >= 0) all &= has_arrived(words[j]);
      return all;
    };
    if (!have_arrived() && !operation_.failed)
      operation_.wait(rank, [&](uint32_t&) {
        load<kCount>(buffer_, rank, vector_of, words);
        return have_arrived();
      });
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      sum[j].x += __uint_as_float(words[j].x), sum[j].y += __uint_as_float(words[j].y);
      sum[j].z += __uint_as_float(words[j].z), sum[j].w += __uint_as_float(words[j].w);
    }
  }

  uint32_t buffer_, ticket_ = ~0u;
  Operation operation_;  // after buffer_, with which the state is stable
  TakingThread thread_;
};

}  // namespace fp4moe::cuda
