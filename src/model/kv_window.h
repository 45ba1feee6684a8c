// KvWindow: which KV pages the layers with a sliding window need.
//
// A model whose layers differ has two groups of layers with separate pages: full layers, which hold the keys
// and values of all tokens of a sequence, and window layers, which hold those of the last tokens only.
#pragma once

#include <cstdint>

namespace fp4moe {

enum class KvLayers { kFull, kWindow };

// A number for each group of layers; window is 0 if all layers belong to the full group. slots: that of the
// layers with states (model/state_cache.h), which have slots instead of pages; 0 without such layers.
// replays: that of the replay rows in each slot, which hold drafts; 0 without speculative decoding.
struct KvCounts {
  int64_t full = 0, window = 0, slots = 0, replays = 0;
};

// A page number of one group; each group counts its pages from 0.
struct PageId {
  PageId(int32_t number, KvLayers of_layers = KvLayers::kFull) : page(number), layers(of_layers) {}
  int32_t page;
  KvLayers layers;
};

struct KvWindow {
  int64_t tokens = 0;  // a query attends to its own token and the tokens - 1 before it; 0: no window layers
  int page_size = 1;

  // Returns the index of the first page that a query at or after the beginning of position's page can read.
  // The page boundary counts, not `position` itself, because another sequence may continue from that
  // boundary; a sequence has no more pages at most because of that.
  int64_t first_page(int64_t position) const {
    const int64_t first = position / page_size * page_size - tokens + 1;
    return tokens == 0 || first < 0 ? 0 : first / page_size;
  }
  // Returns the most pages that a sequence has during a step with num_rows of its rows.
  int64_t most_pages(int64_t num_rows) const {
    const int64_t before = (tokens + page_size - 2) / page_size;
    return before + 1 + (num_rows + page_size - 2) / page_size;
  }
};

}  // namespace fp4moe
