#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int64_t kPanelRows = 16;

void pack_panel(const bf16* src, int64_t rows, int64_t k, bf16* dst) {
  for (int64_t i = 0; i < k; i += 2)
    for (int64_t r = 0; r < kPanelRows; ++r)
      for (int64_t j = i; j < i + 2; ++j) *dst++ = r < rows && j < k ? src[r * k + j] : bf16{};
}

}  // namespace

int64_t linear_weight_bytes(int64_t n, int64_t k, LinearLayout layout) {
  constexpr int64_t kElem = sizeof(bf16);
  if (layout == LinearLayout::kRowMajor) return n * k * kElem;
  return (n + kPanelRows - 1) / kPanelRows * kPanelRows * ((k + 1) / 2 * 2) * kElem;
}

void pack_linear_weight(const bf16* src, int64_t n, int64_t k, LinearLayout layout, bf16* dst,
                        ThreadPool& pool) {
  pool.run((n + kPanelRows - 1) / kPanelRows, [&](int64_t panel, int) {
    const int64_t first = panel * kPanelRows, rows = std::min(kPanelRows, n - first);
    if (layout == LinearLayout::kRowMajor)
      std::memcpy(dst + first * k, src + first * k, static_cast<size_t>(rows * k) * sizeof(bf16));
    else
      pack_panel(src + first * k, rows, k, dst + first * ((k + 1) / 2 * 2));
  });
}

Result<Buffer> put_linear_weight(const bf16* src, int64_t n, int64_t k, const DenseOps& ops,
                                 ThreadPool& pool) {
  MemoryResource& memory = ops.memory();
  const int64_t num_bytes = linear_weight_bytes(n, k, ops.linear_layout);
  if (!memory.is_host()) {
    FP4MOE_CHECK(ops.linear_layout == LinearLayout::kRowMajor, "a device's weights are row-major");
    return Buffer::copy_of(src, num_bytes, memory);
  }
  FP4MOE_ASSIGN_OR_RETURN(Buffer weight, Buffer::make(num_bytes, memory));
  pack_linear_weight(src, n, k, ops.linear_layout, weight.as<bf16>(), pool);
  return weight;
}

}  // namespace fp4moe
