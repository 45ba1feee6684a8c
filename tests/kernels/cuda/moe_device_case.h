// Rows sorted by expert, shared by the tests of the GPU's quantisers and of its FP8 and fallback GEMMs.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/dense_case.h"
#include "kernels/device_moe.h"

namespace fp4moe {

// How a case's rows are distributed over its experts.
enum class Spread { kEven, kOneExpert, kSkewed, kIdleExperts };

// T tokens' slots sorted by expert, on the host and on the device; some slots have no local expert.
struct SortedRows {
  SortedRows(int64_t tokens, int64_t topk, int64_t experts, Spread spread, Random& random)
      : num_experts(experts),
        counts(static_cast<size_t>(experts)),
        offsets(static_cast<size_t>(experts) + 1),
        slot_of_row(static_cast<size_t>(tokens * topk), -7),
        row_of_slot(static_cast<size_t>(tokens * topk), -1) {
    std::vector<std::vector<int32_t>> slots(static_cast<size_t>(experts));
    for (int64_t slot = 0; slot < tokens * topk; ++slot) {
      const int64_t expert = draw(slot, spread, random);
      if (expert >= 0) slots[static_cast<size_t>(expert)].push_back(static_cast<int32_t>(slot));
    }
    int32_t row = 0;
    for (size_t e = 0; e < slots.size(); ++e) {
      offsets[e] = row;
      counts[e] = static_cast<int32_t>(slots[e].size());
      for (const int32_t slot : slots[e]) {
        slot_of_row[static_cast<size_t>(row)] = slot;
        row_of_slot[static_cast<size_t>(slot)] = row++;
      }
    }
    offsets.back() = row;
    device_counts.emplace(counts), device_offsets.emplace(offsets);
    device_slot_of_row.emplace(slot_of_row), device_row_of_slot.emplace(row_of_slot);
  }

  int64_t max_rows() const { return static_cast<int64_t>(slot_of_row.size()); }
  DeviceRows device_rows() const {
    DeviceRows rows;
    rows.max_rows = max_rows();
    rows.offsets = device_offsets->data();
    rows.counts = device_counts->data();
    rows.slot_of_row = device_slot_of_row->data();
    rows.row_of_slot = device_row_of_slot->data();
    return rows;
  }
  // Returns the expert of a packed row.
  int64_t expert_of(int64_t row) const {
    int64_t e = 0;
    while (offsets[static_cast<size_t>(e) + 1] <= row) ++e;
    return e;
  }

  int64_t num_experts;
  std::vector<int32_t> counts, offsets, slot_of_row, row_of_slot;

 private:
  int64_t draw(int64_t slot, Spread spread, Random& random) const {
    if (spread == Spread::kOneExpert) return num_experts - 1;
    if (spread == Spread::kSkewed && random.integer(0, 3) > 0) return 0;
    if (spread == Spread::kIdleExperts) return random.integer(0, 1) == 0 ? num_experts / 2 : -1;
    return slot % 7 == 3 ? -1 : random.integer(0, num_experts - 1);
  }
  std::optional<DeviceArray<int32_t>> device_counts, device_offsets, device_slot_of_row, device_row_of_slot;
};

}  // namespace fp4moe
