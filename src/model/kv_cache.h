// KvCache: the pages with the keys and values of all sequences and layers.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "fp4moe/status.h"
#include "io/config/model_config.h"
#include "kernels/device_copy.h"
#include "kernels/ops.h"
#include "model/kv_window.h"
#include "model/state_cache.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

// A page holds page_size tokens of one sequence in every layer of its group (model/kv_window.h): this rank's
// KV heads or, with latent attention, each token's latent (which is also the value) and rotary key. The
// engine assigns pages. Layers with states have slots in a StateCache instead.
class KvCache {
 public:
  // counts.window = 0: all layers are in the full group, whatever their windows are. kInvalidArgument: counts
  // of pages or slots that the model's layers cannot use.
  static Result<KvCache> make(const ModelConfig& config, DType dtype, KvCounts counts, int page_size,
                              const RankLayout& layout = {}, MemoryResource& memory = host_memory());
  // Returns the bytes of a page of each group for a model with window pages, of a slot without replay rows,
  // and of a replay row; a page of all layers has the sum of the two pages.
  static KvCounts bytes_per_page(const ModelConfig& config, DType dtype, int page_size,
                                 const RankLayout& layout = {});
  // Returns the largest window of the layers if some layers have a window and others have none, otherwise 0:
  // then there is nothing to gain, or no layer whose pages record the prefixes.
  static int64_t window(const ModelConfig& config);

  // Copy a page's first num_tokens tokens to and from canonical form, which does not depend on the sharding
  // of heads: [layers of the group, num_tensors, num_tokens, all KV heads, row_dim]. Only this rank's heads
  // are copied. The pages must be in host memory; copy_kv_pages() does the same for pages in GPU memory.
  void read_page(PageId page, int64_t num_tokens, uint8_t* canonical) const;
  void write_page(PageId page, int64_t num_tokens, const uint8_t* canonical) const;
  // Arguments for copy_kv_pages(); the caller sets `to_device`.
  KvPageCopyArgs page_copy(PageId page, int64_t num_tokens, uint8_t* canonical) const;
  // Whether no lower rank of the group has the same heads or latents, so that a group whose ranks with
  // sends_pages() read a page reads each row once. Every rank must write a page.
  bool sends_pages() const { return shape_.is_first; }
  // Bytes of one token in canonical form, in all layers of the group.
  int64_t token_bytes(KvLayers layers = KvLayers::kFull) const;

  // Null data: the layer has a state instead.
  KvPages k_pages(int64_t layer) const { return pages(layer, 0); }
  KvPages v_pages(int64_t layer) const;
  // Null data: the layer has pages instead.
  StateSlots states(int64_t layer) const { return states_.layer(layer); }
  const StateCache& state_cache() const { return states_; }
  // The group of a layer, whose page table its pages need.
  KvLayers layers_of(int64_t layer) const { return places_[static_cast<size_t>(layer)].layers; }
  int64_t num_pages(KvLayers layers = KvLayers::kFull) const { return group(layers).num_pages; }
  int page_size() const { return page_size_; }
  int64_t num_bytes() const { return buffer_.num_bytes() + states_.num_bytes(); }

 private:
  // A token's data in one layer: num_heads rows of row_dim in each of num_tensors tensors.
  struct Shape {
    int num_tensors = 2;  // 2: keys and values; 1: the values are the first value_dim columns of the keys
    int num_heads = 0, row_dim = 0, value_dim = 0;
    int first_head = 0,
        all_heads = 0;     // this rank has heads [first_head, first_head + num_heads) of all_heads
    bool is_first = true;  // no lower rank of the group has these heads
  };
  static Shape shape_of(const ModelConfig& config, const RankLayout& layout);
  KvPages pages(int64_t layer, int which) const;
  // One group of layers: [num_layers, num_tensors, num_pages, num_heads, page_size, row_dim] of dtype.
  struct Group {
    int64_t num_layers = 0, num_pages = 0;
    int64_t offset = 0;  // bytes in buffer_
  };
  struct Place {
    KvLayers layers = KvLayers::kFull;
    int64_t index = 0;  // in its group; -1: the layer has no pages
  };
  const Group& group(KvLayers layers) const { return groups_[static_cast<size_t>(layers)]; }
  int64_t tensor_bytes(const Group& group) const;
  template <class CopyRow>
  static void for_rows(const KvPageCopyArgs& copy, const CopyRow& copy_row);
  Buffer buffer_;  // one group after the other
  DType dtype_ = DType::kBF16;
  int page_size_ = 0;
  Group groups_[2];            // by KvLayers
  std::vector<Place> places_;  // [num_layers]
  Shape shape_;
  StateCache states_;
};

}  // namespace fp4moe
