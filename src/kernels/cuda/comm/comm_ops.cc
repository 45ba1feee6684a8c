#include <algorithm>

#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe {

// At most one waiting block per SM: if ranks share a GPU, each has its part of the SMs (DeviceInfo::num_sms),
// so that the others' waiting blocks leave SMs free for kernels of one large block per SM.
const DeviceCommOps* cuda_comm_ops() {
  static constexpr DeviceCommOps ops{
      .arm = cuda::arm_group,
      .all_reduce = cuda::all_reduce,
      .gather = cuda::gather_columns,
      .max_blocks =
          [] {
            const int per_sm = std::min(cuda::all_reduce_blocks_per_sm(), cuda::gather_blocks_per_sm());
            return std::clamp(device_limits().num_sms * std::min(per_sm, 1), 1, kMaxCommBlocks);
          },
  };
  return &ops;
}

}  // namespace fp4moe
