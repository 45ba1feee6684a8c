// flashinfer, one-sided: one row per (token, destination rank), with the token's ids and weights. The
// receiver groups rows by expert and returns one weighted sum per row (FP32 over its slots in top-k order,
// rounded to the wire format); the source adds the ranks' sums in ascending rank order. deterministic: each
// slot's row is returned instead, and the source weights and sums them in top-k order.
//
// a2a none between DP groups also uses this code, with f32 sums on the wire. If experts are sharded along I
// (ep = 1), every rank is a destination.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "moe/transport/a2a.h"
#include "moe/transport/a2a_exchange.h"

namespace fp4moe {
namespace {

class FlashinferTransport final : public ExchangeTransport {
 public:
  FlashinferTransport(const TransportOptions& options, const ExchangeSetup& setup, ExchangePort port,
                      Communicator* attention)
      : ExchangeTransport(options, setup, std::move(port), attention),
        local_(options.problem.local_experts()),
        first_slot_(static_cast<size_t>(setup.shape.num_ranks)) {}

 protected:
  int64_t unit_of(int32_t id) const override {
    return id >= 0 && id < options_.problem.num_experts ? id / local_.count : -1;
  }

  // Sends one row to each rank that has an expert of the token, in ascending rank order.
  int64_t route(const int32_t* ids, Send* sends) const override {
    const MoeProblem& p = options_.problem;
    int64_t n = 0;
    if (p.layout.ep == 1) {
      const auto slots = static_cast<int32_t>(
          std::count_if(ids, ids + p.top_k, [&](int32_t id) { return unit_of(id) >= 0; }));
      if (slots > 0)
        for (int32_t r = 0; r < p.layout.tp; ++r) sends_to(sends, n, r, slots);
      return n;
    }
    for (int64_t k = 0; k < p.top_k; ++k) {
      const int64_t unit = unit_of(ids[k]);
      if (unit < 0) continue;
      int64_t at = 0;
      while (at < n && sends[at].unit < unit) ++at;
      if (at < n && sends[at].unit == unit) {
        ++sends[at].slots;
        continue;
      }
      std::copy_backward(sends + at, sends + n, sends + n + 1);
      sends[at] = {unit, 1, 0};
      ++n;
    }
    for (int64_t i = 0; i < n; ++i) sends[i].part = static_cast<int32_t>(i);
    return n;
  }

  Status receive(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) override {
    const int64_t K = options_.problem.top_k, arrived = plan_.unit_rows(rank());
    take_tails(arrived, scratch);
    int64_t* offsets = scratch.take<int64_t>(local_.count + 1);
    int32_t* slot_of_row = scratch.take<int32_t>(arrived * K);
    row_of_slot_ = scratch.take<int32_t>(arrived * K);
    moe_sort({ids_, arrived * K, local_.first, local_.count, offsets, slot_of_row, row_of_slot_});
    FP4MOE_RETURN_IF_ERROR(check_slots(scratch));

    const int64_t rows = offsets[local_.count];
    const DType dtype = options_.problem.act_dtype;
    const int64_t act_row = hidden() * dtype_bits(dtype) / 8;
    uint8_t* x = scratch.take<uint8_t>(rows * act_row);
    float* scales = setup_.payload == WireFormat::kNvfp4 ? scratch.take<float>(rows) : nullptr;
    pool.run(rows, [&](int64_t r, int) {
      const uint8_t* wire = unit_data(rank()) + slot_of_row[r] / K * setup_.row_bytes;
      const float scale = decode_wire_row(setup_.payload, wire, hidden(), dtype, x + r * act_row);
      if (scales != nullptr) scales[r] = scale;
    });
    batch.combine =
        setup_.shape.slots_return ? CombineContract::kWeightsAtSource : CombineContract::kPartialSums;
    batch.num_experts = local_.count;
    batch.offsets = offsets;
    batch.x = {x, dtype, rows, hidden()};
    batch.x_row_scales = scales;
    batch.x_is_nvfp4 = setup_.payload == WireFormat::kNvfp4;
    batch.slot_of_row = slot_of_row;
    batch.row_of_slot = row_of_slot_;
    batch.y = scratch.take<float>(rows * hidden());
    return {};
  }

