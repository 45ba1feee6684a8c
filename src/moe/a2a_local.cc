// The transport of one rank: groups rows by expert in this rank's memory.
#include <algorithm>
#include <cstring>

#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kRowsPerChunk = 32;

int64_t act_bytes(DType dtype) { return dtype_bits(dtype) / 8; }

// body(first, last) over ranges of [0, n), in parallel.
template <class Body>
void for_ranges(int64_t n, ThreadPool& pool, const Body& body) {
  pool.run((n + kRowsPerChunk - 1) / kRowsPerChunk, [&](int64_t chunk, int) {
    body(chunk * kRowsPerChunk, std::min(n, (chunk + 1) * kRowsPerChunk));
  });
}

}  // namespace

int64_t local_scratch_bytes(const MoeProblem& p, int64_t max_tokens) {
  const int64_t slots = max_tokens * p.top_k;
  return Arena::padded((p.num_experts + 1) * 8) + 2 * Arena::padded(slots * 4) +
         Arena::padded(slots * p.hidden_size * act_bytes(p.act_dtype)) +
         Arena::padded(slots * p.hidden_size * 4);
}

ExpertBatch local_dispatch(const DispatchArgs& a, Arena& scratch, ThreadPool& pool) {
  const int64_t slots = a.x.rows * a.top_k, row_bytes = a.x.cols * act_bytes(a.x.dtype);
  int64_t* offsets = scratch.take<int64_t>(a.num_experts + 1);
  int32_t* slot_of_row = scratch.take<int32_t>(slots);
  int32_t* row_of_slot = scratch.take<int32_t>(slots);
  moe_sort({a.ids, slots, 0, a.num_experts, offsets, slot_of_row, row_of_slot});

  const int64_t rows = offsets[a.num_experts];
  uint8_t* x = scratch.take<uint8_t>(rows * row_bytes);
  const uint8_t* source = static_cast<const uint8_t*>(a.x.data);
  for_ranges(rows, pool, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      std::memcpy(x + r * row_bytes, source + slot_of_row[r] / a.top_k * row_bytes,
                  static_cast<size_t>(row_bytes));
  });
  ExpertBatch batch;
  batch.num_experts = a.num_experts;
  batch.offsets = offsets;
  batch.x = {x, a.x.dtype, rows, a.x.cols};
  batch.slot_of_row = slot_of_row;
  batch.row_of_slot = row_of_slot;
  batch.y = scratch.take<float>(rows * a.x.cols);
  return batch;
}

void local_combine(const ExpertBatch& batch, const CombineArgs& a, ThreadPool& pool) {
  for_ranges(a.num_tokens, pool, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      constexpr int64_t kColumns = 64;  // sums that stay in registers
      for (int64_t h = 0; h < a.hidden_size; h += kColumns) {
        const int64_t n = std::min(kColumns, a.hidden_size - h);
        float sum[kColumns] = {};
        for (int64_t k = 0; k < a.top_k; ++k) {
          const int64_t slot = t * a.top_k + k;
          if (batch.row_of_slot[slot] < 0) continue;
          const float* y = batch.y + batch.row_of_slot[slot] * a.hidden_size + h;
          for (int64_t i = 0; i < n; ++i) sum[i] += a.weights[slot] * y[i];
        }
        float* residual = a.residual + t * a.hidden_size + h;
        for (int64_t i = 0; i < n; ++i) residual[i] += sum[i];
      }
    }
  });
}

}  // namespace fp4moe
