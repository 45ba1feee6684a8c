#include "model/kv_cache.h"

#include <string>

#include "base/check.h"

namespace fp4moe {

KvCache::Shape KvCache::shape_of(const ModelConfig& config, const RankLayout& layout) {
  if (const auto latent = static_cast<int>(config.mla.kv_lora_rank); latent > 0)
    return {1, 1, latent + static_cast<int>(config.mla.qk_rope_head_dim), latent};
  const Shard heads =
      head_shard(config.num_heads, config.num_kv_heads, layout.attention_tp(), layout.attention_rank()).kv;
  const auto head_dim = static_cast<int>(config.head_dim);
  return {2, static_cast<int>(heads.count), head_dim, head_dim};
}

int64_t KvCache::bytes_per_page(const ModelConfig& config, DType dtype, int page_size,
                                const RankLayout& layout) {
  const Shape shape = shape_of(config, layout);
  return config.num_layers * shape.num_tensors * shape.num_heads * page_size * shape.row_dim *
         dtype_bits(dtype) / 8;
}

Result<KvCache> KvCache::make(const ModelConfig& config, DType dtype, int64_t num_pages, int page_size,
                              const RankLayout& layout, MemoryResource& memory) {
  const int64_t page_bytes = bytes_per_page(config, dtype, page_size, layout);
  if (num_pages <= 0 || page_size <= 0 || num_pages > INT64_MAX / page_bytes)
    return invalid_argument("KV pool of " + std::to_string(num_pages) + " pages of " +
                            std::to_string(page_bytes) + " bytes");
  KvCache kv;
  FP4MOE_ASSIGN_OR_RETURN(kv.buffer_, Buffer::make(num_pages * page_bytes, memory));
  kv.dtype_ = dtype;
  kv.num_pages_ = num_pages;
  kv.page_size_ = page_size;
  kv.shape_ = shape_of(config, layout);
  return kv;
}

KvPages KvCache::pages(int64_t layer, int which) const {
  const int64_t tensor_bytes = num_pages_ * shape_.num_heads * page_size_ *
                               static_cast<int64_t>(shape_.row_dim) * dtype_bits(dtype_) / 8;
  return {buffer_.data() + (layer * shape_.num_tensors + which) * tensor_bytes, dtype_, shape_.num_heads,
          page_size_, shape_.row_dim};
}

KvPages KvCache::v_pages(int64_t layer) const {
  if (shape_.num_tensors == 2) return pages(layer, 1);
  KvPages values = pages(layer, 0);
  values.row_stride = shape_.row_dim;
  values.head_dim = shape_.value_dim;
  return values;
}

}  // namespace fp4moe
