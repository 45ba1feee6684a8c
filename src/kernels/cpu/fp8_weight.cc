#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/weight_store.h"
#include "formats/fp8.h"
#include "kernels/cpu/q8_panel.h"
#include "kernels/fp8_word.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int64_t kQuantizedRows = 16;  // per chunk of work
constexpr int64_t kFp8PanelRows = 16, kFp8PanelColumns = 32, kPartAlignment = 256;

constexpr int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// The two parts of a weight's memory.
struct Fp8Parts {
  int64_t scale_bytes, code_bytes;

  Fp8Parts(const Fp8Shape& s, LinearLayout layout) {
    FP4MOE_CHECK(s.row_block > 0 && s.col_block > 0, "an FP8 weight without scale blocks");
    FP4MOE_CHECK(s.col_block >= s.k || s.col_block % kFp8ColumnStep == 0,
                 "FP8 scale blocks of " + std::to_string(s.col_block) + " columns");
    const int64_t panels = blocks_of(s.n, kFp8PanelRows), col_blocks = blocks_of(s.k, s.col_block);
    if (layout == LinearLayout::kPanel16Fp8) {
      scale_bytes = panels * col_blocks * kFp8PanelRows * 4;
      code_bytes = panels * panel_code_bytes(s.k);
    } else {
      FP4MOE_CHECK(layout == LinearLayout::kRowMajorFp8 || layout == LinearLayout::kWordsFp8,
                   "not an FP8 layout");
      scale_bytes = blocks_of(s.n, s.row_block) * col_blocks * 4;
      code_bytes = s.n * s.k;
    }
  }
  static int64_t panel_code_bytes(int64_t k) {
    return blocks_of(k, kFp8PanelColumns) * (kFp8PanelColumns * kFp8PanelRows);
  }
  int64_t codes_at() const { return blocks_of(scale_bytes, kPartAlignment) * kPartAlignment; }
  int64_t num_bytes() const { return codes_at() + code_bytes; }
};

void pack_fp8_panel(const Fp8LinearView& src, const Fp8Shape& s, int64_t panel, float* scales,
                    uint8_t* codes) {
  const int64_t first = panel * kFp8PanelRows, rows = std::min(kFp8PanelRows, s.n - first);
  const int64_t col_blocks = blocks_of(s.k, s.col_block);
  std::memset(codes, 0, static_cast<size_t>(Fp8Parts::panel_code_bytes(s.k)));
  std::fill_n(scales, col_blocks * kFp8PanelRows, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from_scales = src.scales + (first + r) / s.row_block * col_blocks;
    for (int64_t b = 0; b < col_blocks; ++b) scales[b * kFp8PanelRows + r] = from_scales[b];
    const uint8_t* from = src.codes + (first + r) * s.k;
    for (int64_t i = 0; i < s.k; ++i) codes[i / 4 * 64 + q8_code_place(r, i % 4)] = from[i];
  }
}

void pack_fp8_words(const uint8_t* row, int64_t k, uint8_t* to) {
  FP4MOE_CHECK(k % kFp8WordGroup == 0, "FP8 words of " + std::to_string(k) + " columns");
  for (int64_t i = 0; i < k; i += kFp8WordGroup)
    for (int q = 0; q < 4; ++q) {
      const uint32_t word = fp8_word(row + i, q);
      std::memcpy(to + i + 4 * q, &word, sizeof word);
    }
}

