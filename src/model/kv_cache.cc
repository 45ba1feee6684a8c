#include "model/kv_cache.h"

#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {

int64_t KvCache::bytes_per_page(const ModelConfig& config, DType dtype, int page_size) {
  return config.num_layers * 2 * config.num_kv_heads * page_size * config.head_dim * dtype_bits(dtype) / 8;
}

Result<KvCache> KvCache::make(const ModelConfig& config, DType dtype, int64_t num_pages, int page_size) {
  const int64_t page_bytes = bytes_per_page(config, dtype, page_size);
  if (num_pages <= 0 || page_size <= 0 || num_pages > INT64_MAX / page_bytes)
    return invalid_argument("KV pool of " + std::to_string(num_pages) + " pages of " +
                            std::to_string(page_bytes) + " bytes");
  KvCache kv;
  FP4MOE_ASSIGN_OR_RETURN(kv.buffer_, Buffer::make(num_pages * page_bytes));
  kv.dtype_ = dtype;
  kv.num_pages_ = num_pages;
  kv.page_size_ = page_size;
  kv.num_kv_heads_ = static_cast<int>(config.num_kv_heads);
  kv.head_dim_ = static_cast<int>(config.head_dim);
  return kv;
}

KvPages KvCache::pages(int64_t layer, int which) const {
  const int64_t tensor_bytes =
      num_pages_ * num_kv_heads_ * page_size_ * static_cast<int64_t>(head_dim_) * dtype_bits(dtype_) / 8;
  return {buffer_.data() + (layer * 2 + which) * tensor_bytes, dtype_, num_kv_heads_, page_size_, head_dim_};
}

}  // namespace fp4moe
