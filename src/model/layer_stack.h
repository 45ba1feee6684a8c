// LayerStack: decoder layers, the norm after the last one and an LM head. A layer is norm, attention, norm,
// feed-forward; attention and feed-forward are added to the residual. Families differ in the kinds of
// attention and feed-forward.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "model/attention.h"
#include "model/column_gather.h"
#include "model/expert_mover.h"
#include "model/linear_layer.h"
#include "model/lm_head.h"
#include "model/model.h"
#include "moe/dense_mlp.h"
#include "moe/device/device_exchange.h"
#include "moe/moe_layer.h"
#include "moe/transport/transport.h"

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
using LayerLoader = std::function<Result<DecoderLayer>(WeightLoader& loader, int64_t layer)>;

// Large because the parts of a layer share the rows of a batch.
class LayerStack {
 public:
  // config.num_layers layers. `ops` must outlive the stack.
  LayerStack(const ModelConfig& config, const ModelOptions& options, const DenseOps& ops)
      : config_(config), options_(options), ops_(ops) {}

  // Appends the checkpoint's layers `layers`; with checks_only, drops each after loading it.
  Status load_layers(WeightLoader& loader, const LayerLoader& load_layer, Shard layers);
  // Allocates the buffers, after all layers are loaded; does nothing with checks_only. moe_plan: this rank's.
  // final_norm [H] f32; `lm_head` must outlive the stack.
  Status finish(const MoePlan& moe_plan, Buffer final_norm, const LmHead& lm_head);

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  int64_t weight_bytes() const { return weight_bytes_; }  // of the layers
  const ExpertCounters& expert_counters() const { return *counters_; }
  // The residual before the first layer, [max_batch_tokens, H] f32 in the ops' memory. The caller writes the
  // rows of a batch, then calls forward_layers(), which is Model::forward_model() without the embedding.
  float* input_rows() const { return act_.all.residual; }
  Status forward_layers(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool);
  Features features() const;
  // Model::rebalance_experts().
  Result<ExpertMoves> rebalance_experts();
  std::shared_ptr<const ExpertPlacements> placements() const;  // Model::placements()
  // After finish(): replaces the LM head, which has the old one's options.
  void set_lm_head(const LmHead& lm_head) { lm_head_ = &lm_head; }

 private:
  // A batch's rows between layers.
  struct Rows {
    float* residual;  // [T, H]
    void* attention;  // [T, attention cols] act
  };
  // Buffers of one forward pass, allocated at load: `all` for max_batch_tokens rows, `kept` for logit rows.
  struct Activations {
    Rows all, kept;
    float* normed_f32;      // [T, H]: the router's input
    void* normed;           // [T, H] act: GEMM input
    float* features;        // [T, features_width()]: after_layers in their order, then the final norm
    int32_t* last_experts;  // [T, K]: experts of the last layer's rows, if it runs for all of them
  };

