// The bf16 matmul of cuBLASLt that a GPU's rate is measured by.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <string>

#include "device/library.h"
#include "device/stream.h"
#include "kernels/cuda/peak.h"

namespace fp4moe {
namespace {

// The functions that are used, and the plan for one n. Made once, kept until the process ends.
struct Matmul {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;

  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;  // of all three matrices
  cublasLtMatmulHeuristicResult_t choice{};
  int64_t n = 0;

  Status bind();
  Status plan(int64_t size);
};

template <class Function>
void bind_one(const Library& library, const char* symbol, Function*& out, Status& status) {
  if (status.ok()) status = library.bind(symbol, out);
}

Status Matmul::bind() {
  const auto library = Library::open(LibraryId::kCublasLt);
  if (!library.ok()) return library.status();
  Status status;
  bind_one(*library, "cublasLtCreate", create, status);
  bind_one(*library, "cublasLtMatmul", matmul, status);
  bind_one(*library, "cublasLtMatmulDescCreate", desc_create, status);
  bind_one(*library, "cublasLtMatmulDescSetAttribute", desc_set, status);
  bind_one(*library, "cublasLtMatrixLayoutCreate", layout_create, status);
  bind_one(*library, "cublasLtMatmulPreferenceCreate", preference_create, status);
  bind_one(*library, "cublasLtMatmulPreferenceSetAttribute", preference_set, status);
  bind_one(*library, "cublasLtMatmulAlgoGetHeuristic", heuristic, status);
  return status;
}

Status failed(const char* what, cublasStatus_t status) {
  return internal_error(std::string("cuBLASLt: ") + what + " returned " +
                        std::to_string(static_cast<int>(status)));
}

Status Matmul::plan(int64_t size) {
  if (n == size) return {};
  if (handle == nullptr) {
    if (Status status = bind(); !status.ok()) return status;
    if (const cublasStatus_t s = create(&handle); s != CUBLAS_STATUS_SUCCESS) return failed("create", s);
    if (const cublasStatus_t s = desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        s != CUBLAS_STATUS_SUCCESS)
      return failed("matmul description", s);
    const cublasOperation_t transpose = CUBLAS_OP_T;
    desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose);
  }
  const auto rows = static_cast<uint64_t>(size);
  if (const cublasStatus_t s = layout_create(&layout, CUDA_R_16BF, rows, rows, size);
      s != CUBLAS_STATUS_SUCCESS)
    return failed("matrix layout", s);
  cublasLtMatmulPreference_t preference = nullptr;
  if (const cublasStatus_t s = preference_create(&preference); s != CUBLAS_STATUS_SUCCESS)
    return failed("preference", s);
  const size_t workspace = kPeakMatmulWorkspace;
  preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  int found = 0;
  const cublasStatus_t s =
      heuristic(handle, desc, layout, layout, layout, layout, preference, 1, &choice, &found);
  if (s != CUBLAS_STATUS_SUCCESS || found == 0) return failed("choice of an algorithm", s);
  n = size;
  return {};
}

}  // namespace

Status peak_matmul(const bf16* a, const bf16* b, bf16* out, int64_t n, uint8_t* workspace) {
  static Matmul matmul;
  if (Status status = matmul.plan(n); !status.ok()) return status;
  const float one = 1, zero = 0;
  Stream& stream = current_stream();
  const cublasStatus_t s = matmul.matmul(matmul.handle, matmul.desc, &one, a, matmul.layout, b, matmul.layout,
                                         &zero, out, matmul.layout, out, matmul.layout, &matmul.choice.algo,
                                         workspace, kPeakMatmulWorkspace, stream.handle());
  return s == CUBLAS_STATUS_SUCCESS ? Status() : failed("matmul", s);
}

}  // namespace fp4moe
