// PageTables: the KV pages of one sequence.
#pragma once

#include <cstdint>
#include <vector>

namespace fp4moe {

// Entry i of a table is the page of tokens i * page_size to (i + 1) * page_size - 1. Full layers need all
// tokens, window layers the last ones (model/kv_window.h):
//
//   full    p0 p1 p2 p3 p4 p5 p6 p7
//   window   0  0  0  0 w4 w5          entries before first_window are 0: their pages have been released
struct PageTables {
  std::vector<int32_t> full;
  std::vector<int32_t> window;  // empty if the model has no window layers; as a rule shorter than `full`,
                                // because its pages are allocated step by step
  int64_t first_window = 0;     // index of the first window page that the sequence still has

  int64_t num_window_pages() const { return std::ssize(window) - first_window; }
};

}  // namespace fp4moe
