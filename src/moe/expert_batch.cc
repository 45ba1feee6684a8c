#include "moe/expert_batch.h"

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
  // offsets[e] is the cursor of expert e and ends at the next expert's start; the last loop moves the offsets
  // up by one expert.
  for (int64_t s = 0; s < a.num_slots; ++s) {
    const int64_t e = local(s);
    a.row_of_slot[s] = e < 0 ? -1 : static_cast<int32_t>(a.offsets[e]++);
    if (e >= 0) a.slot_of_row[a.row_of_slot[s]] = static_cast<int32_t>(s);
  }
  for (int64_t e = a.num_experts; e > 0; --e) a.offsets[e] = a.offsets[e - 1];
  a.offsets[0] = 0;
}

}  // namespace fp4moe
