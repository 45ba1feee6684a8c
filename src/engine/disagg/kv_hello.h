// make_hello(): the facts that must match before one node can use another's KV pages.
#pragma once

#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"
#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

// The facts are the protocol, the checkpoint's tensors (names, types, shapes, samples of their bytes) and the
// format of KV pages. Runners, threads and ranks can differ.
KvHello make_hello(const Checkpoint& checkpoint, const ModelConfig& config, DType kv_dtype,
                   const Executor& executor);

}  // namespace fp4moe
