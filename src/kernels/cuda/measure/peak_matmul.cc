// The bf16 matmul of cuBLASLt that measures a GPU's peak rate.
#include <cuda_runtime_api.h>

#include <string>

#include "base/check.h"
#include "device/device_context.h"
#include "device/stream.h"
#include "kernels/cuda/dense/cublas_lt.h"
#include "kernels/cuda/measure/peak.h"

namespace fp4moe {
namespace {

// cuBLASLt on one GPU, with the plan for one n.
struct Matmul {
  CublasLt lt{};
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;  // of all three matrices
  cublasLtMatmulHeuristicResult_t choice{};
  int64_t n = 0;

  Status open();
  Status plan(int64_t size);
};

Status failed(const char* what, cublasStatus_t status) {
  return internal_error(std::string("cuBLASLt: ") + what + " returned " +
                        std::to_string(static_cast<int>(status)));
}

Status Matmul::open() {
  FP4MOE_ASSIGN_OR_RETURN(lt, CublasLt::load());
  if (const cublasStatus_t s = lt.create(&handle); s != CUBLAS_STATUS_SUCCESS) return failed("create", s);
  if (const cublasStatus_t s = lt.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
      s != CUBLAS_STATUS_SUCCESS)
    return failed("matmul description", s);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  lt.desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose);
  return {};
}

Status Matmul::plan(int64_t size) {
  if (n == size) return {};
  const auto rows = static_cast<uint64_t>(size);
  if (const cublasStatus_t s = lt.layout_create(&layout, CUDA_R_16BF, rows, rows, size);
      s != CUBLAS_STATUS_SUCCESS)
    return failed("matrix layout", s);
  cublasLtMatmulPreference_t preference = nullptr;
  if (const cublasStatus_t s = lt.preference_create(&preference); s != CUBLAS_STATUS_SUCCESS)
    return failed("preference", s);
  const size_t workspace = kPeakMatmulWorkspace;
  lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  int found = 0;
  const cublasStatus_t s =
      lt.get_heuristic(handle, desc, layout, layout, layout, layout, preference, 1, &choice, &found);
  if (s != CUBLAS_STATUS_SUCCESS || found == 0) return failed("algorithm selection", s);
  n = size;
  return {};
}

}  // namespace

Status peak_matmul(const bf16* a, const bf16* b, bf16* out, int64_t n, uint8_t* workspace) {
  FP4MOE_ASSIGN_OR_RETURN(Matmul* const on_gpu,
                          current_device().open_library<Matmul>(DeviceLibrary::kPeakMatmul));
  Matmul& matmul = *on_gpu;
  FP4MOE_RETURN_IF_ERROR(matmul.plan(n));
  const float one = 1, zero = 0;
  Stream& stream = current_stream();
  const cublasStatus_t s = matmul.lt.matmul(
      matmul.handle, matmul.desc, &one, a, matmul.layout, b, matmul.layout, &zero, out, matmul.layout, out,
      matmul.layout, &matmul.choice.algo, workspace, kPeakMatmulWorkspace, stream.handle());
  return s == CUBLAS_STATUS_SUCCESS ? Status() : failed("matmul", s);
}

}  // namespace fp4moe
