#include "model/kv_cache.h"

#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {

KvCache::Shape KvCache::shape_of(const ModelConfig& config, const RankLayout& layout) {
  if (const auto latent = static_cast<int>(config.mla.kv_lora_rank); latent > 0)
    return {1, 1, latent + static_cast<int>(config.mla.qk_rope_head_dim), latent, 0, 1};
  const Shard heads =
      head_shard(config.num_heads, config.num_kv_heads, layout.attention_tp(), layout.attention_rank()).kv;
  const auto head_dim = static_cast<int>(config.head_dim);
  return {2,        static_cast<int>(heads.count), head_dim,
          head_dim, static_cast<int>(heads.first), static_cast<int>(config.num_kv_heads)};
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
                            std::to_string(page_bytes) + " bytes is empty or too large");
  KvCache kv;
  FP4MOE_ASSIGN_OR_RETURN(kv.buffer_, Buffer::make(num_pages * page_bytes, memory));
  kv.dtype_ = dtype;
  kv.num_layers_ = config.num_layers;
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

int64_t KvCache::token_bytes() const {
  return num_layers_ * shape_.num_tensors * shape_.all_heads * shape_.row_dim * dtype_bits(dtype_) / 8;
}

void KvCache::check_page(int64_t page, int64_t num_tokens) const {
  FP4MOE_CHECK(page >= 0 && page < num_pages_ && num_tokens >= 0 && num_tokens <= page_size_,
               "page " + std::to_string(page) + " of " + std::to_string(num_pages_) + ", " +
                   std::to_string(num_tokens) + " tokens");
}

// Calls copy_row(row in the page, offset in canonical form, bytes) for all of this rank's rows.
template <class CopyRow>
void KvCache::for_rows(int64_t page, int64_t num_tokens, const CopyRow& copy_row) const {
  check_page(page, num_tokens);
  const int64_t row_bytes = int64_t{shape_.row_dim} * dtype_bits(dtype_) / 8;
  for (int64_t tensor = 0; tensor < num_layers_ * shape_.num_tensors; ++tensor)
    for (int64_t head = 0; head < shape_.num_heads; ++head)
      for (int64_t token = 0; token < num_tokens; ++token) {
        const int64_t row = ((tensor * num_pages_ + page) * shape_.num_heads + head) * page_size_ + token;
        const int64_t canonical = (tensor * num_tokens + token) * shape_.all_heads + shape_.first_head + head;
        copy_row(buffer_.data() + row * row_bytes, canonical * row_bytes, static_cast<size_t>(row_bytes));
      }
}

void KvCache::read_page(int64_t page, int64_t num_tokens, uint8_t* canonical) const {
  for_rows(page, num_tokens, [&](const uint8_t* row, int64_t offset, size_t num_bytes) {
    std::memcpy(canonical + offset, row, num_bytes);
  });
}

void KvCache::write_page(int64_t page, int64_t num_tokens, const uint8_t* canonical) const {
  for_rows(page, num_tokens, [&](uint8_t* row, int64_t offset, size_t num_bytes) {
    std::memcpy(row, canonical + offset, num_bytes);
  });
}

KvPageCopyArgs KvCache::page_copy(int64_t page, int64_t num_tokens, uint8_t* canonical) const {
  check_page(page, num_tokens);
  FP4MOE_CHECK(shape_.num_heads == shape_.all_heads, "page_copy() needs a rank that has all KV heads");
  return {.pages = buffer_.data(),
          .canonical = canonical,
          .num_tensors = num_layers_ * shape_.num_tensors,
          .num_pages = num_pages_,
          .num_heads = shape_.num_heads,
          .page_size = page_size_,
          .row_bytes = int64_t{shape_.row_dim} * dtype_bits(dtype_) / 8,
          .page = page,
          .num_tokens = num_tokens};
}

KvPages KvCache::v_pages(int64_t layer) const {
  if (shape_.num_tensors == 2) return pages(layer, 1);
  KvPages values = pages(layer, 0);
  values.row_stride = shape_.row_dim;
  values.head_dim = shape_.value_dim;
  return values;
}

}  // namespace fp4moe
