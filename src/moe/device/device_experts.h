// The experts of one layer in a GPU's memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "io/checkpoint/expert_weights.h"
#include "kernels/device_moe.h"
#include "moe/act_scales.h"
#include "moe/expert_parts.h"
#include "moe/plan/plan.h"
#include "moe/plan/scheme.h"

namespace fp4moe {

class DeviceExperts {
 public:
  // Like RunnerRow::pack, but into tiles in GPU memory (kernels/cuda/layout/tile_layout.h; w4a8:
  // fp8_tile_layout.h). kDoesNotFit if GPU memory is too small, kUnsupported for scales that the tiles cannot
  // represent.
  static Result<DeviceExperts> make(const MoeProblem& problem, const Numerics& numerics,
                                    const MoeWeightsView& weights, ThreadPool& pool);
  // Packs one [N, K] matrix as the down projection of a single expert: hidden_size is N, intermediate_size is
  // K.
  static Result<DeviceExperts> make_linear(const LinearWeightsView& weights, const Numerics& numerics,
                                           ThreadPool& pool);

  const TiledExperts& tiles() const { return tiles_; }
  const Numerics& numerics() const { return numerics_; }
  // Encode scales of w4a4's quantisers of x (a1) and of the intermediate (a2), [L] f32 in device memory.
  const float* a1() const { return act_scales_.as<float>(); }
  const float* a2() const { return a1() + tiles_.num_experts; }
  int64_t num_bytes() const;
  // Removes the last expert from tiles(), after whose weights its own stay in memory, and returns it as the
  // only expert of a view, which this object must outlive. Not for w4a4, whose scales it would move.
  DeviceExperts take_last();
  // As in PlacedExperts; the weights stay at their addresses. The current stream keeps errors.
  int64_t expert_bytes() const;
  void read_expert(int64_t local, int64_t first, std::span<uint8_t> to) const;
  void write_expert(int64_t local, int64_t first, std::span<const uint8_t> from);

 private:
  std::array<ExpertPart, 7> parts_of(int64_t local) const;
  Status put_scales(const std::vector<ExpertScales>& scales);
  template <class Expert>
  Status put_biases(const std::vector<Expert>& experts);
  Status put_tiles(const std::vector<ExpertWeightsView>& experts, const std::vector<ExpertScales>& scales,
                   ThreadPool& pool);
  Status put_bf16_tiles(const std::vector<Bf16ExpertView>& experts, ThreadPool& pool);
  Status fill(const MoeProblem& problem, const MoeWeightsView& weights, ThreadPool& pool);
  bool is_fp8() const { return numerics_.scheme == Scheme::kW4A8; }
  bool is_gated_kind() const { return is_gated(tiles_.activation.kind); }
  // Bytes of one expert's tiles.
  int64_t gate_up_bytes() const;
  int64_t down_bytes() const;
  TiledExperts tiles_;
  Numerics numerics_;
  Buffer gate_up_, down_, gate_up_bias_, down_bias_, scales_, act_scales_;
};

}  // namespace fp4moe
