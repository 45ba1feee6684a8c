// DeviceExpertRunner: a GPU's experts and what running them takes; of routed experts, MLPs and probes alike.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "kernels/device_moe.h"
#include "moe/device_experts.h"
#include "moe/device_pass.h"
#include "moe/tactics.h"

namespace fp4moe {

class DeviceExpertRunner {
 public:
  // `ops`, those of the experts' scheme, is kept. `tactics` are of layers like these; none: the table's rule.
  static Result<DeviceExpertRunner> make(const DeviceMoeOps& ops, DeviceExperts experts,
                                         DeviceTactics tactics = {});

  int64_t weight_bytes() const { return experts_.num_bytes(); }
  int64_t scratch_bytes(int64_t max_tokens, int64_t topk) const;
  // out [T, H] (+)= the experts' sums, weighted (null: by 1), for x [T, H] bf16: device memory, asked of the
  // current stream.
  void run(const ActRows& x, const DeviceSlots& slots, const float* weights, float* out, bool accumulate,
           Arena& scratch) const;

 private:
  // Else the ops' tactics run whole layers.
  bool is_w4a4() const { return experts_.numerics().scheme == Scheme::kW4A4; }
  const DeviceMoeOps* ops_ = nullptr;
  DeviceExperts experts_;
  DeviceTactics tactics_;
  Buffer counters_;  // of DeviceMoeArgs
};

}  // namespace fp4moe
