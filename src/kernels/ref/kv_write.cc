#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

void write_row(const float* row, const KvPages& pages, const int32_t* page_table, int64_t position) {
  for (int h = 0; h < pages.num_kv_heads; ++h) {
    const int64_t offset = pages.offset(page_table, h, position);
    for (int d = 0; d < pages.head_dim; ++d)
      store_elem(pages.data, pages.dtype, offset + d, row[static_cast<int64_t>(h) * pages.head_dim + d]);
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
