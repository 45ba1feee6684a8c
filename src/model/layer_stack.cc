#include "model/layer_stack.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/weight_store.h"
#include "device/stream.h"
#include "kernels/device_moe.h"
#include "model/decoder.h"
#include "model/weight_loader.h"

namespace fp4moe {
namespace {

constexpr int32_t kNotRouted = -1;

}  // namespace

// ---- loading --------------------------------------------------------------------------------------

Status LayerStack::load_layers(WeightLoader& loader, const LayerLoader& load_layer, Shard layers) {
  for (int64_t i = layers.first; i < layers.first + layers.count; ++i) {
    enter_weights_part("layer " + std::to_string(i));
    FP4MOE_ASSIGN_OR_RETURN(DecoderLayer layer, load_layer(loader, i));
    const int64_t ffn_bytes = layer.moe ? layer.moe->weight_bytes() : layer.mlp->weight_bytes();
    loader.count(ffn_bytes);
    weight_bytes_ += layer.attention->weight_bytes() + layer.attention_out.weight_bytes() + ffn_bytes;
    if (!options_.checks_only) layers_.push_back(std::move(layer));
    loader.checkpoint().release_all(layer_prefix(i));
  }
  return {};
}

Status LayerStack::finish(const MoePlan& moe_plan, Buffer final_norm, const LmHead& lm_head) {
  if (options_.checks_only) return {};
  FP4MOE_CHECK(std::ssize(layers_) == config_.num_layers, "all layers must have been loaded");
  final_norm_ = std::move(final_norm);
  lm_head_ = &lm_head;
  FP4MOE_ASSIGN_OR_RETURN(transport_,
                          make_transport(moe_plan, {.world = options_.rank.world,
                                                    .attention = options_.rank.attention,
                                                    .region_offset = options_.rank.a2a_region_offset,
                                                    .max_group_rows = options_.max_batch_tokens}));
  if (const DeviceCommunicator* world = options_.rank.device_world; world != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(const DeviceExchangeSize size,
                            device_exchange_size(moe_plan, options_.max_batch_tokens));
    exchange_.emplace(size, *world);
  }
  FP4MOE_RETURN_IF_ERROR(make_counters());
  return allocate_scratch();
}

Status LayerStack::make_counters() {
  std::vector<int64_t> layers;
  for (size_t i = 0; i < layers_.size(); ++i)
    if (layers_[i].moe) layers.push_back(static_cast<int64_t>(i));
  FP4MOE_ASSIGN_OR_RETURN(counters_,
                          ExpertCounters::make(std::move(layers), config_.num_experts, ops_.memory()));
  if (options_.moe_plan.places_experts())
    mover_.emplace(options_.rank.movers, *counters_, options_.rank.move_area);
  return {};
}

Result<ExpertMoves> LayerStack::rebalance_experts() {
  if (!mover_) return unsupported("the model's experts are not placed by load");
  std::vector<PlacedExperts*> placed;
  for (const DecoderLayer& layer : layers_)
    if (layer.moe) placed.push_back(layer.moe->placed_experts());
  return mover_->rebalance(placed);
}

std::shared_ptr<const ExpertPlacements> LayerStack::placements() const {
  if (!mover_) return nullptr;
  auto placements = std::make_shared<ExpertPlacements>(*options_.placements);
  for (size_t i = 0; i < layers_.size(); ++i)
    if (layers_[i].moe) (*placements)[i] = layers_[i].moe->placed_experts()->placement();
  return placements;
}

int64_t LayerStack::layer_scratch_bytes(const DecoderLayer& layer) const {
  const int64_t t = options_.max_batch_tokens, partial = Arena::padded(t * config_.hidden_size * 4);
  int64_t out = partial;
  if (gathers()) {
    const ColumnGather heads = heads_gather(layer.attention->out_cols()), outputs = outputs_gather();
    out = Arena::padded(t * heads.row_bytes()) + Arena::padded(t * outputs.mine().count * 4) +
          std::max(heads.scratch_bytes(t), outputs.scratch_bytes(t));
  }
  const int64_t ffn =
      layer.moe ? layer.moe->scratch_bytes(t, *transport_) + (options_.rank.device_group ? partial : 0)
                : partial + layer.mlp->scratch_bytes(t);
  return std::max({layer.attention->scratch_bytes(t), out + layer.attention_out.scratch_bytes(t), ffn});
}

Status LayerStack::allocate_scratch() {
  const int64_t t = options_.max_batch_tokens, h = config_.hidden_size, kept = max_kept_rows();
  int64_t attention_cols = 0, scratch = lm_head_->scratch_bytes();
  for (const DecoderLayer& layer : layers_) {
    attention_cols = std::max(attention_cols, layer.attention->out_cols());
    scratch = std::max(scratch, layer_scratch_bytes(layer));
  }
  const DeviceCommunicator* const group = options_.rank.device_group;
  const bool in_heap = group != nullptr && group->normed_bytes() >= t * h * act_bytes();
  const int64_t total = 2 * Arena::padded(t * h * 4) + (in_heap ? 0 : Arena::padded(t * h * act_bytes())) +
                        Arena::padded(t * attention_cols * act_bytes()) + Arena::padded(kept * h * 4) +
                        Arena::padded(kept * attention_cols * act_bytes());
  const int64_t features = Arena::padded(t * features_width() * 4),
                experts = keeps_last_rows() ? Arena::padded(t * config_.top_k * 4) : 0;
  FP4MOE_ASSIGN_OR_RETURN(activations_, Arena::make(total + features + experts, ops_.memory()));
  act_.all = take_rows(t, attention_cols);
  act_.kept = take_rows(kept, attention_cols);
  act_.normed_f32 = activations_.take<float>(t * h);
  act_.normed = in_heap ? group->normed_rows() : activations_.take<uint8_t>(t * h * act_bytes());
  if (!options_.features.is_empty()) act_.features = activations_.take<float>(t * features_width());
  if (keeps_last_rows()) act_.last_experts = activations_.take<int32_t>(t * config_.top_k);
  FP4MOE_ASSIGN_OR_RETURN(scratch_, Arena::make(scratch, ops_.memory()));
  return {};
}

int64_t LayerStack::features_width() const {
  const FeatureOptions& f = options_.features;
  return (std::ssize(f.after_layers) + f.is_final_norm) * config_.hidden_size;
}

bool LayerStack::keeps_last_rows() const {
  const FeatureOptions& f = options_.features;
  return f.is_final_norm || std::ranges::find(f.after_layers, config_.num_layers - 1) != f.after_layers.end();
}

Features LayerStack::features() const {
  if (options_.features.is_empty()) return {};
  return {act_.features, DType::kF32, num_feature_rows_, features_width()};
}

// ---- forward --------------------------------------------------------------------------------------

LayerStack::Rows LayerStack::take_rows(int64_t num_rows, int64_t attention_cols) {
  float* residual = activations_.take<float>(num_rows * config_.hidden_size);
  return {residual, activations_.take<uint8_t>(num_rows * attention_cols * act_bytes())};
}

// A group without rows skips its own work but takes part in the collective operations of all ranks.
Status LayerStack::forward_layers(const Batch& batch, KvCache& kv, float* logits, ThreadPool& pool) {
  const int64_t t = batch.num_rows();
  rows_ = act_.all;
  is_normed_ = false;
  shares_rows_ = shares_rows(t);
  num_feature_rows_ = t;
  if (!batch.state_copies.empty()) kv.state_cache().copy_slots(batch.state_copies);
  DeviceBatch device;
  const Batch window = window_batch(batch, device);
  int64_t num_rows = t;
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const DecoderLayer& w = layers_[static_cast<size_t>(i)];
    const bool is_last = i + 1 == config_.num_layers;
    if (batch.device != nullptr) current_stream().begin_layer(static_cast<int>(i));
    if (t > 0)
      attention(
          w,
          {kv.layers_of(i) == KvLayers::kWindow ? window : batch, norm_args(w.attention_norm, t, nullptr),
           kv.k_pages(i), kv.v_pages(i), kv.states(i), act(rows_.attention, t, w.attention->out_cols())},
          pool);
    if (is_last && keeps_last_rows()) {
      complete_residual(i, t);
    } else if (is_last) {  // the remaining work needs only the logit rows
      keep_logit_rows(batch, /*has_attention=*/true, pool);
      num_rows = batch.num_logit_rows();
    }
    shares_rows_ = shares_rows_ && !is_last;
    if (num_rows > 0) FP4MOE_RETURN_IF_ERROR(attention_output(i, num_rows, pool));
    FP4MOE_RETURN_IF_ERROR(feed_forward(i, num_rows, batch.device, experts_of(batch, i), pool));
    keep_residual(i, num_rows, pool);
  }
  if (keeps_last_rows()) num_rows = keep_last_features(batch, pool);
  scratch_.reset();
  HeadSharers sharers{.ranks = options_.rank.device_head};
  if (batch.device != nullptr) sharers.group_rows = batch.device->largest_logit_rows;
  return lm_head_->forward_lm_head(norm_args(final_norm_, num_rows, nullptr), sharers, logits, scratch_,
                                   pool);
}

