// make_hello(): the facts that must match before one node can use another's KV pages and states.
#pragma once

#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"
#include "io/checkpoint/checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {

// The facts are the protocol, the checkpoint's tensors (names, types, shapes, samples of their bytes) and the
// format of KV pages, of a draft model that takes features too, and of states. Runners, threads and ranks can
// differ. `draft`: the checkpoint of plan.draft; null: `checkpoint`.
KvHello make_hello(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                   const Executor& executor, const Checkpoint* draft);

}  // namespace fp4moe