void pack_fp8_weight(const Fp8LinearView& src, const Fp8Shape& s, LinearLayout layout, uint8_t* to,
                     ThreadPool& pool) {
  const Fp8Parts parts(s, layout);
  std::memset(to + parts.scale_bytes, 0, static_cast<size_t>(parts.codes_at() - parts.scale_bytes));
  if (layout != LinearLayout::kPanel16Fp8) {
    std::memcpy(to, src.scales, static_cast<size_t>(parts.scale_bytes));
    uint8_t* const codes = to + parts.codes_at();
    if (layout == LinearLayout::kRowMajorFp8)
      std::memcpy(codes, src.codes, static_cast<size_t>(parts.code_bytes));
    else
      pool.run(s.n, [&](int64_t row, int) { pack_fp8_words(src.codes + row * s.k, s.k, codes + row * s.k); });
    return;
  }
  const int64_t panels = blocks_of(s.n, kFp8PanelRows), col_blocks = blocks_of(s.k, s.col_block);
  pool.run(panels, [&](int64_t panel, int) {
    pack_fp8_panel(src, s, panel, reinterpret_cast<float*>(to) + panel * col_blocks * kFp8PanelRows,
                   to + parts.codes_at() + panel * Fp8Parts::panel_code_bytes(s.k));
  });
}

}  // namespace

int64_t fp8_weight_bytes(const Fp8Shape& shape, LinearLayout layout) {
  return Fp8Parts(shape, layout).num_bytes();
}

Result<Fp8Weight> put_fp8_weight(const Fp8Source& source, const Fp8Shape& shape, const DenseOps& ops,
                                 ThreadPool& pool) {
  FP4MOE_CHECK(ops.has_fp8, std::string("the ops '") + ops.name + "' have no FP8 weights");
  if (shape.k % ops.fp8_column_step != 0)
    return unsupported("an FP8 weight of " + std::to_string(shape.k) + " columns is not supported by '" +
                       ops.name + "'; legal: a multiple of " + std::to_string(ops.fp8_column_step) +
                       " columns");
  const Fp8Parts parts(shape, ops.fp8_layout);
  const auto pack = [&](uint8_t* to) -> Status {
    Buffer storage;
    FP4MOE_ASSIGN_OR_RETURN(const Fp8LinearView src, source(storage));
    pack_fp8_weight(src, shape, ops.fp8_layout, to, pool);
    return {};
  };
  Fp8Weight weight;
  MemoryResource& memory = ops.memory();
  if (memory.is_host()) {
    FP4MOE_ASSIGN_OR_RETURN(weight.storage, packed_weights(parts.num_bytes(), pack));
  } else {
    FP4MOE_ASSIGN_OR_RETURN(const Buffer host, Buffer::make(parts.num_bytes()));
    FP4MOE_RETURN_IF_ERROR(pack(host.data()));
    FP4MOE_ASSIGN_OR_RETURN(weight.storage, Buffer::copy_of(host.data(), parts.num_bytes(), memory));
  }
  weight.view = {weight.storage.data() + parts.codes_at(), weight.storage.as<float>(), shape.row_block,
                 shape.col_block};
  return weight;
}

Result<Fp8Weight> put_quantized_fp8_weight(const LinearSource& source, int64_t n, int64_t k,
                                           const DenseOps& ops, ThreadPool& pool) {
  const Fp8Shape shape = quantized_fp8_shape(n, k);
  const Fp8Source quantized = [&](Buffer& storage) -> Result<Fp8LinearView> {
    Buffer values;
    FP4MOE_ASSIGN_OR_RETURN(const bf16* src, source(values));
    const Fp8Parts parts(shape, LinearLayout::kRowMajorFp8);
    FP4MOE_ASSIGN_OR_RETURN(storage, Buffer::make(parts.num_bytes()));
    float* scales = storage.as<float>();
    uint8_t* codes = storage.data() + parts.codes_at();
    pool.run(blocks_of(n, kQuantizedRows), [&](int64_t chunk, int) {
      for (int64_t r = chunk * kQuantizedRows; r < std::min(n, (chunk + 1) * kQuantizedRows); ++r)
        scales[r] = fp8_quantize_token(src + r * k, k, codes + r * k);
    });
    return Fp8LinearView{codes, scales, shape.row_block, shape.col_block};
  };
  return put_fp8_weight(quantized, shape, ops, pool);
}

}  // namespace fp4moe