// Where the layer writes its rows' experts; null: nowhere. On a CPU, ranks of a group write to one place,
// each the rows that it routes; the other rows of act_.last_experts stay kNotRouted.
int32_t* LayerStack::experts_of(const Batch& batch, int64_t layer) const {
  if (batch.routed_experts == nullptr) return nullptr;
  if (layer + 1 == config_.num_layers && keeps_last_rows()) {
    if (batch.device == nullptr) std::fill_n(act_.last_experts, batch.num_rows() * config_.top_k, kNotRouted);
    return act_.last_experts;
  }
  return batch.routed_experts + layer * batch.num_rows() * config_.top_k;
}

// Copies the residual after `layer` to the features that want it.
void LayerStack::keep_residual(int64_t layer, int64_t num_rows, ThreadPool& pool) {
  const std::vector<int64_t>& layers = options_.features.after_layers;
  const int64_t h = config_.hidden_size;
  if (std::ranges::find(layers, layer) != layers.end()) complete_residual(layer, num_rows);
  for (size_t i = 0; i < layers.size() && num_rows > 0; ++i)
    if (layers[i] == layer)
      ops_.copy_heads({.x = rows_.residual,
                       .x_stride = h,
                       .out = act_.features + static_cast<int64_t>(i) * h,
                       .out_stride = features_width(),
                       .num_tokens = num_rows,
                       .n = h,
                       .num_heads = 1},
                      pool);
}