  const float* result_row(int source, int64_t, int64_t i, float* tmp) const override {
    if (setup_.shape.slots_return)
      return batch_->y + row_of_return_[first_slot_[static_cast<size_t>(source)] + i] * hidden();
    const int64_t K = options_.problem.top_k, slot = (plan_.first_row(source, rank()) + i) * K;
    std::fill(tmp, tmp + hidden(), 0.0f);
    for (int64_t k = 0; k < K; ++k) {
      if (row_of_slot_[slot + k] < 0) continue;
      const float* y = batch_->y + row_of_slot_[slot + k] * hidden();
      const float weight = weights_[slot + k];
      for (int64_t h = 0; h < hidden(); ++h) tmp[h] += weight * y[h];
    }
    return tmp;
  }

 private:
  static void sends_to(Send* sends, int64_t& n, int32_t unit, int32_t slots) {
    sends[n] = {unit, slots, static_cast<int32_t>(n)};
    ++n;
  }

  // Copies ids and weights out of the rows that arrived.
  void take_tails(int64_t arrived, Arena& scratch) {
    const int64_t K = options_.problem.top_k;
    ids_ = scratch.take<int32_t>(arrived * K);
    weights_ = scratch.take<float>(arrived * K);
    for (int64_t r = 0; r < arrived; ++r) {
      const uint8_t* tail = unit_data(rank()) + (r + 1) * setup_.row_bytes - K * 8;
      std::memcpy(ids_ + r * K, tail, static_cast<size_t>(K * 4));
      std::memcpy(weights_ + r * K, tail + K * 4, static_cast<size_t>(K * 4));
    }
  }

  // Checks that the received ids name exactly the announced number of slots, for which the buffers were
  // sized. Lists the batch's rows by source, and by slot within a source.
  Status check_slots(Arena& scratch) {
    const int64_t K = options_.problem.top_k;
    row_of_return_ = scratch.take<int32_t>(setup_.shape.unit_slots);
    int64_t slots = 0;
    for (int source = 0; source < setup_.shape.num_ranks; ++source) {
      const int64_t announced = plan_.slots(source, rank()), before = slots;
      first_slot_[static_cast<size_t>(source)] = before;
      const int64_t first = plan_.first_row(source, rank()) * K;
      for (int64_t s = first; s < first + plan_.rows(source, rank()) * K; ++s) {
        if (row_of_slot_[s] < 0) continue;
        if (slots - before < announced) row_of_return_[slots] = row_of_slot_[s];
        ++slots;
      }
      if (slots - before != announced)
        return bad_row(source, "ids name " + std::to_string(slots - before) +
                                   " local experts, announced: " + std::to_string(announced));
    }
    return {};
  }

