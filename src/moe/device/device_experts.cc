#include "moe/device/device_experts.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"
#include "kernels/cuda/layout/tile_uploader.h"
#include "moe/act_scales.h"
#include "moe/device/bf16_tiles.h"
#include "moe/local_experts.h"

namespace fp4moe {
namespace {

constexpr int64_t kFloat = sizeof(float);

void append_bias(const bf16* bias, int64_t stride, int64_t count, std::vector<float>& to) {
  for (int64_t i = 0; i < count; ++i) to.push_back(bias == nullptr ? 0.0f : bf16_to_float(bias[i * stride]));
}

// The same weights with tensor scale `alpha`, by which the GEMM multiplies its sums.
Fp4MatrixView with_alpha(Fp4MatrixView w, float alpha) {
  w.tensor_scale = alpha;
  return w;
}

}  // namespace

int64_t DeviceExperts::num_bytes() const {
  return gate_up_.num_bytes() + down_.num_bytes() + gate_up_bias_.num_bytes() + down_bias_.num_bytes() +
         scales_.num_bytes() + act_scales_.num_bytes();
}

std::array<ExpertPart, 7> DeviceExperts::parts_of(int64_t local) const {
  const auto part = [&](const Buffer& buffer, int64_t first, int64_t num_bytes) {
    const int64_t each = num_bytes / tiles_.num_experts;
    return ExpertPart{buffer.data() + first + local * each, each};
  };
  const auto whole = [&](const Buffer& buffer) { return part(buffer, 0, buffer.num_bytes()); };
  const int64_t act = act_scales_.num_bytes() / 2;  // of a1 and of a2
  return {whole(gate_up_),
          whole(down_),
          whole(gate_up_bias_),
          whole(down_bias_),
          whole(scales_),
          part(act_scales_, 0, act),
          part(act_scales_, act, act)};
}

int64_t DeviceExperts::expert_bytes() const {
  int64_t sum = 0;
  for (const ExpertPart& part : parts_of(0)) sum += part.num_bytes;
  return sum;
}

void DeviceExperts::read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const {
  for_expert_pieces(parts_of(local), first, std::ssize(to),
                    [&](const uint8_t* data, int64_t offset, int64_t num_bytes) {
                      copy_async(to.data() + offset, data, num_bytes);
                    });
}

void DeviceExperts::write_expert(int64_t local, int64_t first, std::span<const uint8_t> from) {
  for_expert_pieces(parts_of(local), first, std::ssize(from),
                    [&](uint8_t* data, int64_t offset, int64_t num_bytes) {
                      copy_async(data, from.data() + offset, num_bytes);
                    });
}

Status DeviceExperts::put_scales(const std::vector<ExpertScales>& scales) {
  std::vector<float> act;
  for (const ExpertScales& s : scales) act.push_back(s.a1.value);
  for (const ExpertScales& s : scales) act.push_back(s.a2.value);
  FP4MOE_ASSIGN_OR_RETURN(act_scales_, Buffer::copy_of(act, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(scales_, Buffer::make(std::ssize(scales) * 3 * kFloat, device_memory()));
  tiles_.scales = scales_.as<float>();
  return {};
}

template <class Expert>
Status DeviceExperts::put_biases(const std::vector<Expert>& experts) {
  bool any_up = false, any_down = false;
  for (const Expert& w : experts) {
    any_up |= w.gate_bias != nullptr || w.up_bias != nullptr;
    any_down |= w.down_bias != nullptr;
  }
  std::vector<float> gate_up, down;
  for (const Expert& w : experts) {
    if (any_up && is_gated(tiles_.activation.kind))
      append_bias(w.gate_bias, w.gate_up_bias_stride, tiles_.intermediate_size, gate_up);
    if (any_up) append_bias(w.up_bias, w.gate_up_bias_stride, tiles_.intermediate_size, gate_up);
    if (any_down) append_bias(w.down_bias, 1, tiles_.hidden_size, down);
  }
  FP4MOE_ASSIGN_OR_RETURN(gate_up_bias_, Buffer::copy_of(gate_up, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(down_bias_, Buffer::copy_of(down, device_memory()));
  tiles_.gate_up_bias = gate_up_bias_.as<float>();
  tiles_.down_bias = down_bias_.as<float>();
  return {};
}

int64_t DeviceExperts::gate_up_bytes() const {
  const int64_t rows = (is_gated_kind() ? 2 : 1) * tiles_.intermediate_size;
  return is_fp8() ? fp8_tiled_bytes(tiles_.format, rows, tiles_.hidden_size)
                  : tiled_bytes(tiles_.format, rows, tiles_.hidden_size);
}

int64_t DeviceExperts::down_bytes() const {
  return is_fp8() ? fp8_tiled_bytes(tiles_.format, tiles_.hidden_size, tiles_.intermediate_size)
                  : tiled_bytes(tiles_.format, tiles_.hidden_size, tiles_.intermediate_size);
}

// The tiles are packed on the GPU.
Status DeviceExperts::put_tiles(const std::vector<ExpertWeightsView>& experts,
                                const std::vector<ExpertScales>& scales, ThreadPool& pool) {
  FP4MOE_ASSIGN_OR_RETURN(TileUploader uploader,
                          TileUploader::make(is_fp8() ? TileKind::kFp8 : TileKind::kBf16, pool));
  for (int64_t e = 0; e < std::ssize(experts); ++e) {
    const ExpertWeightsView& w = experts[static_cast<size_t>(e)];
    const ExpertScales& s = scales[static_cast<size_t>(e)];
    float* to = scales_.as<float>() + 3 * e;
    uint8_t* gate_up = gate_up_.data() + e * gate_up_bytes();
    if (is_gated_kind())
      FP4MOE_RETURN_IF_ERROR(
          uploader.gate_up(with_alpha(w.gate, s.gate), with_alpha(w.up, s.up), gate_up, to));
    else if (gate_up_.num_bytes() > 0)
      FP4MOE_RETURN_IF_ERROR(uploader.plain(with_alpha(w.up, s.up), gate_up, to + 1));
    FP4MOE_RETURN_IF_ERROR(
        uploader.plain(with_alpha(w.down, s.down), down_.data() + e * down_bytes(), to + 2));
  }
  return uploader.finish();
}

// The tiles are packed on the host, one expert at a time.
Status DeviceExperts::put_bf16_tiles(const std::vector<Bf16ExpertView>& experts, ThreadPool& pool) {
  const std::vector<float> ones(experts.size() * 3, 1.0f);
  FP4MOE_RETURN_IF_ERROR(device_memory().upload(scales_.data(), ones.data(), scales_.num_bytes()));
  FP4MOE_ASSIGN_OR_RETURN(Buffer tiles, Buffer::make(std::max(gate_up_bytes(), down_bytes())));
  for (int64_t e = 0; e < std::ssize(experts); ++e) {
    const Bf16ExpertView& w = experts[static_cast<size_t>(e)];
    pack_bf16_tiles({is_gated_kind() ? &w.gate : nullptr, &w.up}, tiles.data(), pool);
    FP4MOE_RETURN_IF_ERROR(
        device_memory().upload(gate_up_.data() + e * gate_up_bytes(), tiles.data(), gate_up_bytes()));
    pack_bf16_tiles({nullptr, &w.down}, tiles.data(), pool);
    FP4MOE_RETURN_IF_ERROR(
        device_memory().upload(down_.data() + e * down_bytes(), tiles.data(), down_bytes()));
  }
  return {};
}

Status DeviceExperts::fill(const MoeProblem& p, const MoeWeightsView& weights, ThreadPool& pool) {
  if (p.format == Fp4Format::kNone) {
    FP4MOE_ASSIGN_OR_RETURN(const std::vector<Bf16ExpertView> experts, local_bf16_experts(p, weights));
    FP4MOE_RETURN_IF_ERROR(put_biases(experts));
    FP4MOE_RETURN_IF_ERROR(put_scales(std::vector<ExpertScales>(experts.size())));
    return put_bf16_tiles(experts, pool);
  }
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<ExpertWeightsView> experts, local_experts(p, weights));
  const std::vector<ExpertScales> scales = resolve_scales(weights.experts, numerics_, p.local_experts());
  FP4MOE_RETURN_IF_ERROR(put_biases(experts));
  FP4MOE_RETURN_IF_ERROR(put_scales(scales));
  return put_tiles(experts, scales, pool);
}

Result<DeviceExperts> DeviceExperts::make(const MoeProblem& p, const Numerics& numerics,
                                          const MoeWeightsView& weights, ThreadPool& pool) {
  const int64_t count = p.local_experts().count;
  DeviceExperts out;
  out.numerics_ = numerics;
  out.tiles_ = {p.format, count, p.hidden_size, p.local_intermediate().count, p.activation};
  FP4MOE_ASSIGN_OR_RETURN(out.gate_up_, Buffer::make(count * out.gate_up_bytes(), device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(out.down_, Buffer::make(count * out.down_bytes(), device_memory()));
  out.tiles_.gate_up = out.gate_up_.data();
  out.tiles_.down = out.down_.data();
  FP4MOE_RETURN_IF_ERROR(out.fill(p, weights, pool));
  return out;
}

DeviceExperts DeviceExperts::take_last() {
  FP4MOE_CHECK(tiles_.num_experts > 1 && numerics_.scheme != Scheme::kW4A4, "two experts, and not w4a4");
  const int64_t last = --tiles_.num_experts, up_rows = (is_gated_kind() ? 2 : 1) * tiles_.intermediate_size;
  DeviceExperts view;
  view.numerics_ = numerics_;
  view.tiles_ = tiles_;
  view.tiles_.num_experts = 1;
  view.tiles_.gate_up += last * gate_up_bytes();
  view.tiles_.down += last * down_bytes();
  if (tiles_.gate_up_bias != nullptr) view.tiles_.gate_up_bias += last * up_rows;
  if (tiles_.down_bias != nullptr) view.tiles_.down_bias += last * tiles_.hidden_size;
  view.tiles_.scales += last * 3;
  return view;
}

Result<DeviceExperts> DeviceExperts::make_linear(const LinearWeightsView& weights, const Numerics& numerics,
                                                 ThreadPool& pool) {
  // As on a CPU, a linear layer uses the scales of an expert's up projection, although here the down GEMM
  // runs it.
  ExpertWeightsView expert;
  expert.up = weights.fp4;
  expert.up_input_scale = weights.input_scale;
  ExpertScales scales = resolve_scales({expert}, numerics, {0, 1}).front();
  scales.down = scales.up;
  ExpertWeightsView as_down;
  as_down.down = weights.fp4;
  as_down.down_bias = weights.bias;
  DeviceExperts out;
  out.numerics_ = numerics;
  out.tiles_ = {weights.fp4.format, 1, weights.fp4.rows, weights.fp4.cols, {ActivationKind::kRelu2}};
  FP4MOE_ASSIGN_OR_RETURN(out.down_, Buffer::make(out.down_bytes(), device_memory()));
  out.tiles_.down = out.down_.data();
  FP4MOE_RETURN_IF_ERROR(out.put_biases(std::vector{as_down}));
  FP4MOE_RETURN_IF_ERROR(out.put_scales({scales}));
  FP4MOE_RETURN_IF_ERROR(out.put_tiles({as_down}, {scales}, pool));
  return out;
}

}  // namespace fp4moe
