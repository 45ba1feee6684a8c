// Decoder: the forward pass of every family. A layer is norm, attention, norm, feed-forward; attention and
// feed-forward are added to the residual. Families differ in the kinds of attention and feed-forward.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "model/attention.h"
#include "model/linear_layer.h"
#include "model/model.h"
#include "moe/dense_mlp.h"
#include "moe/moe_layer.h"

namespace fp4moe {

class WeightLoader;

struct DecoderLayer {
  Buffer attention_norm;  // [H] f32
  std::unique_ptr<Attention> attention;
  // [H, attention->out_cols()]; if deterministic, [output_shard() of H, columns of the whole group]
  LinearLayer attention_out;
  Buffer ffn_norm;                // [H] f32
  std::unique_ptr<MoeLayer> moe;  // exactly one of moe and mlp is set
  std::unique_ptr<DenseMlp> mlp;
};

// Loads one layer of a family.
using LayerLoader = Result<DecoderLayer> (*)(WeightLoader& loader, int64_t layer);

// Loads a model with these layers between "model.embed_tokens" and "lm_head".
Result<std::unique_ptr<Model>> load_decoder(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const ModelOptions& options, LayerLoader load_layer,
                                            ThreadPool& pool, const ProgressSink& progress);

// Returns "model.layers.<layer>."
std::string layer_prefix(int64_t layer);
// Loads the two norms, whose names are the same in all families.
Status load_norms(WeightLoader& loader, int64_t layer, DecoderLayer& out);
// Loads this rank's part of "o_proj" [H, columns of the group]: the columns of its heads or, if
// deterministic, some of the rows. `cols` is the number of columns per rank.
Result<LinearLayer> load_attention_out(WeightLoader& loader, int64_t layer, int64_t cols);

}  // namespace fp4moe