// Copies the last layer's experts of the logit rows to the batch.
void LayerStack::keep_last_experts(const Batch& batch, ThreadPool& pool) {
  const int64_t n = batch.num_logit_rows(), k = config_.top_k;
  int32_t* const out = batch.routed_experts + (config_.num_layers - 1) * batch.num_rows() * k;
  if (batch.device != nullptr) {
    if (n > 0)
      ops_.gather_rows({act_.last_experts, out, batch.op_logit_rows(), n, k * int64_t{sizeof(int32_t)}},
                       pool);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int32_t* const ids = act_.last_experts + batch.logit_rows[static_cast<size_t>(i)] * k;
    if (ids[0] != kNotRouted) std::copy_n(ids, k, out + i * k);
  }
}

// After a last layer that ran for all rows: keeps their final norm if it is a feature, and reduces the rows
// and their experts to the logit rows, whose number is returned.
int64_t LayerStack::keep_last_features(const Batch& batch, ThreadPool& pool) {
  const int64_t t = batch.num_rows(), h = config_.hidden_size, n = batch.num_logit_rows();
  if (options_.features.is_final_norm && t > 0) {
    float* normed = act_.normed_f32;
    norm(final_norm_, t, normed, pool);
    ops_.copy_heads({.x = normed,
                     .x_stride = h,
                     .out = act_.features + features_width() - h,
                     .out_stride = features_width(),
                     .num_tokens = t,
                     .n = h,
                     .num_heads = 1},
                    pool);
  }
  if (batch.routed_experts != nullptr && layers_.back().moe) keep_last_experts(batch, pool);
  keep_logit_rows(batch, /*has_attention=*/false, pool);
  return n;
}

