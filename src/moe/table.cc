#include "moe/table.h"

#include <string_view>

#include "base/check.h"
#include "kernels/device_moe_fp8.h"
#include "moe/transport/a2a.h"

namespace fp4moe {
namespace {

constexpr EnumSet<BatchLayout> kAnyLayout = {BatchLayout::kPacked, BatchLayout::kMasked};
constexpr EnumSet<Fp4Format> kAnyFormat = {Fp4Format::kMxfp4, Fp4Format::kNvfp4};
constexpr EnumSet<Fp4Format> kMxfp4 = {Fp4Format::kMxfp4}, kNvfp4 = {Fp4Format::kNvfp4};
constexpr EnumSet<Fp4Format> kUnquantised = {Fp4Format::kNone};  // unquantised checkpoints
constexpr EnumSet<Scheme> kAnyScheme = {Scheme::kW4A16, Scheme::kW4A4, Scheme::kW4A8};
constexpr EnumSet<DType> kBF16 = {DType::kBF16}, kBF16OrF32 = {DType::kBF16, DType::kF32};

constexpr EnumSet<Payload> kActOnly = {Payload::kAct};
constexpr EnumSet<Payload> kAnyPayload = {Payload::kAct, Payload::kFp8, Payload::kNvfp4};

constexpr A2aRow kA2a[] = {
    {"none",
     1,
     1,
     {BatchLayout::kPacked},
     CombineContract::kWeightsAtSource,
     kActOnly,
     make_local_transport,
     local_heap_bytes},
    {"none",
     2,
     kMaxRanks,
     {BatchLayout::kPacked},
     CombineContract::kPartialSums,
     kAnyPayload,
     make_none,
     none_heap_bytes},
    {"deepep",
     1,
     kMaxRanks,
     {BatchLayout::kMasked},
     CombineContract::kWeightsAtSource,
     kAnyPayload,
     make_deepep,
     deepep_heap_bytes},
    {"flashinfer",
     1,
     kMaxRanks,
     {BatchLayout::kPacked},
     CombineContract::kPartialSums,
     kAnyPayload,
     make_flashinfer,
     flashinfer_heap_bytes},
};

template <Isa isa>
const ExpertOps& cpu_ops() {
  return cpu_expert_ops(isa);
}

constexpr RunnerRow cpu_row(const char* name, Isa isa, EnumSet<DType> acts, const ExpertOps& (*ops)()) {
  return {.name = name,
          .device = DeviceKind::kCpu,
          .isa = isa,
          .layouts = kAnyLayout,
          .formats = kAnyFormat,
          .schemes = kAnyScheme,
          .act8 = Act8::kInt8Block,
          .act_dtypes = acts,
          .layers = &kHostLayers,
          .ops = ops,
          .pack = panels_pack,
          .scratch_bytes = panels_scratch_bytes,
          .run = panels_run};
}

const ExpertOps& best_cpu_ops() { return cpu_expert_ops(best_isa()); }

// Only the router uses its ops; ref_expert_ops also selects the reference's dense ops.
constexpr RunnerRow bf16_row(const char* name, EnumSet<DType> acts, const ExpertOps& (*ops)()) {
  return {.name = name,
          .device = DeviceKind::kCpu,
          .isa = Isa::kScalar,
          .layouts = kAnyLayout,
          .formats = kUnquantised,
          .schemes = {Scheme::kW4A16},
          .act8 = Act8::kInt8Block,
          .act_dtypes = acts,
          .layers = &kHostLayers,
          .ops = ops,
          .pack = bf16_pack,
          .scratch_bytes = bf16_scratch_bytes,
          .run = bf16_run};
}

// The reference for a GPU's w4a8. Automatic choice never selects it, because "ref" precedes it in the table.
constexpr RunnerRow fp8_oracle_row(const char* name) {
  RunnerRow row = cpu_row(name, Isa::kScalar, kBF16OrF32, ref_fp8_expert_ops);
  row.schemes = {Scheme::kW4A8};
  row.act8 = Act8::kFp8Token;
  row.pack = fp8_panels_pack;
  return row;
}

struct ComputeRange {
  int min, max;
};

constexpr RunnerRow gpu_row(const char* name, ComputeRange compute, EnumSet<Fp4Format> formats,
                            EnumSet<Scheme> schemes, const DeviceMoeOps* (*device_ops)(Scheme)) {
  return {.name = name,
          .device = DeviceKind::kCuda,
          .min_compute = compute.min,
          .max_compute = compute.max,
          .layouts = {BatchLayout::kPacked},
          .formats = formats,
          .schemes = schemes,
          .act8 = Act8::kFp8Token,
          .act_dtypes = kBF16,
          .layers = &kDeviceLayers,
          .device_ops = device_ops};
}

constexpr RunnerRow kRunner[] = {
    gpu_row("sm90", {90, 90}, kAnyFormat, kAnyScheme,
            [](Scheme scheme) { return scheme == Scheme::kW4A8 ? sm90_fp8_moe_ops() : sm90_moe_ops(); }),
    gpu_row("cuda_mma", {80, 9999}, kAnyFormat, {Scheme::kW4A16, Scheme::kW4A4},
            [](Scheme) { return fallback_moe_ops(); }),
    gpu_row("sm90_bf16", {90, 90}, kUnquantised, {Scheme::kW4A16},
            [](Scheme) { return sm90_bf16_moe_ops(); }),
    gpu_row("cuda_bf16", {80, 9999}, kUnquantised, {Scheme::kW4A16},
            [](Scheme) { return fallback_moe_ops(); }),
    cpu_row("cpu_amx", Isa::kAmx, kBF16, cpu_ops<Isa::kAmx>),
    cpu_row("cpu_avx512", Isa::kAvx512, kBF16, cpu_ops<Isa::kAvx512>),
    cpu_row("cpu_avx2", Isa::kAvx2, kBF16, cpu_ops<Isa::kAvx2>),
    cpu_row("cpu_scalar", Isa::kScalar, kBF16, cpu_ops<Isa::kScalar>),
    bf16_row("cpu_bf16", kBF16, best_cpu_ops),
    cpu_row("ref", Isa::kScalar, kBF16OrF32, ref_expert_ops),
    fp8_oracle_row("ref_fp8"),
    bf16_row("ref_bf16", kBF16OrF32, ref_expert_ops),
};

constexpr Numerics kBf16Acts;
constexpr Numerics kDirectW4A4 = {Scheme::kW4A4, ActScaleChoice::kScalar, ActScaleChoice::kScalar,
                                  IntermediateRounding::kDirect};
constexpr Numerics kBf16FirstW4A4 = {Scheme::kW4A4, ActScaleChoice::kScalar, ActScaleChoice::kScalar,
                                     IntermediateRounding::kBf16First};
constexpr Numerics kMaskedW4A4 = {Scheme::kW4A4, ActScaleChoice::kScalar, ActScaleChoice::kPerExpert,
                                  IntermediateRounding::kBf16First};

constexpr RunnerAlias kAliases[] = {
    {"marlin", kAnyFormat, kBf16Acts, kBf16Acts},
    {"triton_kernel", kMxfp4, kBf16Acts, kBf16Acts},
    {"flashinfer_mxfp4", kMxfp4, kBf16Acts, kBf16Acts},
    {"flashinfer_cutedsl", kNvfp4, kDirectW4A4, kMaskedW4A4},
    {"flashinfer_cutlass", kNvfp4, kBf16FirstW4A4, kBf16FirstW4A4},
    {"flashinfer_trtllm", kNvfp4, kBf16FirstW4A4, kBf16FirstW4A4},
};

constexpr bool same(const char* a, const char* b) { return std::string_view(a) == b; }

constexpr bool names_unique() {
  for (const RunnerRow& a : kRunner)
    for (const RunnerRow& b : kRunner)
      if (&a != &b && same(a.name, b.name)) return false;
  for (const RunnerAlias& a : kAliases)
    for (const RunnerRow& b : kRunner)
      if (same(a.name, b.name)) return false;
  return true;
}

constexpr bool every_runner_is_fed() {
  for (const RunnerRow& runner : kRunner) {
    bool fed = false;
    for (const A2aRow& a2a : kA2a) fed |= runner.layouts.meets(a2a.layouts);
    if (!fed) return false;
  }
  return true;
}

constexpr bool has_row(const char* name) {
  for (const RunnerRow& row : kRunner)
    if (same(row.name, name)) return true;
  return false;
}

// Name and number of ranks select a row, so rows with the same name must not overlap in ranks.
constexpr bool a2a_rows_disjoint() {
  for (const A2aRow& a : kA2a)
    for (const A2aRow& b : kA2a)
      if (&a != &b && same(a.name, b.name) && a.min_ranks <= b.max_ranks && b.min_ranks <= a.max_ranks)
        return false;
  return true;
}

static_assert(names_unique());
static_assert(a2a_rows_disjoint());
static_assert(every_runner_is_fed(), "a runner whose layout no transport produces can never run");
static_assert(has_row("ref") && has_row("ref_fp8"));

}  // namespace

constinit const LayerMakers kHostLayers = {make_host_layer, make_host_mlp, make_host_linear};
constinit const LayerMakers kDeviceLayers = {make_device_layer, make_device_mlp, make_device_linear};

std::span<const A2aRow> a2a_rows() { return kA2a; }
std::span<const RunnerRow> runner_rows() { return kRunner; }
std::span<const RunnerAlias> runner_aliases() { return kAliases; }

const RunnerRow& oracle_row(const Numerics& numerics) {
  for (const RunnerRow& row : kRunner)
    if (same(row.name, numerics.is_fp8() ? "ref_fp8" : "ref")) return row;
  FP4MOE_CHECK(false, "the table has no oracle");
}

}  // namespace fp4moe
