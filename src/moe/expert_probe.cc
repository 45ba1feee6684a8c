#include "moe/expert_probe.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/device_memory.h"
#include "formats/bf16.h"

namespace fp4moe {
namespace {

// splitmix64.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Nearly normal with variance 1: the sum of four uniform numbers.
float noise(uint64_t seed, int64_t expert, int64_t row, int64_t col) {
  const uint64_t bits = mix(mix(mix(seed + static_cast<uint64_t>(expert)) + static_cast<uint64_t>(row)) +
                            static_cast<uint64_t>(col));
  constexpr double kScale = 1.7320508075688772 / 65536;  // four uniform numbers have variance 4 / 12
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<double>(bits >> (16 * i) & 0xffff);
  return round_to_bf16(static_cast<float>((sum - 2 * 65535) * kScale));
}

}  // namespace

Result<ExpertProbe> ExpertProbe::make(const RunnerRow& row, const MoeProblem& problem,
                                      const Numerics& numerics, const MoeWeightsView& weights,
                                      const ProbeShape& shape, ThreadPool& pool) {
  ExpertProbe probe;
  probe.row_ = &row;
  probe.problem_ = problem;
  probe.shape_ = shape;
  const int64_t num_experts = problem.local_experts().count;
  const int64_t rows = num_experts * shape.rows_per_expert, elems = rows * problem.hidden_size;
  FP4MOE_ASSIGN_OR_RETURN(probe.x_, Buffer::make(elems * dtype_bits(problem.act_dtype) / 8));
  FP4MOE_ASSIGN_OR_RETURN(probe.y_, Buffer::make(elems * int64_t{sizeof(float)}));
  if (row.device == DeviceKind::kCuda) {
    FP4MOE_RETURN_IF_ERROR(probe.make_on_device(numerics, weights, pool));
    return probe;
  }
  FP4MOE_ASSIGN_OR_RETURN(probe.experts_, row.pack(row, problem, numerics, weights, pool));
  FP4MOE_ASSIGN_OR_RETURN(probe.scratch_, Arena::make(row.scratch_bytes(problem, numerics, rows)));
  probe.offsets_.resize(static_cast<size_t>(num_experts) + 1);
  probe.counts_.resize(static_cast<size_t>(num_experts));
  return probe;
}

Status ExpertProbe::make_on_device(const Numerics& numerics, const MoeWeightsView& weights,
                                   ThreadPool& pool) {
  on_device_ = std::make_unique<OnDevice>();
  OnDevice& d = *on_device_;
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, DeviceContext::of(problem_.gpu()));
  const DeviceScope on_gpu(*gpu);
  FP4MOE_ASSIGN_OR_RETURN(d.stream, Stream::make());
  const StreamScope scope(d.stream);
  FP4MOE_ASSIGN_OR_RETURN(DeviceExperts experts, DeviceExperts::make(problem_, numerics, weights, pool));
  FP4MOE_ASSIGN_OR_RETURN(d.experts,
                          DeviceExpertRunner::make(*row_->device_ops(numerics.scheme), std::move(experts)));
  const int64_t rows = problem_.local_experts().count * shape_.rows_per_expert;
  FP4MOE_ASSIGN_OR_RETURN(d.x, Buffer::make(x_.num_bytes(), device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(d.ids, Buffer::make(rows * int64_t{sizeof(int32_t)}, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(d.y, Buffer::make(y_.num_bytes(), device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(d.scratch, Arena::make(d.experts.scratch_bytes(rows, 1), device_memory()));
  return {};
}

// Row r of expert e is a token that is routed to e only.
Status ExpertProbe::run_on_device(int64_t rows) {
  OnDevice& d = *on_device_;
  const StreamScope scope(d.stream);
  const int64_t tokens = problem_.local_experts().count * rows, elems = tokens * problem_.hidden_size;
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tokens; ++i) ids.push_back(static_cast<int32_t>(i / rows));
  FP4MOE_RETURN_IF_ERROR(device_memory().upload(d.x.data(), x_.data(), elems * int64_t{sizeof(bf16)}));
  FP4MOE_RETURN_IF_ERROR(device_memory().upload(d.ids.data(), ids.data(), tokens * int64_t{sizeof(int32_t)}));
  d.scratch.reset();
  d.experts.run_device_experts({d.x.data(), DType::kBF16, tokens, problem_.hidden_size},
                               {d.ids.as<int32_t>(), tokens}, nullptr, d.y.as<float>(), /*accumulate=*/false,
                               d.scratch);
  FP4MOE_RETURN_IF_ERROR(d.stream.synchronize());
  return device_memory().download(y_.data(), d.y.data(), elems * int64_t{sizeof(float)});
}

void ExpertProbe::fill(int64_t rows, ThreadPool& pool) {
  const int64_t num_experts = problem_.local_experts().count, h = problem_.hidden_size;
  pool.run(num_experts * rows, [&](int64_t i, int) {
    for (int64_t c = 0; c < h; ++c) {
      const float value = noise(shape_.seed, i / rows, i % rows, c);
      if (problem_.act_dtype == DType::kF32)
        x_.as<float>()[i * h + c] = value;
      else
        x_.as<bf16>()[i * h + c] = float_to_bf16(value);
    }
  });
  filled_rows_ = rows;
}

Result<std::span<const float>> ExpertProbe::run(int64_t rows, ThreadPool& pool) {
  FP4MOE_CHECK(
      rows >= 1 && rows <= shape_.rows_per_expert,
      std::to_string(rows) + " rows per expert; the maximum is " + std::to_string(shape_.rows_per_expert));
  const int64_t num_experts = problem_.local_experts().count, h = problem_.hidden_size;
  if (rows != filled_rows_) fill(rows, pool);
  const std::span<const float> y = {y_.as<float>(), static_cast<size_t>(num_experts * rows * h)};
  if (on_device_ != nullptr) {
    FP4MOE_RETURN_IF_ERROR(run_on_device(rows));
    return y;
  }
  for (int64_t e = 0; e <= num_experts; ++e) offsets_[static_cast<size_t>(e)] = e * rows;
  std::fill(counts_.begin(), counts_.end(), rows);
  const bool packed = shape_.layout == BatchLayout::kPacked;
  const ExpertBatch batch = {.layout = shape_.layout,
                             .num_experts = num_experts,
                             .offsets = packed ? offsets_.data() : nullptr,
                             .counts = packed ? nullptr : counts_.data(),
                             .capacity = packed ? 0 : rows,
                             .x = {x_.data(), problem_.act_dtype, num_experts * rows, h},
                             .y = y_.as<float>()};
  scratch_.reset();
  row_->run(*row_, {problem_, experts_, batch}, scratch_, pool);
  return y;
}

MoeWeightsView choose_experts_of(const MoeWeightsView& all, std::span<const int64_t> chosen,
                                 const Numerics& numerics) {
  float gate_up = 0, down = 0;
  for (const ExpertWeightsView& e : all.experts) {
    gate_up = std::max({gate_up, e.gate_input_scale, e.up_input_scale});
    down = std::max(down, e.down_input_scale);
  }
  MoeWeightsView some = all;
  some.experts.clear();
  for (const int64_t e : chosen) {
    ExpertWeightsView expert = all.experts[static_cast<size_t>(e)];
    if (numerics.a1 == ActScaleChoice::kScalar) expert.gate_input_scale = expert.up_input_scale = gate_up;
    if (numerics.a2 == ActScaleChoice::kScalar) expert.down_input_scale = down;
    some.experts.push_back(expert);
  }
  return some;
}

}  // namespace fp4moe
