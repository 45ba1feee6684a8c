// Decoder: the forward pass of every family. A layer is norm, attention, norm, feed-forward, both added to
// the residual; families differ in how they fill these in.
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
  // [H, attention->out_cols()]; of deterministic ranks [output_shard() of H, the group's columns]
  LinearLayer attention_out;
  Buffer ffn_norm;                // [H] f32
  std::unique_ptr<MoeLayer> moe;  // one of the two
  std::unique_ptr<DenseMlp> mlp;
};

// Reads one layer of a family.
using LayerLoader = Result<DecoderLayer> (*)(WeightLoader& loader, int64_t layer);

// A model of these layers between "model.embed_tokens" and "lm_head".
Result<std::unique_ptr<Model>> load_decoder(const Checkpoint& checkpoint, const ModelConfig& config,
                                            const ModelOptions& options, LayerLoader load_layer,
                                            ThreadPool& pool, const ProgressSink& progress);

// "model.layers.<layer>."
std::string layer_prefix(int64_t layer);
// The two norms, under the names that all families use.
Status load_norms(WeightLoader& loader, int64_t layer, DecoderLayer& out);
// "o_proj" [H, cols of the group]: this rank's columns, those of its heads' outputs; of deterministic ranks
// some of its rows. `cols`: of one rank.
Result<LinearLayer> load_attention_out(WeightLoader& loader, int64_t layer, int64_t cols, bool has_bias);

}  // namespace fp4moe
