#include "formats/e4m3.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

void write_row(const float* row, const KvPages& pages, const int32_t* page_table, int64_t position) {
  const float inverse = 1 / pages.scale;
  for (int h = 0; h < pages.num_kv_heads; ++h) {
    const int64_t offset = pages.offset(page_table, h, position);
    const float* x = row + static_cast<int64_t>(h) * pages.head_dim;
    for (int d = 0; d < pages.head_dim; ++d) {
      if (pages.dtype == DType::kF8E4M3)
        static_cast<uint8_t*>(pages.data)[offset + d] = e4m3_encode(x[d] * inverse);
      else
        store_elem(pages.data, pages.dtype, offset + d, x[d]);
    }
  }
}

}  // namespace

void kv_write(const KvWriteArgs& a, ThreadPool& pool) {
  for (const SequenceRows& s : a.sequences) {
    pool.run(s.num_rows, [&](int64_t r, int) {
      const int64_t row = (s.first_row + r) * a.row_stride, position = s.first_position + r;
      write_row(a.k + row, a.k_pages, s.page_table.data(), position);
      if (a.v != nullptr) write_row(a.v + row, a.v_pages, s.page_table.data(), position);
    });
  }
}

}  // namespace fp4moe::ref
