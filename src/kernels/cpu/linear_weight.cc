#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/weight_store.h"
#include "formats/q8.h"
#include "kernels/cpu/q8_panel.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int64_t kPanelRows = 16;

void pack_panel(const bf16* src, int64_t rows, int64_t k, bf16* dst) {
  for (int64_t i = 0; i < k; i += 2)
    for (int64_t r = 0; r < kPanelRows; ++r)
      for (int64_t j = i; j < i + 2; ++j) *dst++ = r < rows && j < k ? src[r * k + j] : bf16{};
}

void quantize_row(const bf16* src, int64_t k, Q8Block* dst) {
  for (int64_t first = 0; first < k; first += kQ8Block)
    *dst++ = quantize_q8(src + first, std::min(kQ8Block, k - first));
}

void pack_q8_panel(const bf16* src, int64_t rows, int64_t k, uint8_t* dst) {
  std::memset(dst, 0, static_cast<size_t>(q8_panel_bytes(k)));
  bf16* scales = reinterpret_cast<bf16*>(dst);
  uint8_t* codes = dst + q8_panel_scale_bytes(k);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < q8_blocks(k); ++b) {
      const int64_t first = b * kQ8Block;
      const Q8Block block = quantize_q8(src + r * k + first, std::min(kQ8Block, k - first));
      scales[b * kPanelRows + r] = block.scale;
      for (int64_t i = 0; i < kQ8Block; ++i) {
        const int code = block.codes[i];
        codes[(first + i) / 4 * 64 + q8_code_place(r, i % 4)] =
            static_cast<uint8_t>(code < 0 ? 0x80 - code : code);
      }
    }
}

// Returns the size in bytes of `rows` <= kPanelRows rows: the offset of the next group.
int64_t group_bytes(int64_t rows, int64_t k, LinearLayout layout) {
  constexpr int64_t kElem = sizeof(bf16);
  switch (layout) {
    case LinearLayout::kRowMajor:
      return rows * k * kElem;
    case LinearLayout::kPanel16:
      return kPanelRows * ((k + 1) / 2 * 2) * kElem;
    case LinearLayout::kRowMajorQ8:
      return rows * q8_blocks(k) * int64_t{sizeof(Q8Block)};
    case LinearLayout::kPanel16Q8:
      return q8_panel_bytes(k);
    case LinearLayout::kRowMajorFp8:
    case LinearLayout::kWordsFp8:
    case LinearLayout::kPanel16Fp8:
      break;
  }
  FP4MOE_CHECK(false, "an FP8 layout for bf16 weights");
  return 0;
}

}  // namespace

int64_t linear_weight_bytes(int64_t n, int64_t k, LinearLayout layout) {
  const int64_t rest = n % kPanelRows;
  return n / kPanelRows * group_bytes(kPanelRows, k, layout) + (rest > 0 ? group_bytes(rest, k, layout) : 0);
}

void pack_linear_weight(const bf16* src, int64_t n, int64_t k, LinearLayout layout, void* dst,
                        ThreadPool& pool) {
  pool.run((n + kPanelRows - 1) / kPanelRows, [&](int64_t panel, int) {
    const int64_t first = panel * kPanelRows, rows = std::min(kPanelRows, n - first);
    const bf16* from = src + first * k;
    uint8_t* to = static_cast<uint8_t*>(dst) + panel * group_bytes(kPanelRows, k, layout);
    switch (layout) {
      case LinearLayout::kRowMajor:
        std::memcpy(to, from, static_cast<size_t>(rows * k) * sizeof(bf16));
        break;
      case LinearLayout::kPanel16:
        pack_panel(from, rows, k, reinterpret_cast<bf16*>(to));
        break;
      case LinearLayout::kRowMajorQ8:
        for (int64_t r = 0; r < rows; ++r)
          quantize_row(from + r * k, k, reinterpret_cast<Q8Block*>(to) + r * q8_blocks(k));
        break;
      case LinearLayout::kPanel16Q8:
        pack_q8_panel(from, rows, k, to);
        break;
      case LinearLayout::kRowMajorFp8:
      case LinearLayout::kWordsFp8:
      case LinearLayout::kPanel16Fp8:
        break;
    }
  });
}

Result<Buffer> put_linear_weight(const LinearSource& source, int64_t n, int64_t k, const DenseOps& ops,
                                 ThreadPool& pool) {
  MemoryResource& memory = ops.memory();
  const int64_t num_bytes = linear_weight_bytes(n, k, ops.linear_layout);
  if (!memory.is_host()) {
    FP4MOE_CHECK(ops.linear_layout == LinearLayout::kRowMajor, "device weights must be row-major");
    Buffer storage;
    FP4MOE_ASSIGN_OR_RETURN(const bf16* src, source(storage));
    return Buffer::copy_of(src, num_bytes, memory);
  }
  return packed_weights(num_bytes, [&](uint8_t* to) -> Status {
    Buffer storage;
    FP4MOE_ASSIGN_OR_RETURN(const bf16* src, source(storage));
    pack_linear_weight(src, n, k, ops.linear_layout, to, pool);
    return {};
  });
}

}  // namespace fp4moe