  Status allocate_scratch();
  Status make_counters();
  Rows take_rows(int64_t num_rows, int64_t attention_cols);
  // Most logit rows of one group.
  int64_t max_kept_rows() const {
    return options_.max_logit_rows > 0 ? std::min(options_.max_logit_rows, options_.max_batch_tokens)
                                       : options_.max_batch_tokens;
  }
  int64_t layer_scratch_bytes(const DecoderLayer& layer) const;
  int64_t features_width() const;
  bool keeps_last_rows() const;  // whether the last layer's feed-forward runs for all rows
  int32_t* experts_of(const Batch& batch, int64_t layer) const;
  void keep_residual(int64_t layer, int64_t num_rows, ThreadPool& pool);
  void keep_last_experts(const Batch& batch, ThreadPool& pool);
  int64_t keep_last_features(const Batch& batch, ThreadPool& pool);
  Batch window_batch(const Batch& batch, DeviceBatch& device);
  void attention(const DecoderLayer& w, const AttentionInput& in, ThreadPool& pool);
  Status attention_output(int64_t layer, int64_t num_rows, ThreadPool& pool);
  Status gathered_attention_output(int64_t layer, const ActRows& heads, ThreadPool& pool);
  Status dense_mlp(int64_t layer, const ActRows& x, ThreadPool& pool);
  Status feed_forward(int64_t layer, int64_t num_rows, const DeviceBatch* device, int32_t* expert_ids,
                      ThreadPool& pool);
  Status summed_experts(MoeForwardArgs& args, ThreadPool& pool);
  void gather_rows(const CommOp& op, const DeviceCommunicator& group, float* rows, int64_t num_rows);
  void gather_shares(const CommOp& op, const DeviceCommunicator& group, float* rows,
                     std::span<const int64_t> first);
  bool shares_rows(int64_t num_rows) const;
  void complete_residual(int64_t layer, int64_t num_rows);
  // This rank's part of a sum.
  struct Partial {
    float* rows;  // [T, H]
    std::optional<PartialsToSend> send = {};
    PartialsToSend* sender() { return send ? &*send : nullptr; }
    bool is_sent() const { return send && send->are_sent; }
  };
  Partial take_partial(int64_t num_rows);
  void sum_and_norm(const CommOp& op, const RowPartials& partials, const RmsNormArgs& norm);
  Status add_partial(const OpName& op, const Partial& partial, int64_t num_rows, const RmsNormArgs* next,
                     ThreadPool& pool);
  void keep_logit_rows(const Batch& batch, bool has_attention, ThreadPool& pool);
  RmsNormArgs norm_args(const Buffer& weight, int64_t num_rows, float* out_f32) const;
  // The norm that follows the layer and that add_partial() may run. Nothing if the next projection norms its
  // rows itself in less time.
  std::optional<RmsNormArgs> norm_after(int64_t layer, int64_t num_rows) const;
  void norm(const Buffer& weight, int64_t num_rows, float* out_f32, ThreadPool& pool);

  // Whether the ranks of a group share its layers, each with a part of the weights.
  bool shares_layers() const {
    return options_.rank.attention != nullptr || options_.rank.device_group != nullptr;
  }
  // Whether this rank, on a GPU, counts the experts of the rows that it routes: of those that all ranks of
  // its group route, one counts them.
  bool counts_rows() const { return shares_rows_ || options_.rank.layout.attention_rank() == 0; }
  // Whether the ranks of a group gather their layers' inputs instead of adding partial sums of the outputs.
  bool gathers() const { return shares_layers() && options_.moe_plan.a2a_settings().deterministic; }
  ColumnGather column_gather(std::vector<Shard> parts, int64_t element_bytes) const;
  ColumnGather heads_gather(int64_t cols_of_rank) const;
  ColumnGather outputs_gather() const;
  ActRows act(void* data, int64_t rows, int64_t cols) const { return {data, options_.act_dtype, rows, cols}; }
  int64_t act_bytes() const { return dtype_bits(options_.act_dtype) / 8; }

  const ModelConfig config_;
  const ModelOptions options_;
  const DenseOps& ops_;
  Buffer final_norm_;  // [H] f32
  std::vector<DecoderLayer> layers_;
  const LmHead* lm_head_ = nullptr;
  int64_t weight_bytes_ = 0;
  std::unique_ptr<Transport> transport_;
  std::optional<DeviceExchange> exchange_;  // set on GPUs that exchange rows
  std::unique_ptr<ExpertCounters> counters_;
  std::optional<ExpertMover> mover_;  // set if the plan places experts
  Activations act_{};
  Rows rows_{};  // of the current forward pass: act_.all, or act_.kept once only the logit rows are needed
  int64_t num_feature_rows_ = 0;
  bool is_normed_ = false;                      // the last sum has run the next norm too
  bool shares_rows_ = false;                    // shares_rows() of the pass, until its last layer
  std::vector<SequenceRows> window_sequences_;  // of window_batch()
  Arena activations_, scratch_;
};

}  // namespace fp4moe
