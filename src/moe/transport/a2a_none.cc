// none, one group: every rank has all rows and runs its experts, or its parts of all experts; the ranks' FP32
// sums are all-reduced in rank order. deterministic (whole experts only): the slots' rows are all-reduced
// instead (only one rank contributes to each), and every rank sums them in top-k order; this moves K times
// the bytes. With several groups, rows are exchanged instead (a2a_flashinfer.cc).
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "moe/transport/a2a.h"
#include "moe/transport/a2a_exchange.h"

namespace fp4moe {
namespace {

// Tokens per all_reduce of slots.
constexpr int64_t kTokensPerReduce = 16;

struct NoneSizes {
  bool slots_reduce = false;
  int64_t round_slots = 0;  // maximum number of rows in a batch
  int64_t scratch_bytes = 0;
};

NoneSizes none_sizes(const TransportOptions& o) {
  const MoeProblem& p = o.problem;
  const int64_t H = p.hidden_size, K = p.top_k, T = o.max_group_rows;
  const int64_t act_row = H * dtype_bits(p.act_dtype) / 8, L = p.local_experts().count;
  NoneSizes s;
  s.slots_reduce = o.deterministic && p.layout.ep == p.layout.tp && p.layout.tp > 1;
  // The budget limits the batch's rows and results; without a budget, one round holds all of them.
  const int64_t within = o.memory_budget > 0 ? o.memory_budget / (act_row + H * 4) : T * K;
  s.round_slots = std::clamp(within, K, std::max(K, T * K));
  s.scratch_bytes = Arena::padded((s.slots_reduce ? T * K : T) * H * 4) + Arena::padded((L + 1) * 8) +
                    2 * Arena::padded(s.round_slots * K * 4) + Arena::padded(s.round_slots * act_row) +
                    Arena::padded(s.round_slots * H * 4);
  return s;
}

class NoneTransport final : public Transport {
 public:
  NoneTransport(const TransportOptions& options, Communicator* world)
      : options_(options),
        sizes_(none_sizes(options)),
        world_(world),
        local_(options.problem.local_experts()) {}

  Shard own_rows(int64_t group_rows) const override { return {0, group_rows}; }
  int64_t max_batch_rows() const override { return sizes_.round_slots; }
  int64_t scratch_bytes() const override { return sizes_.scratch_bytes; }

  Status begin(const TransportInput& input, Arena& scratch, ThreadPool&) override {
    FP4MOE_CHECK(input.x.rows == input.group_rows && input.group_rows <= options_.max_group_rows,
                 std::to_string(input.x.rows) +
                     " rows are not the whole batch, or exceed its limit; the batch has " +
                     std::to_string(input.group_rows));
    input_ = input;
    next_token_ = 0;
    const int64_t rows = input.x.rows * (sizes_.slots_reduce ? options_.problem.top_k : 1);
    sums_ = scratch.take<float>(rows * hidden());
    return {};
  }

  Result<bool> next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) override;
  Status combine(const ExpertBatch& batch, Arena& scratch, ThreadPool& pool) override;
  Status finish(float* out, ThreadPool& pool) override;

 private:
  int64_t hidden() const { return options_.problem.hidden_size; }
  OpName op(const char* name) const { return {name, input_.layer, geometry()}; }
  uint32_t geometry() const;
  int64_t local_slots(int64_t token) const;
  void sum_token(const ExpertBatch& batch, int64_t token, float* sum) const;
  Status sum_slots(float* out, ThreadPool& pool);

  const TransportOptions options_;
  const NoneSizes sizes_;
  Communicator* world_;
  const Shard local_;
  TransportInput input_;
  int64_t first_token_ = 0, next_token_ = 0;  // of the current round
  float* sums_ = nullptr;                     // [T, H], or [T * K, H] with slots_reduce
};

uint32_t NoneTransport::geometry() const {
  const MoeProblem& p = options_.problem;
  const int64_t numbers[] = {p.hidden_size,
                             p.intermediate_size,
                             p.num_experts,
                             p.top_k,
                             p.layout.tp,
                             p.layout.ep,
                             static_cast<int64_t>(p.act_dtype),
                             options_.deterministic,
                             input_.group_rows};
  return geometry_hash(numbers);
}

int64_t NoneTransport::local_slots(int64_t token) const {
  const int64_t K = options_.problem.top_k;
  const int32_t* ids = input_.ids + token * K;
  return std::count_if(ids, ids + K,
                       [&](int32_t id) { return id >= local_.first && id < local_.first + local_.count; });
}

Result<bool> NoneTransport::next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) {
  if (next_token_ == input_.x.rows) return false;
  const int64_t K = options_.problem.top_k;
  first_token_ = next_token_;
  for (int64_t slots = 0; next_token_ < input_.x.rows; ++next_token_) {
    slots += local_slots(next_token_);
    if (slots > sizes_.round_slots || next_token_ - first_token_ == sizes_.round_slots) break;
  }
  const int64_t slots = (next_token_ - first_token_) * K;
  int64_t* offsets = scratch.take<int64_t>(local_.count + 1);
  int32_t* slot_of_row = scratch.take<int32_t>(slots);
  int32_t* row_of_slot = scratch.take<int32_t>(slots);
  moe_sort(
      {input_.ids + first_token_ * K, slots, local_.first, local_.count, offsets, slot_of_row, row_of_slot});

  const int64_t rows = offsets[local_.count];
  const int64_t row_bytes = hidden() * dtype_bits(input_.x.dtype) / 8;
  uint8_t* x = scratch.take<uint8_t>(rows * row_bytes);
  const uint8_t* source = static_cast<const uint8_t*>(input_.x.data) + first_token_ * row_bytes;
  pool.run(rows, [&](int64_t r, int) {
    std::memcpy(x + r * row_bytes, source + slot_of_row[r] / K * row_bytes, static_cast<size_t>(row_bytes));
  });
  batch = {};
  batch.combine = CombineContract::kPartialSums;
  batch.num_experts = local_.count;
  batch.offsets = offsets;
  batch.x = {x, input_.x.dtype, rows, hidden()};
  batch.slot_of_row = slot_of_row;
  batch.row_of_slot = row_of_slot;
  batch.y = scratch.take<float>(rows * hidden());
  return true;
}

