// Attention of one layer: what a decoder layer calls, whatever kind a family has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"
#include "model/model.h"

namespace fp4moe {

class WeightLoader;

struct AttentionInput {
  const Batch& batch;        // T >= 1 rows
  RmsNormArgs norm;          // that makes the rows; norm.out_act: room for them [T, H]
  KvPages k_pages, v_pages;  // of the layer
  ActRows out;               // [T, out_cols()]: the heads' outputs, before the output projection
};

// The heads of one rank. Immutable.
class Attention {
 public:
  virtual ~Attention() = default;
  virtual int64_t out_cols() const = 0;
  virtual int64_t weight_bytes() const = 0;
  // What forward() takes from its arena for up to max_tokens rows.
  virtual int64_t scratch_bytes(int64_t max_tokens) const = 0;
  // Appends the rows' keys and values to the pages and attends. `out` must not be of the arena's free part.
  virtual void forward(const AttentionInput& in, Arena& scratch, ThreadPool& pool) const = 0;
};

// What an attention op takes from the scratch for up to max_tokens rows; args: its heads and pages' sizes.
inline int64_t attention_workspace(const DenseOps& ops, const AttentionArgs& args, int64_t max_tokens) {
  return ops.attention_workspace_bytes == nullptr
             ? 0
             : Arena::padded(ops.attention_workspace_bytes(args, max_tokens));
}

// Grouped-query attention with what `config` asks for: biases, QK norms, rotary embedding, the layer's
// window.
struct GqaOptions {
  int64_t layer = 0;
  bool sinks = false;  // "<prefix>sinks" [num_heads]
};
// prefix: "model.layers.0.self_attn."
Result<std::unique_ptr<Attention>> load_gqa(WeightLoader& loader, const std::string& prefix,
                                            const GqaOptions& options);

// Multi-head latent attention: one latent and one rotary key per token in the pages, up-projections absorbed.
Result<std::unique_ptr<Attention>> load_mla(WeightLoader& loader, const std::string& prefix);

}  // namespace fp4moe
