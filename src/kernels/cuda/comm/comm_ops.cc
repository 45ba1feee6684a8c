#include <algorithm>

#include "device/device_info.h"
#include "kernels/cuda/comm/comm_kernels.h"
#include "kernels/cuda/ptx/launch.h"

namespace fp4moe {

// max_blocks() allows at most two waiting blocks per SM. If ranks share a GPU, the waiting blocks of all
// ranks but one must leave room for any kernel of the last rank, including clusters of large blocks, which
// need many free SMs in one GPC: each rank's blocks take at most an eighth of the SMs.
const DeviceCommOps* cuda_comm_ops() {
  static constexpr DeviceCommOps ops{
      .arm = cuda::arm_group,
      .all_reduce = cuda::all_reduce,
      .all_reduce_norm = cuda::all_reduce_norm,
      .reduce_norm_gather = cuda::reduce_norm_gather,
      .gather = cuda::gather_columns,
      .gather_shares = cuda::gather_shares,
      .max_blocks =
          [] {
            const int per_sm = std::min(
                {cuda::all_reduce_blocks_per_sm(), cuda::gather_blocks_per_sm(), cuda::a2a_blocks_per_sm()});
            const bool shares_gpu = ranks_per_gpu() > 1;
            const int num_sms = device_limits().num_sms / (shares_gpu ? 8 : 1);
            return std::clamp(num_sms * std::min(per_sm, shares_gpu ? 1 : 2), 1, kMaxCommBlocks);
          },
  };
  return &ops;
}

}  // namespace fp4moe
