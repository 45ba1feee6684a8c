// The single-rank transport: groups rows by expert in this rank's memory, in one round.
#include <algorithm>
#include <cstring>

#include "base/run_ranges.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

constexpr int64_t kRowsPerChunk = 32;

class LocalTransport final : public Transport {
 public:
  explicit LocalTransport(const TransportOptions& options)
      : problem_(options.problem), max_rows_(options.max_group_rows) {}

  Shard own_rows(int64_t group_rows) const override { return {0, group_rows}; }
  int64_t max_batch_rows() const override { return max_rows_ * problem_.top_k; }

  int64_t scratch_bytes() const override {
    const int64_t slots = max_batch_rows(), h = problem_.hidden_size;
    return Arena::padded((problem_.num_experts + 1) * 8) + 2 * Arena::padded(slots * 4) +
           Arena::padded(slots * h * act_bytes()) + Arena::padded(slots * h * 4) +
           Arena::padded(max_rows_ * h * 4);
  }

  Status begin(const TransportInput& input, Arena& scratch, ThreadPool&) override {
    input_ = input;
    const int64_t slots = input.x.rows * problem_.top_k;
    offsets_ = scratch.take<int64_t>(problem_.num_experts + 1);
    slot_of_row_ = scratch.take<int32_t>(slots);
    row_of_slot_ = scratch.take<int32_t>(slots);
    sums_ = scratch.take<float>(input.x.rows * problem_.hidden_size);
    moe_sort({input.ids, slots, 0, problem_.num_experts, offsets_, slot_of_row_, row_of_slot_});
    done_ = false;
    return {};
  }

  Result<bool> next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) override {
    if (done_) return false;
    done_ = true;
    const int64_t rows = offsets_[problem_.num_experts], h = problem_.hidden_size;
    const int64_t row_bytes = h * act_bytes();
    uint8_t* x = scratch.take<uint8_t>(rows * row_bytes);
    const uint8_t* source = static_cast<const uint8_t*>(input_.x.data);
    run_ranges(pool, rows, kRowsPerChunk, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r)
        std::memcpy(x + r * row_bytes, source + slot_of_row_[r] / problem_.top_k * row_bytes,
                    static_cast<size_t>(row_bytes));
    });
    batch = {};
    batch.num_experts = problem_.num_experts;
    batch.offsets = offsets_;
    batch.x = {x, input_.x.dtype, rows, h};
    batch.slot_of_row = slot_of_row_;
    batch.row_of_slot = row_of_slot_;
    batch.y = scratch.take<float>(rows * h);
    return true;
  }

  // sums[t] = sum over k, in top-k order, of weight * y, without dropped slots.
  Status combine(const ExpertBatch& batch, Arena&, ThreadPool& pool) override {
    run_ranges(pool, input_.x.rows, kRowsPerChunk, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) sum_token(batch.y, t);
    });
    return {};
  }

  Status finish(float* out, ThreadPool& pool) override {
    const int64_t h = problem_.hidden_size;
    run_ranges(pool, input_.x.rows, kRowsPerChunk, [&](int64_t first, int64_t last) {
      for (int64_t i = first * h; i < last * h; ++i) out[i] += sums_[i];
    });
    return {};
  }

 private:
  int64_t act_bytes() const { return dtype_bits(problem_.act_dtype) / 8; }

  void sum_token(const float* rows, int64_t t) {
    constexpr int64_t kColumns = 64;  // as many sums as fit in registers
    const int64_t hidden = problem_.hidden_size, top_k = problem_.top_k;
    for (int64_t h = 0; h < hidden; h += kColumns) {
      const int64_t n = std::min(kColumns, hidden - h);
      float sum[kColumns] = {};
      for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
        if (row_of_slot_[slot] < 0) continue;
        const float* y = rows + row_of_slot_[slot] * hidden + h;
        for (int64_t i = 0; i < n; ++i) sum[i] += input_.weights[slot] * y[i];
      }
      std::copy_n(sum, n, sums_ + t * hidden + h);
    }
  }

  const MoeProblem problem_;
  const int64_t max_rows_;
  // State of the current exchange; the memory belongs to the layer's arena.
  TransportInput input_;
  int64_t* offsets_ = nullptr;
  int32_t* slot_of_row_ = nullptr;
  int32_t* row_of_slot_ = nullptr;
  float* sums_ = nullptr;  // [T, H]
  bool done_ = true;
};

}  // namespace

Result<std::unique_ptr<Transport>> make_local_transport(const TransportOptions& options, Communicator*,
                                                        Communicator*) {
  return std::unique_ptr<Transport>(std::make_unique<LocalTransport>(options));
}

int64_t local_heap_bytes(const TransportOptions&) { return 0; }

}  // namespace fp4moe
