#include "kernels/cuda/dense/cublas_lt.h"

#include "base/check.h"
#include "device/library.h"

namespace fp4moe {

Result<CublasLt> CublasLt::load() {
  FP4MOE_ASSIGN_OR_RETURN(const Library library, Library::open(LibraryId::kCublasLt));
  CublasLt lt{};
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtCreate", lt.create));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmul", lt.matmul));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulAlgoGetHeuristic", lt.get_heuristic));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulDescCreate", lt.desc_create));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulDescDestroy", lt.desc_destroy));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulDescSetAttribute", lt.desc_set));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatrixLayoutCreate", lt.layout_create));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatrixLayoutDestroy", lt.layout_destroy));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulPreferenceCreate", lt.preference_create));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulPreferenceDestroy", lt.preference_destroy));
  FP4MOE_RETURN_IF_ERROR(library.bind("cublasLtMatmulPreferenceSetAttribute", lt.preference_set));
  return lt;
}

}  // namespace fp4moe
