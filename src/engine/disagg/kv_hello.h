// make_hello(): the facts that must match before one node can use another's KV pages and states.
#pragma once

#include "engine/disagg/kv_wire.h"
#include "engine/ranks/executor.h"
#include "io/checkpoint/checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {

// The facts are the protocol, the checkpoint's tensors (names, types, shapes, samples of their bytes) and the
// format of KV pages, of a draft model that takes features too, and of states. Runners, threads and ranks can
// differ. `draft`: the checkpoint of plan.draft; null: `checkpoint`. The weight version is that of the plan's
// flags.
KvHello make_hello(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                   const Executor& executor, const Checkpoint* draft);

// Replaces the facts that tell weights apart: those of `checkpoint`, which has the form of the old one, and
// their version (WeightSource::version). The fingerprint covers samples alone; the version, which the
// operator chooses, also differs if only a few weights do.
void set_weights(KvHello& hello, const Checkpoint& checkpoint, const std::string& version);
// kInvalidArgument unless the version has 1 to 64 printable ASCII characters.
Status check_weight_version(const std::string& version);

}  // namespace fp4moe