// Returns the batch for window layers: with their page tables. `device` is what its `device` points to.
Batch LayerStack::window_batch(const Batch& batch, DeviceBatch& device) {
  Batch window = batch;
  window_sequences_.assign(batch.sequences.begin(), batch.sequences.end());
  for (SequenceRows& sequence : window_sequences_) sequence.page_table = sequence.window_page_table;
  window.sequences = window_sequences_;
  if (batch.device == nullptr) return window;
  device = *batch.device;
  device.page_table = device.window_page_table;
  window.device = &device;
  return window;
}

// Returns the arguments that norm the residual into act_.normed and, unless it is null, out_f32.
RmsNormArgs LayerStack::norm_args(const Buffer& weight, int64_t num_rows, float* out_f32) const {
  return {rows_.residual,
          weight.as<float>(),
          static_cast<float>(config_.rms_norm_eps),
          act(act_.normed, num_rows, config_.hidden_size),
          out_f32,
          is_normed_};
}

std::optional<RmsNormArgs> LayerStack::norm_after(int64_t layer, int64_t num_rows) const {
  if (num_rows <= ops_.most_rows_normed_inside) return {};
  if (layer + 1 < config_.num_layers)
    return norm_args(layers_[static_cast<size_t>(layer + 1)].attention_norm, num_rows, nullptr);
  if (keeps_last_rows()) return {};
  return norm_args(final_norm_, num_rows, nullptr);
}

void LayerStack::norm(const Buffer& weight, int64_t num_rows, float* out_f32, ThreadPool& pool) {
  run_norm(ops_, norm_args(weight, num_rows, out_f32), pool);
}

void LayerStack::attention(const DecoderLayer& w, const AttentionInput& in, ThreadPool& pool) {
  scratch_.reset();
  w.attention->forward_attention(in, scratch_, pool);
}

Status LayerStack::attention_output(int64_t layer, int64_t num_rows, ThreadPool& pool) {
  const DecoderLayer& w = layers_[static_cast<size_t>(layer)];
  const ActRows heads = act(rows_.attention, num_rows, w.attention->out_cols());
  scratch_.reset();
  if (!shares_layers()) {
    w.attention_out.forward_linear(heads, rows_.residual, /*accumulate=*/true, scratch_, pool);
    return {};
  }
  if (gathers()) return gathered_attention_output(layer, heads, pool);
  Partial partial = take_partial(num_rows);
  w.attention_out.forward_linear(heads, partial.rows, /*accumulate=*/false, scratch_, pool, partial.sender());
  const OpName op = {"attention_out", static_cast<int>(layer), 0};
  if (w.moe && !shares_rows_ && w.moe->norms_with_router(num_rows))
    return add_partial(op, partial, num_rows, nullptr, pool);
  const RmsNormArgs next = norm_args(w.ffn_norm, num_rows, w.moe ? act_.normed_f32 : nullptr);
  return add_partial(op, partial, num_rows, &next, pool);
}

Status LayerStack::feed_forward(int64_t layer, int64_t num_rows, const DeviceBatch* device,
                                int32_t* expert_ids, ThreadPool& pool) {
  const DecoderLayer& w = layers_[static_cast<size_t>(layer)];
  const ActRows x = act(act_.normed, num_rows, config_.hidden_size);
  scratch_.reset();
  if (w.moe) {
    const RmsNormArgs norm = norm_args(w.ffn_norm, num_rows, act_.normed_f32);
    MoeForwardArgs args{static_cast<int>(layer),
                        x,
                        act_.normed_f32,
                        rows_.residual,
                        is_normed_ ? nullptr : &norm,
                        device == nullptr || counts_rows() ? counters_.get() : nullptr,
                        device != nullptr ? device->num_filled_rows() : nullptr,
                        expert_ids};
    if (layer + 1 < std::ssize(layers_))
      args.next = layers_[static_cast<size_t>(layer + 1)].attention->first_weights();
    if (exchange_) {
      args.exchange = &*exchange_;
      args.largest_group_rows = layer + 1 < config_.num_layers || keeps_last_rows()
                                    ? device->largest_rows
                                    : device->largest_logit_rows;
    }
    const DeviceCommunicator* group = options_.rank.device_group;
    if (group == nullptr) return w.moe->forward_moe(args, *transport_, scratch_, pool);
    if (gathers()) {  // each rank completes some rows
      FP4MOE_RETURN_IF_ERROR(w.moe->forward_moe(args, *transport_, scratch_, pool));
      gather_rows({"experts", args.layer}, *group, rows_.residual, num_rows);
      return {};
    }
    return summed_experts(args, pool);
  }
  if (num_rows == 0) return {};
  norm(w.ffn_norm, num_rows, nullptr, pool);
  return dense_mlp(layer, x, pool);
}