  const Shard local_;
  int32_t* ids_ = nullptr;    // [rows that arrived, K]
  float* weights_ = nullptr;  // [rows that arrived, K]
  int32_t* row_of_slot_ = nullptr;
  int32_t* row_of_return_ = nullptr;
  std::vector<int64_t> first_slot_;  // [R]: index of each source's first slot in row_of_return_
};

WireFormat act_format(const MoeProblem& p) {
  return p.act_dtype == DType::kBF16 ? WireFormat::kBf16 : WireFormat::kF32;
}

// Completes a setup whose formats are already set.
Status complete(const TransportOptions& o, const char* protocol, ExchangeSetup& s) {
  const MoeProblem& p = o.problem;
  s.shape.num_ranks = static_cast<int>(p.layout.tp);
  s.shape.group_ranks = p.layout.attention_tp();
  s.shape.num_units = p.layout.tp;
  s.shape.top_k = p.top_k;
  s.shape.unit_name = "rank";
  s.shape.slots_return = o.deterministic && p.layout.ep == p.layout.tp;
  s.with_ids = true;
  s.weights_at_source = s.shape.slots_return;
  const int64_t K = p.top_k, ranks = p.layout.ep == 1 ? p.layout.tp : std::min<int64_t>(K, p.layout.tp);
  s.parts = s.shape.slots_return ? K : ranks;
  const int64_t own = shard_blocks(o.max_group_rows, 1, p.layout.attention_tp(), 0).count;
  // The average number of slots per row, rounded up, plus a quarter.
  const int64_t slots_per_row = std::min(K, K / p.layout.ep + 1 + K / (4 * p.layout.ep));
  FP4MOE_RETURN_IF_ERROR(fit_exchange(
      o,
      {protocol, slots_per_row, s.shape.slots_return ? slots_per_row : 1, p.layout.tp * own, own * s.parts},
      s));
  const int64_t rows = s.shape.unit_rows, slots = s.shape.unit_slots, L = p.local_experts().count;
  const auto padded = [](int64_t bytes) { return Arena::padded(bytes); };
  s.max_batch_rows = slots;
  s.scratch_bytes += 4 * padded(rows * K * 4) + padded((L + 1) * 8) + padded(slots * 4) +
                     padded(slots * p.hidden_size * dtype_bits(p.act_dtype) / 8) +
                     padded(slots * p.hidden_size * 4);
  if (s.payload == WireFormat::kNvfp4) s.scratch_bytes += padded(slots * 4);
  return {};
}

Result<std::unique_ptr<Transport>> make(const TransportOptions& options, const Result<ExchangeSetup>& setup,
                                        Communicator* world, Communicator* attention) {
  if (!setup.ok()) return setup.status();
  FP4MOE_ASSIGN_OR_RETURN(ExchangePort port, ExchangePort::make(world, options.problem.layout.tp,
                                                                options.region_offset, setup->region_bytes));
  return std::unique_ptr<Transport>(std::make_unique<FlashinferTransport>(
      options, setup.value(), std::move(port), attention == nullptr ? world : attention));
}

}  // namespace

Result<ExchangeSetup> flashinfer_setup(const TransportOptions& o) {
  const MoeProblem& p = o.problem;
  if (p.layout.ep != p.layout.tp)
    return unsupported("a2a flashinfer: ep=" + std::to_string(p.layout.ep) +
                       " with tp=" + std::to_string(p.layout.tp) +
                       "; whole experts on every rank need ep=" + std::to_string(p.layout.tp));
  ExchangeSetup s;
  s.payload = o.payload == Payload::kNvfp4 ? WireFormat::kNvfp4
              : o.payload == Payload::kFp8 ? WireFormat::kFp8Block
                                           : act_format(p);
  s.results = o.combine_payload == CombinePayload::kFp8 ? WireFormat::kFp8Plain : act_format(p);
  FP4MOE_RETURN_IF_ERROR(complete(o, "flashinfer", s));
  return s;
}

Result<ExchangeSetup> none_setup(const TransportOptions& o) {
  ExchangeSetup s;
  s.payload = o.payload == Payload::kNvfp4 ? WireFormat::kNvfp4
              : o.payload == Payload::kFp8 ? WireFormat::kFp8Block
                                           : act_format(o.problem);
  s.results = WireFormat::kF32;
  FP4MOE_RETURN_IF_ERROR(complete(o, "none", s));
  return s;
}

int64_t flashinfer_heap_bytes(const TransportOptions& options) {
  const auto setup = flashinfer_setup(options);
  return setup.ok() ? setup->region_bytes : 0;
}

Result<std::unique_ptr<Transport>> make_flashinfer(const TransportOptions& options, Communicator* world,
                                                   Communicator* attention) {
  return make(options, flashinfer_setup(options), world, attention);
}

Result<std::unique_ptr<Transport>> make_none_between_groups(const TransportOptions& options,
                                                            Communicator* world, Communicator* attention) {
  return make(options, none_setup(options), world, attention);
}

}  // namespace fp4moe
