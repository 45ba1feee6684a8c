#include "moe/device_experts.h"

#include <vector>

#include "base/check.h"
#include "device/device_memory.h"
#include "kernels/cuda/tile_layout.h"
#include "kernels/cuda/tile_uploader.h"
#include "moe/act_scales.h"
#include "moe/local_experts.h"

namespace fp4moe {
namespace {

constexpr int64_t kFloat = sizeof(float);

Result<Buffer> put_floats(const std::vector<float>& values) {
  FP4MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::make(std::ssize(values) * kFloat, device_memory()));
  if (!values.empty())
    FP4MOE_RETURN_IF_ERROR(device_memory().upload(buffer.data(), values.data(), buffer.num_bytes()));
  return buffer;
}

void append_bias(const bf16* bias, int64_t stride, int64_t count, std::vector<float>& to) {
  for (int64_t i = 0; i < count; ++i) to.push_back(bias == nullptr ? 0.0f : bf16_to_float(bias[i * stride]));
}

// The same weights whose tensor scale is `alpha`: what multiplies the sums.
Fp4MatrixView with_alpha(Fp4MatrixView w, float alpha) {
  w.tensor_scale = alpha;
  return w;
}

}  // namespace

int64_t DeviceExperts::num_bytes() const {
  return gate_up_.num_bytes() + down_.num_bytes() + gate_up_bias_.num_bytes() + down_bias_.num_bytes() +
         scales_.num_bytes() + act_scales_.num_bytes();
}

Status DeviceExperts::put_scales(const std::vector<ExpertScales>& scales) {
  std::vector<float> act;
  for (const ExpertScales& s : scales) act.push_back(s.a1.value);
  for (const ExpertScales& s : scales) act.push_back(s.a2.value);
  FP4MOE_ASSIGN_OR_RETURN(act_scales_, put_floats(act));
  FP4MOE_ASSIGN_OR_RETURN(scales_, Buffer::make(std::ssize(scales) * 3 * kFloat, device_memory()));
  tiles_.scales = scales_.as<float>();
  return {};
}

Status DeviceExperts::put_biases(const std::vector<ExpertWeightsView>& experts) {
  bool any_up = false, any_down = false;
  for (const ExpertWeightsView& w : experts) {
    any_up |= w.gate_bias != nullptr || w.up_bias != nullptr;
    any_down |= w.down_bias != nullptr;
  }
  std::vector<float> gate_up, down;
  for (const ExpertWeightsView& w : experts) {
    if (any_up && is_gated(tiles_.activation.kind))
      append_bias(w.gate_bias, w.gate_up_bias_stride, tiles_.intermediate_size, gate_up);
    if (any_up) append_bias(w.up_bias, w.gate_up_bias_stride, tiles_.intermediate_size, gate_up);
    if (any_down) append_bias(w.down_bias, 1, tiles_.hidden_size, down);
  }
  FP4MOE_ASSIGN_OR_RETURN(gate_up_bias_, put_floats(gate_up));
  FP4MOE_ASSIGN_OR_RETURN(down_bias_, put_floats(down));
  tiles_.gate_up_bias = gate_up_bias_.as<float>();
  tiles_.down_bias = down_bias_.as<float>();
  return {};
}

Result<DeviceExperts> DeviceExperts::make(const MoeProblem& p, const Numerics& numerics,
                                          const MoeWeightsView& weights, ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<ExpertWeightsView> experts, local_experts(p, weights));
  const std::vector<ExpertScales> scales = resolve_scales(weights.experts, numerics, p.local_experts());
  const int64_t h = p.hidden_size, n = p.local_intermediate().count, count = std::ssize(experts);
  const bool gated = is_gated(p.activation.kind);
  const int64_t gate_up_bytes = tiled_bytes(p.format, gated ? 2 * n : n, h);
  const int64_t down_bytes = tiled_bytes(p.format, h, n);
  DeviceExperts out;
  out.numerics_ = numerics;
  out.tiles_ = {p.format, count, h, n, p.activation};
  FP4MOE_ASSIGN_OR_RETURN(out.gate_up_, Buffer::make(count * gate_up_bytes, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(out.down_, Buffer::make(count * down_bytes, device_memory()));
  out.tiles_.gate_up = out.gate_up_.data();
  out.tiles_.down = out.down_.data();
  FP4MOE_RETURN_IF_ERROR(out.put_biases(experts));
  FP4MOE_RETURN_IF_ERROR(out.put_scales(scales));
  FP4MOE_ASSIGN_OR_RETURN(TileUploader uploader, TileUploader::make(pool));
  for (int64_t e = 0; e < count; ++e) {
    const ExpertWeightsView& w = experts[static_cast<size_t>(e)];
    const ExpertScales& s = scales[static_cast<size_t>(e)];
    float* to = out.scales_.as<float>() + 3 * e;
    uint8_t* gate_up = out.gate_up_.data() + e * gate_up_bytes;
    FP4MOE_RETURN_IF_ERROR(
        gated ? uploader.gate_up(with_alpha(w.gate, s.gate), with_alpha(w.up, s.up), gate_up, to)
              : uploader.plain(with_alpha(w.up, s.up), gate_up, to + 1));
    FP4MOE_RETURN_IF_ERROR(
        uploader.plain(with_alpha(w.down, s.down), out.down_.data() + e * down_bytes, to + 2));
  }
  FP4MOE_RETURN_IF_ERROR(uploader.finish());
  return out;
}

Result<DeviceExperts> DeviceExperts::make_linear(const LinearWeightsView& weights, const Numerics& numerics,
                                                 ThreadPool& pool) {
  const Fp4MatrixView& w = weights.fp4;
  // As on a CPU, a linear layer is the up projection of an expert of its own.
  ExpertWeightsView expert;
  expert.up = w;
  expert.up_input_scale = weights.input_scale;
  const ExpertScales scales = resolve_scales({expert}, numerics, {0, 1}).front();
  DeviceExperts out;
  out.numerics_ = numerics;
  out.tiles_ = {w.format, 1, w.rows, w.cols, {ActivationKind::kRelu2}};
  FP4MOE_ASSIGN_OR_RETURN(out.down_, Buffer::make(tiled_bytes(w.format, w.rows, w.cols), device_memory()));
  out.tiles_.down = out.down_.data();
  ExpertWeightsView biases;
  biases.down_bias = weights.bias;
  FP4MOE_RETURN_IF_ERROR(out.put_biases({biases}));
  FP4MOE_RETURN_IF_ERROR(out.put_scales({scales}));
  FP4MOE_ASSIGN_OR_RETURN(TileUploader uploader, TileUploader::make(pool));
  FP4MOE_RETURN_IF_ERROR(
      uploader.plain(with_alpha(w, scales.up), out.down_.data(), out.scales_.as<float>() + 2));
  FP4MOE_RETURN_IF_ERROR(uploader.finish());
  return out;
}

}  // namespace fp4moe
