// deepep, low latency: one row per (token, slot), put directly into its expert's rows of a masked batch; each
// row's result is returned, and the source weights and sums them in FP32 in top-k order. The same code with
// the same rounding runs on any number of ranks, so their results are bit-identical.
#include <algorithm>

#include "base/check.h"
#include "moe/transport/a2a.h"
#include "moe/transport/a2a_exchange.h"

namespace fp4moe {
namespace {

WireFormat payload_format(const TransportOptions& o) {
  switch (o.payload) {
    case Payload::kFp8:
      return WireFormat::kFp8Block;
    case Payload::kNvfp4:
      return WireFormat::kNvfp4;
    case Payload::kAct:
      break;
  }
  return o.problem.act_dtype == DType::kBF16 ? WireFormat::kBf16 : WireFormat::kF32;
}

WireFormat result_format(const TransportOptions& o) {
  if (o.combine_payload == CombinePayload::kFp8) return WireFormat::kFp8Plain;
  return o.problem.act_dtype == DType::kBF16 ? WireFormat::kBf16 : WireFormat::kF32;
}

// Whether the wire rows can be used as the batch's rows without decoding.
bool in_place(const MoeProblem& p, const ExchangeSetup& s) {
  return s.payload == (p.act_dtype == DType::kBF16 ? WireFormat::kBf16 : WireFormat::kF32);
}

class DeepepTransport final : public ExchangeTransport {
 public:
  using ExchangeTransport::ExchangeTransport;

 protected:
  int64_t route(const int32_t* ids, Send* sends) const override {
    int64_t n = 0;
    for (int32_t k = 0; k < static_cast<int32_t>(options_.problem.top_k); ++k)
      if (const int64_t expert = unit_of(ids[k]); expert >= 0) sends[n++] = {expert, 1, k};
    return n;
  }

  int64_t unit_of(int32_t id) const override {
    return id >= 0 && id < options_.problem.num_physical() ? id : -1;
  }

  Status receive(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) override {
    const ExchangeShape& shape = setup_.shape;
    const int64_t L = shape.units_per_rank(), rows = L * shape.unit_rows, first = rank() * L;
    const DType dtype = options_.problem.act_dtype;
    const int64_t act_row = hidden() * dtype_bits(dtype) / 8;
    auto* counts = scratch.take<int64_t>(L);
    for (int64_t e = 0; e < L; ++e) counts[e] = plan_.unit_rows(first + e);
    uint8_t* x = const_cast<uint8_t*>(unit_data(first));
    float* scales = nullptr;
    if (!in_place(options_.problem, setup_)) {
      x = scratch.take<uint8_t>(rows * act_row);
      if (setup_.payload == WireFormat::kNvfp4) scales = scratch.take<float>(rows);
      for (int64_t e = 0; e < L; ++e) {
        const int64_t at = e * shape.unit_rows;
        decode_rows(unit_data(first + e), counts[e], x + at * act_row,
                    scales == nullptr ? nullptr : scales + at, pool);
      }
    }
    batch.layout = BatchLayout::kMasked;
    batch.combine = CombineContract::kWeightsAtSource;
    batch.num_experts = L;
    batch.counts = counts;
    batch.capacity = shape.unit_rows;
    batch.expected_m =
        (round_tokens().count * shape.num_ranks * shape.top_k + shape.num_units) / shape.num_units;
    batch.x = {x, dtype, rows, hidden()};
    batch.x_row_scales = scales;
    batch.x_is_nvfp4 = setup_.payload == WireFormat::kNvfp4;
    batch.y = scratch.take<float>(rows * hidden());
    return {};
  }

  const float* result_row(int source, int64_t unit, int64_t i, float*) const override {
    const int64_t row =
        unit % setup_.shape.units_per_rank() * setup_.shape.unit_rows + plan_.first_row(source, unit) + i;
    return batch_->y + row * hidden();
  }
};

}  // namespace

Result<ExchangeSetup> deepep_setup(const TransportOptions& o) {
  const MoeProblem& p = o.problem;
  ExchangeSetup s;
  s.shape.num_ranks = p.layout.tp;
  s.shape.group_ranks = p.layout.attention_tp();
  s.shape.num_units = p.num_physical();
  s.shape.top_k = p.top_k;
  s.payload = payload_format(o);
  s.results = result_format(o);
  s.parts = p.top_k;
  if (p.layout.ep != p.layout.tp)
    return unsupported("a2a deepep: ep=" + std::to_string(p.layout.ep) +
                       " with tp=" + std::to_string(p.layout.tp) +
                       "; whole experts on every rank need ep=" + std::to_string(p.layout.tp));
  const int64_t own = shard_blocks(o.max_group_rows, 1, p.layout.attention_tp(), 0).count;
  FP4MOE_RETURN_IF_ERROR(
      fit_exchange(o, {"deepep", 1, 1, p.layout.tp * own, own * std::min(p.top_k, p.num_experts)}, s));
  const int64_t L = s.shape.units_per_rank(), rows = L * s.shape.unit_rows;
  s.max_batch_rows = rows;
  s.scratch_bytes += Arena::padded(L * 8) + Arena::padded(rows * p.hidden_size * 4);
  if (!in_place(p, s)) s.scratch_bytes += Arena::padded(rows * p.hidden_size * dtype_bits(p.act_dtype) / 8);
  if (s.payload == WireFormat::kNvfp4) s.scratch_bytes += Arena::padded(rows * 4);
  return s;
}

int64_t deepep_heap_bytes(const TransportOptions& options) {
  const auto setup = deepep_setup(options);
  return setup.ok() ? setup->region_bytes : 0;
}

Result<std::unique_ptr<Transport>> make_deepep(const TransportOptions& options, Communicator* world,
                                               Communicator* attention) {
  FP4MOE_ASSIGN_OR_RETURN(const ExchangeSetup setup, deepep_setup(options));
  FP4MOE_ASSIGN_OR_RETURN(ExchangePort port, ExchangePort::make(world, options.problem.layout.tp,
                                                                options.region_offset, setup.region_bytes));
  return std::unique_ptr<Transport>(std::make_unique<DeepepTransport>(
      options, setup, std::move(port), attention == nullptr ? world : attention));
}

}  // namespace fp4moe
