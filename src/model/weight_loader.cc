#include "model/weight_loader.h"

#include <cstring>

#include "base/check.h"

namespace fp4moe {

void WeightLoader::count(int64_t bytes) {
  done_bytes_ += bytes;
  if (progress_) progress_(done_bytes_, checkpoint_.total_bytes());
}

Result<std::vector<float>> WeightLoader::vector(const std::string& name, int64_t n) {
  FP4MOE_ASSIGN_OR_RETURN(const TensorView view, checkpoint_.get(name, DType::kBF16, {n}));
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = bf16_to_float(view.as<bf16>()[i]);
  count(view.num_bytes());
  return values;
}

Result<Buffer> WeightLoader::matrix(const std::string& name, int64_t rows, int64_t cols) {
  FP4MOE_ASSIGN_OR_RETURN(const TensorView view, checkpoint_.get(name, DType::kBF16, {rows, cols}));
  FP4MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::make(view.num_bytes()));
  std::memcpy(buffer.data(), view.data, static_cast<size_t>(view.num_bytes()));
  checkpoint_.release(view);
  count(view.num_bytes());
  return buffer;
}

Result<LinearWeights> WeightLoader::linear(const std::vector<std::string>& names,
                                           const std::vector<int64_t>& rows, int64_t k, bool has_bias) {
  LinearWeights out;
  out.k = k;
  std::vector<TensorView> views;
  for (size_t i = 0; i < names.size(); ++i) {
    FP4MOE_ASSIGN_OR_RETURN(TensorView view,
                            checkpoint_.get(names[i] + ".weight", DType::kBF16, {rows[i], k}));
    checkpoint_.will_need(view);
    views.push_back(std::move(view));
    out.n += rows[i];
    if (!has_bias) continue;
    FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> bias, vector(names[i] + ".bias", rows[i]));
    out.bias.insert(out.bias.end(), bias.begin(), bias.end());
  }
  const bf16* source = views[0].as<bf16>();
  Buffer stacked;
  if (views.size() > 1) {
    FP4MOE_ASSIGN_OR_RETURN(stacked, Buffer::make(out.n * k * 2));
    uint8_t* at = stacked.data();
    for (const TensorView& view : views) {
      std::memcpy(at, view.data, static_cast<size_t>(view.num_bytes()));
      at += view.num_bytes();
    }
    source = stacked.as<bf16>();
  }
  FP4MOE_ASSIGN_OR_RETURN(out.weight, Buffer::make(linear_weight_bytes(out.n, k, layout_)));
  pack_linear_weight(source, out.n, k, layout_, out.weight.as<bf16>(), pool_);
  for (const TensorView& view : views) {
    checkpoint_.release(view);
    count(view.num_bytes());
  }
  return out;
}

}  // namespace fp4moe
