// What two nodes must have in common for one to use the other's KV pages.
#pragma once

#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"
#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

// Facts: the protocol, the checkpoint's tensors (names, types, shapes, samples of their bytes), and the
// format of KV pages. Runners, threads and ranks may differ.
KvHello make_hello(const Checkpoint& checkpoint, const ModelConfig& config, DType kv_dtype,
                   const Executor& executor);

}  // namespace fp4moe
