#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {

void embed(const EmbedArgs& a, ThreadPool& pool) {
  pool.run(a.num_tokens, [&](int64_t t, int) {
    const bf16* row = a.table + a.ids[t] * a.hidden_size;
    for (int64_t i = 0; i < a.hidden_size; ++i) a.out[t * a.hidden_size + i] = bf16_to_float(row[i]);
  });
}

}  // namespace fp4moe::ref
