// KvCache: the pages with the keys and values of all sequences and layers.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "io/config/model_config.h"
#include "kernels/device_copy.h"
#include "kernels/ops.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

// A page holds page_size tokens of one sequence in every layer: this rank's KV heads or, with latent
// attention, each token's latent (which is also the value) and rotary key. The engine assigns pages.
class KvCache {
 public:
  static Result<KvCache> make(const ModelConfig& config, DType dtype, int64_t num_pages, int page_size,
                              const RankLayout& layout = {}, MemoryResource& memory = host_memory());
  static int64_t bytes_per_page(const ModelConfig& config, DType dtype, int page_size,
                                const RankLayout& layout = {});

  // Copy a page's first num_tokens tokens to and from canonical form, which does not depend on the sharding
  // of heads: [num_layers, num_tensors, num_tokens, all KV heads, row_dim]. Only this rank's heads are
  // copied. The pages must be in host memory; copy_kv_page() does the same for pages in GPU memory.
  void read_page(int64_t page, int64_t num_tokens, uint8_t* canonical) const;
  void write_page(int64_t page, int64_t num_tokens, const uint8_t* canonical) const;
  // Arguments for copy_kv_page(); the caller sets `to_device`. Precondition: this rank has all KV heads.
  KvPageCopyArgs page_copy(int64_t page, int64_t num_tokens, uint8_t* canonical) const;
  // Bytes of one token in canonical form.
  int64_t token_bytes() const;

  KvPages k_pages(int64_t layer) const { return pages(layer, 0); }
  KvPages v_pages(int64_t layer) const;
  int64_t num_pages() const { return num_pages_; }
  int page_size() const { return page_size_; }
  int64_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  // A token's data in one layer: num_heads rows of row_dim in each of num_tensors tensors.
  struct Shape {
    int num_tensors = 2;  // 2: keys and values; 1: the values are the first value_dim columns of the keys
    int num_heads = 0, row_dim = 0, value_dim = 0;
    int first_head = 0,
        all_heads = 0;  // this rank has heads [first_head, first_head + num_heads) of all_heads
  };
  static Shape shape_of(const ModelConfig& config, const RankLayout& layout);
  KvPages pages(int64_t layer, int which) const;
  void check_page(int64_t page, int64_t num_tokens) const;
  template <class CopyRow>
  void for_rows(int64_t page, int64_t num_tokens, const CopyRow& copy_row) const;
  Buffer buffer_;  // [num_layers, num_tensors, num_pages, num_heads, page_size, row_dim] of dtype
  DType dtype_ = DType::kBF16;
  int64_t num_layers_ = 0, num_pages_ = 0;
  int page_size_ = 0;
  Shape shape_;
};

}  // namespace fp4moe
