// Stubs for the GPU's ops in a build without CUDA.
#include "kernels/device_a2a.h"
#include "kernels/device_comm.h"
#include "kernels/device_copy.h"
#include "kernels/device_drafts.h"
#include "kernels/device_moe.h"
#include "kernels/device_moe_fp8.h"
#include "kernels/device_peak.h"
#include "kernels/device_sampler.h"
#include "kernels/ops.h"

namespace fp4moe {

#ifndef FP4MOE_HAS_CUDA

const DenseOps* cuda_dense_ops(DenseQuant) { return nullptr; }
const DenseOps* cuda_invariant_dense_ops(DenseQuant) { return nullptr; }
Status prepare_cuda_dense_ops() { return unsupported("built without CUDA"); }
const DeviceMoeOps* fallback_moe_ops() { return nullptr; }
const DeviceMoeOps* sm90_moe_ops() { return nullptr; }
const DeviceMoeOps* sm90_bf16_moe_ops() { return nullptr; }
const DeviceMoeOps* sm90_fp8_moe_ops() { return nullptr; }
const DevicePeakOps* sm90_peak_ops() { return nullptr; }
const DeviceCommOps* cuda_comm_ops() { return nullptr; }
const DeviceA2aOps* cuda_a2a_ops() { return nullptr; }
CopyFromHost cuda_copy_from_host() { return nullptr; }
CopyKvPages cuda_copy_kv_pages() { return nullptr; }
CopyState cuda_copy_state() { return nullptr; }
SampleRows cuda_sample_rows() { return nullptr; }
SampleShards cuda_sample_shards() { return nullptr; }
AcceptDrafts cuda_accept_drafts() { return nullptr; }
MoveRows cuda_move_rows() { return nullptr; }
MoveRandoms cuda_move_randoms() { return nullptr; }

#endif

}  // namespace fp4moe
