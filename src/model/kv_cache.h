// KvCache: the pages that hold keys and values of all sequences, for every layer.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "io/model_config.h"
#include "kernels/ops.h"

namespace fp4moe {

// A page holds page_size tokens of one sequence in every layer. Who owns which page is the engine's matter.
class KvCache {
 public:
  static Result<KvCache> make(const ModelConfig& config, DType dtype, int64_t num_pages, int page_size);
  static int64_t bytes_per_page(const ModelConfig& config, DType dtype, int page_size);

  KvPages k_pages(int64_t layer) const { return pages(layer, 0); }
  KvPages v_pages(int64_t layer) const { return pages(layer, 1); }
  int64_t num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int64_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  KvPages pages(int64_t layer, int which) const;
  Buffer buffer_;  // [num_layers, 2 (k, v), num_pages, num_kv_heads, page_size, head_dim] of dtype
  DType dtype_ = DType::kBF16;
  int64_t num_pages_ = 0;
  int page_size_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
};

}  // namespace fp4moe
