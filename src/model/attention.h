// Attention of one layer: the interface that the decoder calls, and its implementations.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "kernels/ops.h"
#include "kernels/weight_bytes.h"
#include "model/model.h"

namespace fp4moe {

class WeightLoader;

struct AttentionInput {
  const Batch& batch;        // T >= 1 rows
  RmsNormArgs norm;          // forward_attention() runs it to compute its input rows in norm.out_act [T, H]
  KvPages k_pages, v_pages;  // the layer's pages; null data: it has `state` instead
  StateSlots state;          // the layer's slots; null data: it has pages instead
  ActRows out;               // [T, out_cols()]: the heads' outputs, before the output projection
};

// One rank's attention heads. Immutable.
class Attention {
 public:
  virtual ~Attention() = default;
  virtual int64_t out_cols() const = 0;
  virtual int64_t weight_bytes() const = 0;
  // The weights that forward_attention() reads first, for prefetches.
  virtual WeightBytes first_weights() const { return {}; }
  // Maximum bytes that forward_attention() takes from its arena for up to max_tokens rows.
  virtual int64_t scratch_bytes(int64_t max_tokens) const = 0;
  // Appends the rows' keys and values to the pages and attends. `out` must not be in the arena's free part.
  virtual void forward_attention(const AttentionInput& in, Arena& scratch, ThreadPool& pool) const = 0;
};

// Scratch bytes of an attention op for up to max_tokens rows. Only the head and page sizes in args are used.
inline int64_t attention_workspace(const DenseOps& ops, const AttentionArgs& args, int64_t max_tokens) {
  return ops.attention_workspace_bytes == nullptr
             ? 0
             : Arena::padded(ops.attention_workspace_bytes(args, max_tokens));
}

// Grouped-query attention with the config's biases, QK norms, rotary embedding (of the first rotary_dim dims
// of a head), window and output gate.
struct GqaOptions {
  int64_t layer = 0;
  bool sinks = false;      // "<prefix>sinks" [num_heads]
  int64_t input_cols = 0;  // of the rows that q, k and v project; 0: hidden_size
};
// prefix: for example "model.layers.0.self_attn."
Result<std::unique_ptr<Attention>> load_gqa(WeightLoader& loader, const std::string& prefix,
                                            const GqaOptions& options);

// Multi-head latent attention. The pages have one latent and one rotary key per token; the up-projections are
// absorbed.
Result<std::unique_ptr<Attention>> load_mla(WeightLoader& loader, const std::string& prefix);

// A gated delta net of a layer with a state (kernels/gated_delta.h), with the config's DeltaConfig.
// prefix: for example "model.layers.0.linear_attn."
Result<std::unique_ptr<Attention>> load_gated_delta(WeightLoader& loader, const std::string& prefix);

}  // namespace fp4moe
