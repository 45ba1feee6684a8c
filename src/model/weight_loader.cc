#include "model/weight_loader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/weight_store.h"
#include "io/checkpoint/finite_check.h"

namespace fp4moe {

const DenseOps& dense_ops_for(const ModelOptions& options) {
  if (options.moe_plan.problem().device == DeviceKind::kCpu)
    return options.act_dtype == DType::kF32 ? ref_dense_ops(options.dense_quant)
                                            : cpu_dense_ops(options.isa, options.dense_quant);
  const DenseOps* ops = options.moe_plan.a2a_settings().deterministic
                            ? cuda_invariant_dense_ops(options.dense_quant)
                            : cuda_dense_ops(options.dense_quant);
  FP4MOE_CHECK(ops != nullptr, "a plan for a GPU needs a build with CUDA");
  return *ops;
}

WeightLoader::WeightLoader(const Checkpoint& checkpoint, const ModelConfig& config,
                           const ModelOptions& options, ThreadPool& pool, const ProgressSink& progress)
    : checkpoint_(checkpoint),
      config_(config),
      options_(options),
      moe_plan_(options.moe_plan.at_rank(options.rank.layout.rank)),
      ops_(dense_ops_for(options)),
      pool_(pool),
      progress_(progress) {}

void WeightLoader::count(int64_t bytes) {
  const int64_t total = checkpoint_.total_bytes();
  done_bytes_ = std::min(done_bytes_ + bytes, total);
  if (progress_) progress_(done_bytes_, total);
}

Result<std::vector<float>> WeightLoader::values(const std::string& name, const std::vector<int64_t>& shape) {
  const TensorEntry* entry = checkpoint_.find(name);
  const bool is_f32 = entry != nullptr && entry->view.dtype == DType::kF32;
  FP4MOE_ASSIGN_OR_RETURN(const TensorView view,
                          checkpoint_.get(name, is_f32 ? DType::kF32 : DType::kBF16, shape));
  FP4MOE_RETURN_IF_ERROR(check_finite({entry}, pool_));
  std::vector<float> values(static_cast<size_t>(view.num_elems()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = is_f32 ? view.as<float>()[i] : bf16_to_float(view.as<bf16>()[i]);
  count(view.num_bytes());
  return values;
}

Result<Buffer> WeightLoader::floats(const std::string& name, int64_t n) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> values, vector(name, n));
  return put(values);
}

Result<Buffer> WeightLoader::norm(const std::string& name, int64_t n) {
  FP4MOE_ASSIGN_OR_RETURN(std::vector<float> factors, vector(name, n));
  if (config_.centered_norms)
    for (float& factor : factors) ++factor;
  return put(factors);
}

Result<KvScales> WeightLoader::kv_scales(const std::string& prefix) const {
  if (options_.kv_dtype != DType::kF8E4M3) return KvScales{};
  return load_kv_scales(checkpoint_, prefix);
}

Result<Buffer> WeightLoader::put(const std::vector<float>& values) const {
  return Buffer::copy_of(values, ops_.memory());
}

Result<Buffer> WeightLoader::put(Buffer host) const {
  if (ops_.memory().is_host()) return host;
  return Buffer::copy_of(host.data(), host.num_bytes(), ops_.memory());
}

Result<Buffer> WeightLoader::matrix(const std::string& name, int64_t rows, int64_t cols) {
  FP4MOE_ASSIGN_OR_RETURN(const TensorView view, checkpoint_.get(name, DType::kBF16, {rows, cols}));
  if (packs_weights()) FP4MOE_RETURN_IF_ERROR(check_finite({checkpoint_.find(name)}, pool_));
  Buffer buffer;
  if (ops_.memory().is_host()) {
    const auto copy = [&view](uint8_t* to) -> Status {
      std::memcpy(to, view.data, static_cast<size_t>(view.num_bytes()));
      return {};
    };
    FP4MOE_ASSIGN_OR_RETURN(buffer, packed_weights(view.num_bytes(), copy));
  } else {
    FP4MOE_ASSIGN_OR_RETURN(buffer, Buffer::copy_of(view.data, view.num_bytes(), ops_.memory()));
  }
  checkpoint_.release(view);
  count(view.num_bytes());
  return buffer;
}

Result<LinearWeightsView> WeightLoader::view(const std::string& name, const LinearShape& shape) const {
  return load_linear_weights(checkpoint_, config_, name, shape.n, shape.k, shape.has_bias);
}

Status WeightLoader::check_part(const LinearPart& part) const {
  const LinearWeightsView& w = part.weights;
  if (w.bias_tensor != nullptr && w.bias != nullptr)
    FP4MOE_RETURN_IF_ERROR(check_finite({w.bias_tensor}, pool_));
  if (w.weight_tensor == nullptr || !packs_weights()) return {};
  // The view may start after the tensor's first row. A part's rows are nearly consecutive, so their whole
  // range is checked.
  TensorPart read = {.tensor = w.weight_tensor, .num_rows = w.n};
  if (!w.is_fp8()) read.first_row = (w.weight - w.weight_tensor->view.as<bf16>()) / w.k;
  if (!part.rows.empty()) {
    const auto [first, last] = std::minmax_element(part.rows.begin(), part.rows.end());
    read.first_row += *first;
    read.num_rows = *last - *first + 1;
  }
  if (part.cols.count > 0) {
    read.first_col = part.cols.first;
    read.num_cols = part.cols.count;
  }
  return check_finite(read, pool_);
}

Status WeightLoader::check_mlp(const MlpWeightsView& mlp, Shard intermediate) const {
  if (intermediate.count == 0) return {};
  const std::vector<int64_t> rows = row_range(intermediate.first, intermediate.count);
  FP4MOE_RETURN_IF_ERROR(check_part({mlp.gate, rows, {}}));
  FP4MOE_RETURN_IF_ERROR(check_part({mlp.up, rows, {}}));
  return check_part({mlp.down, {}, intermediate});
}

Result<LinearLayer> WeightLoader::linear(const std::vector<LinearPart>& parts) {
  for (const LinearPart& part : parts) FP4MOE_RETURN_IF_ERROR(check_part(part));
  FP4MOE_ASSIGN_OR_RETURN(LinearLayer layer, LinearLayer::make(moe_plan_, ops_, parts, pool_));
  for (const LinearPart& part : parts) {
    const LinearWeightsView& w = part.weights;
    if (w.is_fp8())
      checkpoint_.release({w.fp8.codes, DType::kF8E4M3, {w.n, w.k}});
    else if (!w.is_fp4)
      checkpoint_.release({reinterpret_cast<const uint8_t*>(w.weight), DType::kBF16, {w.n, w.k}});
  }
  count(layer.weight_bytes());
  return layer;
}

Result<LinearLayer> WeightLoader::linear(const std::string& name, const LinearShape& shape) {
  FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView weights, view(name, shape));
  return linear({LinearPart{weights, {}, {}}});
}

Result<LinearLayer> WeightLoader::column_shard(const std::string& name, const LinearShape& shape,
                                               Shard cols) {
  FP4MOE_ASSIGN_OR_RETURN(LinearWeightsView weights, view(name, shape));
  if (layout().attention_rank() != 0) weights.bias = nullptr;
  Result<LinearLayer> layer = linear({LinearPart{weights, {}, cols}});
  if (!layer.ok()) return layer.status().with_context(name);
  return layer;
}

Result<LinearLayer> WeightLoader::row_shard(const std::string& name, const LinearShape& shape, Shard rows) {
  if (rows.count == 0) return LinearLayer();
  FP4MOE_ASSIGN_OR_RETURN(const LinearWeightsView weights, view(name, shape));
  Result<LinearLayer> layer = linear({LinearPart{weights, row_range(rows.first, rows.count), {}}});
  if (!layer.ok()) return layer.status().with_context(name);
  return layer;
}

}  // namespace fp4moe
