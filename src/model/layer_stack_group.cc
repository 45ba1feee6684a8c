// What the ranks of a group do together in a LayerStack: they add their partial sums of a layer's outputs, or
// gather its inputs.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "kernels/device_moe.h"
#include "model/layer_stack.h"

namespace fp4moe {

// Gives the same bits as a single rank: the group's heads are gathered, each rank computes some output
// columns and adds them to those of the residual, and the columns are gathered.
Status LayerStack::gathered_attention_output(int64_t layer, const ActRows& heads, ThreadPool& pool) {
  const ColumnGather heads_of_group = heads_gather(heads.cols), outputs = outputs_gather();
  const int index = static_cast<int>(layer);
  const int64_t rows = heads.rows, h = config_.hidden_size;
  const Shard mine = outputs.mine();
  const ActRows all = act(scratch_.take<uint8_t>(rows * heads_of_group.row_bytes()), rows,
                          heads.cols * options_.rank.layout.attention_tp());
  FP4MOE_RETURN_IF_ERROR(
      heads_of_group.run({"attention_heads", index}, {rows, heads.data, all.data}, scratch_, pool));
  float* columns = scratch_.take<float>(rows * mine.count);
  ops_.copy_heads({.x = rows_.residual + mine.first,
                   .x_stride = h,
                   .out = columns,
                   .out_stride = mine.count,
                   .num_tokens = rows,
                   .n = mine.count,
                   .num_heads = 1},
                  pool);
  if (mine.count > 0)
    layers_[static_cast<size_t>(layer)].attention_out.forward_linear(all, columns, /*accumulate=*/true,
                                                                     scratch_, pool);
  return outputs.run({"attention_out", index}, {rows, columns, rows_.residual}, scratch_, pool);
}

ColumnGather LayerStack::column_gather(std::vector<Shard> parts, int64_t element_bytes) const {
  if (const DeviceCommunicator* group = options_.rank.device_group; group != nullptr)
    return {*group, std::move(parts), element_bytes};
  return {*options_.rank.attention, std::move(parts), element_bytes};
}

ColumnGather LayerStack::heads_gather(int64_t cols_of_rank) const {
  const int ranks = options_.rank.layout.attention_tp();
  std::vector<Shard> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back({r * cols_of_rank, cols_of_rank});
  return column_gather(std::move(parts), act_bytes());
}

ColumnGather LayerStack::outputs_gather() const {
  const int ranks = options_.rank.layout.attention_tp();
  std::vector<Shard> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back(output_shard(config_.hidden_size, ranks, r));
  return column_gather(std::move(parts), int64_t{sizeof(float)});
}

// Gathers rows [num_rows, H]; each rank of the group has its shard_blocks() of them.
void LayerStack::gather_rows(const CommOp& op, const DeviceCommunicator& group, float* rows,
                             int64_t num_rows) {
  std::vector<int64_t> first;
  for (int r = 0; r < group.size(); ++r) first.push_back(shard_blocks(num_rows, 1, group.size(), r).first);
  first.push_back(num_rows);
  gather_shares(op, group, rows, first);
}

// Gathers rows [T, H]; rank r of the group has the rows [first[r], first[r + 1]).
void LayerStack::gather_shares(const CommOp& op, const DeviceCommunicator& group, float* rows,
                               std::span<const int64_t> first) {
  const int64_t h = config_.hidden_size;
  group.gather_rows(op, rows + first[static_cast<size_t>(group.rank())] * h, h * int64_t{sizeof(float)},
                    first, rows);
}

// Whether each rank of the group keeps the residual of its share of these rows only, and routes only these.
bool LayerStack::shares_rows(int64_t num_rows) const {
  const DeviceCommunicator* const group = options_.rank.device_group;
  return group != nullptr && !gathers() && !exchange_ && act_.normed == group->normed_rows() &&
         group->shares_norm(num_rows, config_.hidden_size) &&
         std::ranges::all_of(layers_, [](const DecoderLayer& w) { return !w.moe || w.moe->routes_shares(); });
}

// Completes the residual on all ranks if each has only its share.
void LayerStack::complete_residual(int64_t layer, int64_t num_rows) {
  if (!shares_rows_) return;
  const DeviceCommunicator& group = *options_.rank.device_group;
  gather_shares({"residual", static_cast<int>(layer)}, group, rows_.residual, group.row_shares(num_rows));
}

// residual += the experts' output, summed over the group. If the kernel of the sum also runs the next norm,
// it combines the experts' rows too.
Status LayerStack::summed_experts(MoeForwardArgs& args, ThreadPool& pool) {
  const MoeLayer& moe = *layers_[static_cast<size_t>(args.layer)].moe;
  const int64_t num_rows = args.x.rows;
  const DeviceCommunicator& group = *options_.rank.device_group;
  is_normed_ = false;
  const std::optional<RmsNormArgs> next = norm_after(args.layer, num_rows);
  MoeCombineArgs rows;
  Partial partial{};
  const bool fuses_norm = shares_rows_ || group.fuses_norm(num_rows, config_.hidden_size);
  if (next && !exchange_ && fuses_norm && moe.leaves_rows(num_rows)) {
    args.uncombined = &rows;
  } else {
    partial = take_partial(num_rows);
    args.partial = partial.rows;
    args.send = exchange_ ? nullptr : partial.sender();
  }
  if (shares_rows_) args.router_group = &group;
  FP4MOE_RETURN_IF_ERROR(moe.forward_moe(args, *transport_, scratch_, pool));
  if (args.uncombined == nullptr)
    return add_partial({"experts", args.layer, 0}, partial, num_rows, next ? &*next : nullptr, pool);
  sum_and_norm({"experts", args.layer}, rows, *next);
  return {};
}

LayerStack::Partial LayerStack::take_partial(int64_t num_rows) {
  const int64_t n = num_rows * config_.hidden_size;
  Partial partial{scratch_.take<float>(n)};
  if (const DeviceCommunicator* group = options_.rank.device_group; group != nullptr && !shares_rows_)
    partial.send = group->partials_to_send(n);
  return partial;
}

// residual += the partials summed over the group, with the norm of the residual in the same kernel.
void LayerStack::sum_and_norm(const CommOp& op, const RowPartials& partials, const RmsNormArgs& norm) {
  const DeviceCommunicator& group = *options_.rank.device_group;
  if (shares_rows_)
    group.sum_norm_shares(op, partials, rows_.residual, norm, group.row_shares(norm.out_act.rows));
  else
    group.add_all_reduced_norm(op, partials, rows_.residual, norm);
  is_normed_ = true;
}

// residual += partial [num_rows, H] summed over the group; bit-identical on all its ranks, or only on the
// rank whose rows they are if shares_rows_. Unless it is null, `next` is a norm of the residual, which has
// run if is_normed_.
Status LayerStack::add_partial(const OpName& op, const Partial& partial, int64_t num_rows,
                               const RmsNormArgs* next, ThreadPool& pool) {
  const int64_t h = config_.hidden_size;
  is_normed_ = false;
  if (const DeviceCommunicator* group = options_.rank.device_group; group != nullptr) {
    FP4MOE_CHECK(next != nullptr || !shares_rows_, "ranks share rows only where a norm follows the sum");
    const CommOp sum = {op.op, op.layer};
    if (shares_rows_ || (next != nullptr && group->fuses_norm(num_rows, h)))
      sum_and_norm(sum, {partial.rows, partial.is_sent()}, *next);
    else
      group->add_all_reduced(sum, partial.rows, rows_.residual, num_rows * h, partial.is_sent());
    return {};
  }
  if (options_.rank.attention != nullptr) {
    const int64_t sizes[] = {num_rows, h};
    FP4MOE_RETURN_IF_ERROR(options_.rank.attention->all_reduce({op.op, op.layer, geometry_hash(sizes)},
                                                               partial.rows, num_rows * h));
  }
  ops_.add({partial.rows, rows_.residual, num_rows * h}, pool);
  return {};
}

}  // namespace fp4moe