Status LayerStack::dense_mlp(int64_t layer, const ActRows& x, ThreadPool& pool) {
  const DenseMlp& mlp = *layers_[static_cast<size_t>(layer)].mlp;
  const int64_t h = config_.hidden_size;
  const OpName op = {"mlp", static_cast<int>(layer), 0};
  float* out = scratch_.take<float>(x.rows * h);
  if (!gathers()) {
    mlp.forward_mlp(x, out, scratch_, pool);
    const std::optional<RmsNormArgs> next = norm_after(layer, x.rows);
    return add_partial(op, {out}, x.rows, next ? &*next : nullptr, pool);
  }
  // Each rank has the whole MLP and runs it for some of the rows.
  const RankLayout& layout = options_.rank.layout;
  const Shard own = shard_blocks(x.rows, 1, layout.attention_tp(), layout.attention_rank());
  if (own.count > 0)
    mlp.forward_mlp(act(static_cast<uint8_t*>(x.data) + own.first * h * act_bytes(), own.count, h),
                    out + own.first * h, scratch_, pool);
  if (const DeviceCommunicator* group = options_.rank.device_group; group != nullptr) {
    gather_rows({op.op, op.layer}, *group, out, x.rows);
    ops_.add({out, rows_.residual, x.rows * h}, pool);
    return {};
  }
  std::vector<int64_t> counts;
  for (int r = 0; r < layout.attention_tp(); ++r)
    counts.push_back(shard_blocks(x.rows, 1, layout.attention_tp(), r).count * h * int64_t{sizeof(float)});
  const int64_t sizes[] = {x.rows, h};
  FP4MOE_RETURN_IF_ERROR(options_.rank.attention->all_gather({op.op, op.layer, geometry_hash(sizes)},
                                                             out + own.first * h, counts, out));
  ops_.add({out, rows_.residual, x.rows * h}, pool);
  return {};
}

// Reduces the current rows to the logit rows; their attention only if it is still needed.
void LayerStack::keep_logit_rows(const Batch& batch, bool has_attention, ThreadPool& pool) {
  const int64_t n = batch.num_logit_rows();
  const int last = static_cast<int>(config_.num_layers) - 1;
  if (n == batch.num_rows()) return complete_residual(last, n);  // all rows are logit rows
  FP4MOE_CHECK(n <= max_kept_rows(),
               std::to_string(n) + " logit rows; the limit is " + std::to_string(max_kept_rows()));
  const int64_t residual_bytes = config_.hidden_size * static_cast<int64_t>(sizeof(float));
  const int64_t attention_bytes = layers_.back().attention->out_cols() * act_bytes();
  const GatherRowsArgs residual = {rows_.residual, act_.kept.residual, batch.op_logit_rows(), n,
                                   residual_bytes};
  if (shares_rows_)
    options_.rank.device_group->gather_shares({"residual", last}, residual,
                                              options_.rank.device_group->row_shares(batch.num_rows()));
  else
    ops_.gather_rows(residual, pool);
  if (has_attention)
    ops_.gather_rows({rows_.attention, act_.kept.attention, batch.op_logit_rows(), n, attention_bytes}, pool);
  rows_ = act_.kept;
}

}  // namespace fp4moe
