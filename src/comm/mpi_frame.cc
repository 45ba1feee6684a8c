#include "comm/mpi_frame.h"

#include <cstring>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr int64_t padded(int64_t num_bytes) { return (num_bytes + 7) / 8 * 8; }

Status bad(int process, const std::string& what, int64_t value, const std::string& legal) {
  return data_loss("message from process " + std::to_string(process) + ": " + what + "=" +
                   std::to_string(value) + " must be " + legal);
}

Status check_ranks(const FrameOpHeader& op, int process, int ranks_per_process, const RankMemory& memory) {
  const int64_t first = int64_t{process} * ranks_per_process;
  if (op.src < first || op.src >= first + ranks_per_process)
    return bad(process, "source rank", op.src, "a rank of that process");
  if (op.dst >= static_cast<uint32_t>(memory.shape().num_ranks) || !memory.is_local(static_cast<int>(op.dst)))
    return bad(process, "destination rank", op.dst, "a rank of this process");
  return {};
}

Status put(const FrameOpHeader& op, const uint8_t* payload, int process, RankMemory& memory) {
  const int64_t heap = memory.shape().heap_bytes;
  if (op.offset < 0 || op.offset > heap || op.num_bytes > heap - op.offset)
    return bad(process, "put of " + std::to_string(op.num_bytes) + " bytes: offset", op.offset,
               "inside a heap of " + std::to_string(heap) + " bytes");
  if (op.num_bytes > 0)
    std::memcpy(memory.heap(static_cast<int>(op.dst)) + op.offset, payload,
                static_cast<size_t>(op.num_bytes));
  return {};
}

Status apply_op(const FrameOpHeader& op, const uint8_t* payload, int process, int ranks_per_process,
                RankMemory& memory, FrameSink& sink) {
  const size_t num_bytes = static_cast<size_t>(op.num_bytes);
  switch (static_cast<FrameOp>(op.op)) {
    case FrameOp::kHello:
      return sink.hello(process, {payload, num_bytes});
    case FrameOp::kPut:
      FP4MOE_RETURN_IF_ERROR(check_ranks(op, process, ranks_per_process, memory));
      return put(op, payload, process, memory);
    case FrameOp::kSignal:
      FP4MOE_RETURN_IF_ERROR(check_ranks(op, process, ranks_per_process, memory));
      if (op.slot >= kSignalSlots)
        return bad(process, "slot", op.slot, "below " + std::to_string(kSignalSlots));
      memory.raise(static_cast<int>(op.src), static_cast<int>(op.dst), static_cast<int>(op.slot), op.value);
      return {};
    case FrameOp::kFail:
      if (op.value == 0 || op.value > static_cast<uint32_t>(StatusCode::kInternal))
        return bad(process, "status code", op.value, "an error code");
      sink.failed(process,
                  {static_cast<StatusCode>(op.value), {reinterpret_cast<const char*>(payload), num_bytes}});
      return {};
    case FrameOp::kBye:
      sink.bye(process);
      return {};
  }
  return bad(process, "operation", op.op, "from 1 to 5");
}

}  // namespace

void append_op(std::vector<uint8_t>& frame, int process, const FrameOpHeader& op, const void* payload) {
  const size_t begin = frame.empty() ? sizeof(FrameHeader) : frame.size();
  frame.resize(begin + sizeof op + static_cast<size_t>(padded(op.num_bytes)));
  if (begin == sizeof(FrameHeader)) {
    const FrameHeader header = {.process = static_cast<uint32_t>(process)};
    std::memcpy(frame.data(), &header, sizeof header);
  }
  std::memcpy(frame.data() + begin, &op, sizeof op);
  if (op.num_bytes > 0)
    std::memcpy(frame.data() + begin + sizeof op, payload, static_cast<size_t>(op.num_bytes));
}

Status apply_frame(std::span<const uint8_t> frame, int process, int ranks_per_process, RankMemory& memory,
                   FrameSink& sink) {
  FrameHeader header;
  const int64_t size = static_cast<int64_t>(frame.size());
  if (frame.size() < sizeof header)
    return bad(process, "bytes", size, "at least " + std::to_string(sizeof header));
  std::memcpy(&header, frame.data(), sizeof header);
  if (header.magic != kFrameMagic) return bad(process, "magic", header.magic, std::to_string(kFrameMagic));
  if (header.version != kFrameVersion)
    return bad(process, "protocol version", header.version,
               std::to_string(kFrameVersion) + ", this process's version");
  if (header.process != static_cast<uint32_t>(process))
    return bad(process, "sender", header.process, std::to_string(process));
  int64_t at = sizeof header;
  while (at < size) {
    FrameOpHeader op;
    constexpr int64_t kOpBytes = sizeof op;
    if (size - at < kOpBytes)
      return bad(process, "bytes left", size - at, "at least " + std::to_string(kOpBytes));
    std::memcpy(&op, frame.data() + at, sizeof op);
    at += kOpBytes;
    if (op.num_bytes < 0 || op.num_bytes > size - at || padded(op.num_bytes) > size - at)
      return bad(process, "payload bytes", op.num_bytes, "at most " + std::to_string(size - at));
    FP4MOE_RETURN_IF_ERROR(apply_op(op, frame.data() + at, process, ranks_per_process, memory, sink));
    at += padded(op.num_bytes);
  }
  return {};
}

}  // namespace fp4moe
