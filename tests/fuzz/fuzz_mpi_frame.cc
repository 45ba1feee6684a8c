// Messages from other processes change only the local heaps, whatever they contain. ASan checks this.
#include <cstring>
#include <vector>

#include "comm/mpi_frame.h"
#include "comm/mpi_hello.h"

namespace {

using namespace fp4moe;

struct Sink : FrameSink {
  Status hello(int, std::span<const uint8_t> payload) override {
    const Result<Hello> theirs = decode_hello(payload);
    return theirs.ok() ? check_same({}, *theirs) : theirs.status();
  }
  void failed(int, const Status&) override {}
  void bye(int) override {}
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::unique_ptr<RankMemory> memory = std::move(
      *RankMemory::make({.num_ranks = 6, .first_rank = 2, .num_local_ranks = 2, .heap_bytes = 200}));
  // Prepend a valid header, which few inputs would contain.
  std::vector<uint8_t> frame(sizeof(FrameHeader) + size);
  const FrameHeader header = {.process = 2};
  std::memcpy(frame.data(), &header, sizeof header);
  if (size > 0) std::memcpy(frame.data() + sizeof header, data, size);
  Sink sink;
  static_cast<void>(apply_frame(frame, 2, 2, *memory, sink));
  static_cast<void>(apply_frame({data, size}, 2, 2, *memory, sink));
  return 0;
}
