// Frames: the messages between the processes of an mpi job. A frame is a header followed by operations of one
// sender, in order. Each received operation is checked before it is applied.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/rank_memory.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr uint32_t kFrameMagic = 0x34504d46;  // "FMP4"
constexpr uint32_t kFrameVersion = 2;
constexpr int64_t kMaxPutBytes = 256 << 10;  // of one put operation; larger puts are split
constexpr int64_t kMaxFrameBytes = 8 << 20;

enum class FrameOp : uint32_t {
  kHello = 1,   // payload: Hello (mpi_hello.h)
  kPut = 2,     // payload: bytes for dst's heap at `offset`
  kSignal = 3,  // raises cell (src, slot) of dst to `value`
  kFail = 4,    // value: status code; payload: its message
  kBye = 5,     // orderly shutdown; the process sends nothing more
};

// Fixed layouts, little-endian; every operation is 8-byte aligned in the frame.
struct FrameHeader {
  uint32_t magic = kFrameMagic;
  uint32_t version = kFrameVersion;
  uint32_t process = 0;  // the sender
  uint32_t zero = 0;
};
struct FrameOpHeader {
  uint32_t op = 0;
  uint32_t src = 0, dst = 0;  // ranks
  uint32_t slot = 0;
  uint32_t value = 0;
  uint32_t zero = 0;
  int64_t offset = 0;
  int64_t num_bytes = 0;  // of the payload, which follows and is padded to a multiple of 8 bytes
};
static_assert(sizeof(FrameHeader) == 16 && sizeof(FrameOpHeader) == 40);

// Appends an operation to a frame, after a header if the frame is empty.
void append_op(std::vector<uint8_t>& frame, int process, const FrameOpHeader& op, const void* payload);

// Handles a frame's control operations.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  virtual Status hello(int process, std::span<const uint8_t> payload) = 0;
  virtual void failed(int process, const Status& status) = 0;
  virtual void bye(int process) = 0;
};

// Applies a frame received from `process` to this process's memory; each process has ranks_per_process ranks.
// kDataLoss: an operation is invalid; the message names the process, the field and its value. The operations
// before it have been applied.
Status apply_frame(std::span<const uint8_t> frame, int process, int ranks_per_process, RankMemory& memory,
                   FrameSink& sink);

}  // namespace fp4moe
