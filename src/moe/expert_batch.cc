#include "moe/expert_batch.h"

#include <algorithm>

namespace fp4moe {

void moe_sort(const ExpertSortArgs& a) {
  for (int64_t e = 0; e <= a.num_experts; ++e) a.offsets[e] = 0;
  const auto local = [&](int64_t slot) {
    const int64_t e = a.ids[slot] - a.first_expert;
    return e >= 0 && e < a.num_experts ? e : -1;
  };
  for (int64_t s = 0; s < a.num_slots; ++s)
    if (const int64_t e = local(s); e >= 0) ++a.offsets[e + 1];
  for (int64_t e = 0; e < a.num_experts; ++e) a.offsets[e + 1] += a.offsets[e];
  // offsets[e] is the cursor of expert e and ends at the next expert's start; then shift by one.
  for (int64_t s = 0; s < a.num_slots; ++s) {
    const int64_t e = local(s);
    a.row_of_slot[s] = e < 0 ? -1 : static_cast<int32_t>(a.offsets[e]++);
    if (e >= 0) a.slot_of_row[a.row_of_slot[s]] = static_cast<int32_t>(s);
  }
  for (int64_t e = a.num_experts; e > 0; --e) a.offsets[e] = a.offsets[e - 1];
  a.offsets[0] = 0;
}

MoeTiles moe_sort_tiles(const MoeTileArgs& a) {
  MoeTiles tiles;
  for (int64_t s = 0; s < a.num_slots; ++s) a.permuted_of_slot[s] = -1;
  for (int64_t e = 0; e < a.num_experts; ++e) {
    const int64_t count = a.offsets[e + 1] - a.offsets[e], first = tiles.num_tiles * a.tile;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t slot = a.slot_of_row[a.offsets[e] + i];
      a.permuted_of_slot[slot] = static_cast<int32_t>(first + i);
      a.slot_of_permuted[first + i] = slot;
    }
    for (int64_t done = 0; done < count; done += a.tile, ++tiles.num_tiles) {
      a.expert_of_tile[tiles.num_tiles] = static_cast<int32_t>(e);
      a.row_limit_of_tile[tiles.num_tiles] = static_cast<int32_t>(first + std::min(done + a.tile, count));
    }
  }
  tiles.num_padded_rows = tiles.num_tiles * a.tile;
  return tiles;
}

}  // namespace fp4moe
