#include "model/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"

namespace fp4moe {

KvCache::Shape KvCache::shape_of(const ModelConfig& config, const RankLayout& layout) {
  const int rank = layout.attention_rank();
  if (const auto latent = static_cast<int>(config.mla.kv_lora_rank); latent > 0)
    return {1, 1, latent + static_cast<int>(config.mla.qk_rope_head_dim), latent, 0, 1, rank == 0};
  const auto heads_of = [&](int of_rank) {
    return head_shard(config.num_heads, config.num_kv_heads, layout.attention_tp(), of_rank).kv;
  };
  const Shard heads = heads_of(rank);
  const auto head_dim = static_cast<int>(config.head_dim);
  return {.num_tensors = 2,
          .num_heads = static_cast<int>(heads.count),
          .row_dim = head_dim,
          .value_dim = head_dim,
          .first_head = static_cast<int>(heads.first),
          .all_heads = static_cast<int>(config.num_kv_heads),
          .is_first = rank == 0 || heads_of(rank - 1).first != heads.first};
}

namespace {

bool has_window(const ModelConfig& config, int64_t layer) {
  return !config.has_state(layer) && layer < std::ssize(config.layer_windows) &&
         config.layer_windows[static_cast<size_t>(layer)] > 0;
}

}  // namespace

int64_t KvCache::window(const ModelConfig& config) {
  int64_t most = 0;
  bool some_are_full = false;
  for (int64_t layer = 0; layer < std::ssize(config.layer_windows); ++layer) {
    const int64_t window = config.layer_windows[static_cast<size_t>(layer)];
    some_are_full = some_are_full || (window == 0 && !config.has_state(layer));
    most = std::max(most, window);
  }
  return some_are_full ? most : 0;
}

KvCounts KvCache::bytes_per_page(const ModelConfig& config, DType dtype, int page_size,
                                 const RankLayout& layout) {
  const Shape shape = shape_of(config, layout);
  const int64_t layer_bytes =
      int64_t{shape.num_tensors} * shape.num_heads * page_size * shape.row_dim * dtype_bits(dtype) / 8;
  const bool splits = window(config) > 0;
  int64_t with_window = 0, with_state = 0;
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    with_window += splits && has_window(config, layer);
    with_state += config.has_state(layer);
  }
  return {(config.num_layers - with_window - with_state) * layer_bytes, with_window * layer_bytes,
          StateCache::bytes_per_slot(config, layout), StateCache::bytes_per_replay_row(config, layout)};
}

Result<KvCache> KvCache::make(const ModelConfig& config, DType dtype, KvCounts counts, int page_size,
                              const RankLayout& layout, MemoryResource& memory) {
  KvCounts page_bytes = bytes_per_page(config, dtype, page_size, layout);
  const bool splits = counts.window > 0;
  if (!splits) page_bytes = {page_bytes.full + page_bytes.window, 0};
  if (splits && page_bytes.window == 0)
    return invalid_argument("KV pool with " + std::to_string(counts.window) +
                            " window pages for a model without window layers");
  const int64_t most = INT64_MAX / 2;
  if (page_bytes.full == 0) return invalid_argument("KV pool for a model in which no layer attends");
  if (counts.full <= 0 || counts.window < 0 || page_size <= 0 || counts.full > most / page_bytes.full ||
      (splits && counts.window > most / page_bytes.window))
    return invalid_argument("KV pool of " + std::to_string(counts.full) + " pages of " +
                            std::to_string(page_bytes.full) + " bytes is empty or too large");
  KvCache kv;
  const int64_t full_bytes = counts.full * page_bytes.full;
  FP4MOE_ASSIGN_OR_RETURN(kv.buffer_, Buffer::make(full_bytes + counts.window * page_bytes.window, memory));
  kv.dtype_ = dtype;
  kv.page_size_ = page_size;
  kv.shape_ = shape_of(config, layout);
  kv.groups_[0] = {.num_pages = counts.full};
  kv.groups_[1] = {.num_pages = counts.window, .offset = full_bytes};
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.has_state(layer)) {
      kv.places_.push_back({KvLayers::kFull, -1});
      continue;
    }
    const KvLayers layers = splits && has_window(config, layer) ? KvLayers::kWindow : KvLayers::kFull;
    kv.places_.push_back({layers, kv.groups_[static_cast<size_t>(layers)].num_layers++});
  }
  FP4MOE_ASSIGN_OR_RETURN(kv.states_,
                          StateCache::make(config, {counts.slots, counts.replays}, layout, memory));
  return kv;
}

int64_t KvCache::tensor_bytes(const Group& group) const {
  return group.num_pages * shape_.num_heads * page_size_ * static_cast<int64_t>(shape_.row_dim) *
         dtype_bits(dtype_) / 8;
}

KvPages KvCache::pages(int64_t layer, int which) const {
  const Place& place = places_[static_cast<size_t>(layer)];
  if (place.index < 0) return {};
  const Group& of = group(place.layers);
  return {buffer_.data() + of.offset + (place.index * shape_.num_tensors + which) * tensor_bytes(of), dtype_,
          shape_.num_heads, page_size_, shape_.row_dim};
}

int64_t KvCache::token_bytes(KvLayers layers) const {
  return group(layers).num_layers * shape_.num_tensors * shape_.all_heads * shape_.row_dim *
         dtype_bits(dtype_) / 8;
}

// Calls copy_row(row in the page, offset in the canonical form, bytes) for each row.
template <class CopyRow>
void KvCache::for_rows(const KvPageCopyArgs& copy, const CopyRow& copy_row) {
  KvPageCopyArgs::Row row;
  for (row.tensor = 0; row.tensor < copy.num_tensors; ++row.tensor)
    for (row.head = 0; row.head < copy.num_heads; ++row.head)
      for (row.token = 0; row.token < copy.num_tokens; ++row.token)
        copy_row(copy.pages + copy.index_in_pages(row) * copy.row_bytes,
                 copy.index_in_canonical(row) * copy.row_bytes, static_cast<size_t>(copy.row_bytes));
}

void KvCache::read_page(PageId page, int64_t num_tokens, uint8_t* canonical) const {
  for_rows(page_copy(page, num_tokens, canonical), [&](const uint8_t* row, int64_t offset, size_t num_bytes) {
    std::memcpy(canonical + offset, row, num_bytes);
  });
}

void KvCache::write_page(PageId page, int64_t num_tokens, const uint8_t* canonical) const {
  for_rows(page_copy(page, num_tokens, nullptr), [&](uint8_t* row, int64_t offset, size_t num_bytes) {
    std::memcpy(row, canonical + offset, num_bytes);
  });
}

KvPageCopyArgs KvCache::page_copy(PageId page, int64_t num_tokens, uint8_t* canonical) const {
  const Group& of = group(page.layers);
  FP4MOE_CHECK(page.page >= 0 && page.page < of.num_pages && num_tokens >= 0 && num_tokens <= page_size_,
               "page " + std::to_string(page.page) + " of " + std::to_string(of.num_pages) + ", " +
                   std::to_string(num_tokens) + " tokens");
  return {.pages = buffer_.data() + of.offset,
          .canonical = canonical,
          .num_tensors = of.num_layers * shape_.num_tensors,
          .num_pages = of.num_pages,
          .num_heads = shape_.num_heads,
          .page_size = page_size_,
          .row_bytes = int64_t{shape_.row_dim} * dtype_bits(dtype_) / 8,
          .first_head = shape_.first_head,
          .all_heads = shape_.all_heads,
          .page = page.page,
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
