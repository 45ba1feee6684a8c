// gpt_oss: grouped-query attention with sinks and alternating windows, then a top-k softmax MoE, per layer.
#pragma once

#include "model/model.h"

namespace fp4moe {

Result<std::unique_ptr<Model>> load_gpt_oss(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const ModelOptions& options, ThreadPool& pool,
                                            const ProgressSink& progress);

}  // namespace fp4moe
