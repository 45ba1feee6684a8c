// Decoder: the forward pass of every family, and what their layers' loaders share.
#pragma once

#include <memory>
#include <string>

#include "model/layer_stack.h"
#include "model/linear_layer.h"
#include "model/lm_head.h"
#include "model/model.h"

namespace fp4moe {

class WeightLoader;

// Loads a model with these layers between "model.embed_tokens" and "lm_head".
Result<std::unique_ptr<Model>> load_decoder(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const ModelOptions& options, LayerLoader load_layer,
                                            ThreadPool& pool, const ProgressSink& progress);

// Returns the options of an LM head with the config's sizes.
LmHeadOptions lm_head_options(const ModelConfig& config, const ModelOptions& options);
// Returns "model.layers.<layer>."
std::string layer_prefix(int64_t layer);
// Loads the two norms, whose names are the same in all families.
Status load_norms(WeightLoader& loader, int64_t layer, DecoderLayer& out);
// Loads this rank's part of the output projection `name` [H, columns of the group]: the columns of its heads
// or, if deterministic, some of the rows. `cols` is the number of columns per rank.
Result<LinearLayer> load_attention_out(WeightLoader& loader, const std::string& name, int64_t cols,
                                       bool has_bias);

}  // namespace fp4moe
