// GroupCommand: a call of a group of GPU ranks that process 0 sends to the other processes (process_group.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/ranks/step_batches.h"
#include "fp4moe/status.h"
#include "kernels/device_sampler.h"

namespace fp4moe {

enum class CommandKind : int64_t { kEnd, kStep, kSample, kTake, kMask };

struct GroupCommand {
  CommandKind kind = CommandKind::kEnd;
  std::vector<uint8_t> step;          // kStep: StepBatches::encode()
  std::vector<SampleRowParams> rows;  // kSample: the arguments of Executor::start_sample()
  std::vector<LogitEdit> edits;
  std::vector<uint32_t> allowed;
  std::vector<int32_t> ids;           // kSample: logprob_ids; kMask: of set_masked_ids()
  int64_t num_rows = 0, num_ids = 0;  // kTake: sizes of the arguments of take_sampled()
};

// The format is eight 64-bit words in host byte order, then the arrays. decode_command() accepts untrusted
// bytes: kDataLoss names a value that exceeds the limits, or an index outside its array; `step` is not
// decoded.
std::vector<uint8_t> encode_command(const GroupCommand& command);
Result<GroupCommand> decode_command(std::span<const uint8_t> bytes, const StepLimits& limits);

}  // namespace fp4moe