// Sums in FP32 in top-k order, skipping dropped slots and slots of other ranks' experts.
void NoneTransport::sum_token(const ExpertBatch& batch, int64_t token, float* sum) const {
  constexpr int64_t kColumns = 64;  // as many sums as fit in registers
  const int64_t K = options_.problem.top_k;
  for (int64_t h = 0; h < hidden(); h += kColumns) {
    const int64_t n = std::min(kColumns, hidden() - h);
    float columns[kColumns] = {};
    for (int64_t k = 0; k < K; ++k) {
      const int32_t row = batch.row_of_slot[(token - first_token_) * K + k];
      if (row < 0) continue;
      const float* y = batch.y + row * hidden() + h;
      const float weight = input_.weights[token * K + k];
      for (int64_t i = 0; i < n; ++i) columns[i] += weight * y[i];
    }
    std::memcpy(sum + h, columns, static_cast<size_t>(n) * sizeof(float));
  }
}

Status NoneTransport::combine(const ExpertBatch& batch, Arena&, ThreadPool& pool) {
  const int64_t K = options_.problem.top_k;
  pool.run(next_token_ - first_token_, [&](int64_t i, int) {
    const int64_t token = first_token_ + i;
    if (!sizes_.slots_reduce) return sum_token(batch, token, sums_ + token * hidden());
    for (int64_t k = 0; k < K; ++k) {
      float* out = sums_ + (token * K + k) * hidden();
      const int32_t row = batch.row_of_slot[i * K + k];
      if (row < 0)
        std::fill(out, out + hidden(), 0.0f);
      else
        std::copy_n(batch.y + row * hidden(), hidden(), out);
    }
  });
  return {};
}

// out += the weighted sum of the slot rows of all ranks.
Status NoneTransport::sum_slots(float* out, ThreadPool& pool) {
  const int64_t K = options_.problem.top_k, T = input_.x.rows, E = options_.problem.num_experts;
  for (int64_t first = 0; first < T; first += kTokensPerReduce) {
    const int64_t n = std::min(kTokensPerReduce, T - first);
    FP4MOE_RETURN_IF_ERROR(
        world_->all_reduce(op("sum of slots"), sums_ + first * K * hidden(), n * K * hidden()));
    pool.run(n, [&](int64_t i, int) {
      float* row = out + (first + i) * hidden();
      for (int64_t h = 0; h < hidden(); ++h) {
        float sum = 0;
        for (int64_t k = 0; k < K; ++k) {
          const int64_t slot = (first + i) * K + k;
          if (input_.ids[slot] < 0 || input_.ids[slot] >= E) continue;
          sum += input_.weights[slot] * sums_[slot * hidden() + h];
        }
        row[h] += sum;
      }
    });
  }
  return {};
}

Status NoneTransport::finish(float* out, ThreadPool& pool) {
  const int64_t T = input_.x.rows;
  if (!sizes_.slots_reduce)
    pool.run(T, [&](int64_t t, int) {
      for (int64_t i = t * hidden(); i < (t + 1) * hidden(); ++i) out[i] += sums_[i];
    });
  if (world_ != nullptr) FP4MOE_RETURN_IF_ERROR(world_->all_reduce(op("sum of ranks"), out, T * hidden()));
  return sizes_.slots_reduce ? sum_slots(out, pool) : Status();
}

}  // namespace

int64_t none_heap_bytes(const TransportOptions& options) {
  if (options.problem.layout.dp == 1) return 0;
  const auto setup = none_setup(options);
  return setup.ok() ? setup->region_bytes : 0;
}

Result<A2aBytes> a2a_bytes(const char* name, const TransportOptions& o) {
  const std::string_view protocol = name;
  if (protocol == "none" && o.problem.layout.dp == 1) {
    const NoneSizes s = none_sizes(o);
    return A2aBytes{.scratch = s.scratch_bytes, .rows = s.round_slots};
  }
  const auto setup = protocol == "deepep"       ? deepep_setup(o)
                     : protocol == "flashinfer" ? flashinfer_setup(o)
                                                : none_setup(o);
  if (!setup.ok()) return setup.status();
  return A2aBytes{setup->region_bytes, setup->record_bytes, setup->scratch_bytes, setup->sums_bytes,
                  setup->max_batch_rows};
}

Result<std::unique_ptr<Transport>> make_none(const TransportOptions& options, Communicator* world,
                                             Communicator* attention) {
  if (options.problem.layout.dp > 1) return make_none_between_groups(options, world, attention);
  return std::unique_ptr<Transport>(std::make_unique<NoneTransport>(options, world));
}

}  // namespace fp4moe
