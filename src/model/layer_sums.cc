// LayerStack's sums over the ranks of a group: each rank computes a part of a layer's output, and the sum is
// added to the residual.
#include <algorithm>
#include <utility>

#include "kernels/device_moe.h"
#include "model/layer_stack.h"

namespace fp4moe {

// residual += partial [num_rows, H] summed over the group; bit-identical on all its ranks. Unless it is null,
// `next` is a norm of the residual, which has run if is_normed_.
Status LayerStack::add_partial(const OpName& op, float* partial, int64_t num_rows, const RmsNormArgs* next,
                               ThreadPool& pool) {
  const int64_t h = config_.hidden_size;
  is_normed_ = false;
  if (const DeviceCommunicator* group = options_.rank.device_group; group != nullptr) {
    if (next == nullptr || !group->fuses_norm(num_rows, h)) {
      group->add_all_reduced({op.op, op.layer}, partial, rows_.residual, num_rows * h);
      return {};
    }
    group->add_all_reduced_norm({op.op, op.layer}, partial, rows_.residual, *next);
    is_normed_ = true;
    return {};
  }
  if (options_.rank.attention != nullptr) {
    const int64_t sizes[] = {num_rows, h};
    FP4MOE_RETURN_IF_ERROR(
        options_.rank.attention->all_reduce({op.op, op.layer, geometry_hash(sizes)}, partial, num_rows * h));
  }
  ops_.add({partial, rows_.residual, num_rows * h}, pool);
  return {};
}

// The sum over the ranks of a group, which precedes the next norm.
Status LayerStack::summed_experts(MoeForwardArgs& args, ThreadPool& pool) {
  const MoeLayer& moe = *layers_[static_cast<size_t>(args.layer)].moe;
  const int64_t num_rows = args.x.rows;
  const OpName op = {"experts", args.layer, 0};
  if (sends_experts(args.layer, num_rows)) {
    const SumsToSend send = options_.rank.device_group->sums_to_send();
    args.send = &send;
    FP4MOE_RETURN_IF_ERROR(moe.forward_moe(args, *transport_, scratch_, pool));
    end_take();
    begin_take(send, op);
    return {};
  }
  const DeviceCommunicator& group = *options_.rank.device_group;
  MoeCombineArgs rows;
  if (combines_in_sums_ && !exchange_ && group.fuses_norm(num_rows, config_.hidden_size) &&
      moe.leaves_rows(num_rows) && norm_after(args.layer, num_rows))
    args.uncombined = &rows;
  else
    args.partial = scratch_.take<float>(num_rows * config_.hidden_size);
  FP4MOE_RETURN_IF_ERROR(moe.forward_moe(args, *transport_, scratch_, pool));
  end_take();
  const std::optional<RmsNormArgs> next = norm_after(args.layer, num_rows);
  if (args.uncombined == nullptr)
    return add_partial(op, args.partial, num_rows, next ? &*next : nullptr, pool);
  group.add_all_reduced_norm({op.op, op.layer}, rows, rows_.residual, *next);
  is_normed_ = true;
  return {};
}

bool LayerStack::sends_sums(int64_t num_rows) const {
  const DeviceCommunicator* group = options_.rank.device_group;
  return group != nullptr && !gathers() && group->sends_sums(num_rows, config_.hidden_size);
}

bool LayerStack::sends_attention_output(int64_t layer, int64_t num_rows) const {
  const DecoderLayer& w = layers_[static_cast<size_t>(layer)];
  return w.moe && sends_sums(num_rows) && w.moe->norms_with_router(num_rows) &&
         w.attention_out.sends_sums(num_rows);
}

bool LayerStack::sends_experts(int64_t layer, int64_t num_rows) const {
  const std::vector<int64_t>& kept = options_.features.after_layers;
  const auto i = static_cast<size_t>(layer);
  return layer + 1 < config_.num_layers && !exchange_ && sends_sums(num_rows) &&
         std::ranges::find(kept, layer) == kept.end() && layers_[i].moe->sends_sums(num_rows) &&
         layers_[i + 1].attention->takes_sums(num_rows);
}

void LayerStack::begin_take(const SumsToSend& sent, const OpName& op) {
  is_normed_ = false;
  taken_ = options_.rank.device_group->sums_to_take(sent, {op.op, op.layer}, spare_residual_);
}

void LayerStack::end_take() {
  if (!taken_) return;
  taken_.reset();
  std::swap(rows_.residual, spare_residual_);
}

}  // namespace fp4moe
