#include "kernels/cuda/ptx/tensor_map.h"

#include <cuda_runtime.h>

#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

// Returns the driver's encoder; the library does not link to the driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    FP4MOE_CHECK(entry != nullptr && found == cudaDriverEntryPointSuccess,
                 "the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

// The copies keep all bits, so that only the size matters.
CUtensorMapDataType type_of(int element_bytes) {
  switch (element_bytes) {
    case 1:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case 2:
      return CU_TENSOR_MAP_DATA_TYPE_UINT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT32;
  }
}

}  // namespace

CUtensorMap tensor_map(const void* matrix, int element_bytes, int64_t rows, int64_t cols, int tile_rows,
                       int64_t row_stride) {
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {
      static_cast<cuuint64_t>((row_stride > 0 ? row_stride : cols) * element_bytes)};
  const cuuint32_t tile[] = {static_cast<cuuint32_t>(kTensorTileBytes / element_bytes),
                             static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t strides[] = {1, 1};
  const CUresult result =
      encoder()(&map, type_of(element_bytes), 2, const_cast<void*>(matrix), sizes, row_bytes, tile, strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FP4MOE_CHECK(result == CUDA_SUCCESS, "no tensor map of " + std::to_string(rows) + " x " +
                                           std::to_string(cols) + " elements of " +
                                           std::to_string(element_bytes) + " bytes: CUDA error " +
                                           std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace fp4moe
