// Tests plan_moe(): automatic choices, forced names, and the text of every refusal.
#include "moe/plan/plan.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "moe/plan/legality.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

MoeProblem problem(Fp4Format format = Fp4Format::kMxfp4, Isa isa = Isa::kAvx512) {
  MoeProblem p;
  p.hidden_size = p.intermediate_size = 2880;
  p.num_experts = 32;
  p.top_k = 4;
  p.format = format;
  p.isa = isa;
  return p;
}

MoePlan plan(const MoeProblem& p, const MoeChoice& choice = {}) {
  Result<MoePlan> made = plan_moe(p, choice);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return made.ok() ? *made : MoePlan();
}

std::string refusal(const MoeProblem& p, const MoeChoice& choice,
                    StatusCode code = StatusCode::kUnsupported) {
  const Result<MoePlan> made = plan_moe(p, choice);
  EXPECT_FALSE(made.ok()) << describe(*made);
  EXPECT_EQ(made.status().code(), code);
  return made.status().message();
}

TEST(PlanTest, AutoTakesTheBestRowOfTheMachine) {
  for (Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4}) {
    EXPECT_STREQ(plan(problem(format, Isa::kAmx)).runner()->name, "cpu_amx");
    EXPECT_STREQ(plan(problem(format, Isa::kAvx512)).runner()->name, "cpu_avx512");
    EXPECT_STREQ(plan(problem(format, Isa::kAvx2)).runner()->name, "cpu_avx2");
    EXPECT_STREQ(plan(problem(format, Isa::kScalar)).runner()->name, "cpu_scalar");
  }
}

TEST(PlanTest, Float32ActivationsRunOnTheOracle) {
  MoeProblem p = problem();
  p.act_dtype = DType::kF32;
  const MoePlan made = plan(p);
  EXPECT_STREQ(made.runner()->name, "ref");
  EXPECT_NE(describe(made).find("refused  runner cpu_avx512: does not accept F32 activations, only BF16"),
            std::string::npos)
      << describe(made);
  EXPECT_EQ(refusal(p, {.runner = "cpu_avx512"}),
            "moe_runner_backend=cpu_avx512 does not accept F32 activations, only BF16; nearest legal choice: "
            "--moe-runner-backend ref");
}

TEST(PlanTest, EveryRowCanBeForcedAndForcingTakesEffect) {
  for (const RunnerRow& row : runner_rows()) {
    for (Fp4Format format : {Fp4Format::kMxfp4, Fp4Format::kNvfp4, Fp4Format::kNone}) {
      if (!row.formats.has(format)) continue;
      MoeProblem p = problem(format, Isa::kAmx);
      p.device = row.device;
      p.compute_capability = row.max_compute;
      const char* compute = row.schemes.has(Scheme::kW4A16) ? "auto" : "w4a8";
      const MoePlan made = plan(p, {.runner = row.name, .fp4_compute = compute});
      EXPECT_STREQ(made.runner()->name, row.name);
      EXPECT_EQ(made.verdicts().size(), runner_rows().size() - 1 + a2a_rows().size() - 1);
    }
  }
}

TEST(PlanTest, TheRunnerSaysWhatW4A8IsAndWhoJudgesIt) {
  const MoePlan cpu = plan(problem(), {.fp4_compute = "w4a8"});
  EXPECT_EQ(cpu.numerics().act8, Act8::kInt8Block);
  EXPECT_STREQ(oracle_row(cpu.numerics()).name, "ref");
  MoeProblem p = problem();
  p.device = DeviceKind::kCuda;
  p.compute_capability = 90;
  const MoePlan gpu = plan(p, {.fp4_compute = "w4a8"});
  EXPECT_EQ(gpu.numerics().act8, Act8::kFp8Token);
  EXPECT_EQ(numerics_text(gpu.numerics()), "w4a8 (FP8 tokens)");
  EXPECT_STREQ(oracle_row(gpu.numerics()).name, "ref_fp8");
}

TEST(PlanTest, SglangNamesResolveToNativeRows) {
  const MoePlan marlin = plan(problem(Fp4Format::kNvfp4), {.runner = "marlin"});
  EXPECT_STREQ(marlin.runner()->name, "cpu_avx512");
  EXPECT_EQ(marlin.note(), "marlin is w4a16, which runs here as cpu_avx512");
  for (const char* name : {"marlin", "triton_kernel", "flashinfer_mxfp4"})
    EXPECT_STREQ(plan(problem(), {.runner = name}).runner()->name, "cpu_avx512") << name;
  EXPECT_EQ(refusal(problem(Fp4Format::kNvfp4), {.runner = "triton_kernel"}),
            "moe_runner_backend=triton_kernel does not run nvfp4; nearest legal choice: --moe-runner-backend "
            "marlin");
}

TEST(PlanTest, DescribesChoiceRunnerUpAndRefusals) {
  EXPECT_EQ(
      describe(plan(problem(Fp4Format::kMxfp4, Isa::kAvx2), {.runner = "marlin"})),
      "MoE plan: mxfp4 w4a16, activations BF16, H=2880 I=2880 E=32 K=4, cpu avx2, fabric local, 1 rank\n"
      "  chosen   a2a    none\n"
      "  chosen   runner cpu_avx2 (marlin is w4a16, which runs here as cpu_avx2)\n"
      "  refused  a2a    none: connects 2 to 1024 ranks, but tp=1\n"
      "  refused  a2a    deepep: a2a=none was requested\n"
      "  refused  a2a    flashinfer: a2a=none was requested\n"
      "  refused  runner sm90: runs on cuda, but the device is cpu\n"
      "  refused  runner cuda_mma: runs on cuda, but the device is cpu\n"
      "  refused  runner sm90_bf16: runs on cuda, but the device is cpu\n"
      "  refused  runner cuda_bf16: runs on cuda, but the device is cpu\n"
      "  refused  runner cpu_amx: needs amx, but this CPU has avx2\n"
      "  refused  runner cpu_avx512: needs avx512, but this CPU has avx2\n"
      "  next     runner cpu_scalar: fits\n"
      "  refused  runner cpu_bf16: does not read mxfp4\n"
      "  also     runner ref: fits\n"
      "  refused  runner ref_fp8: does not compute w4a16\n"
      "  refused  runner ref_bf16: does not read mxfp4");
  EXPECT_EQ(describe(MoePlan()), "MoE plan: empty");
}

TEST(PlanTest, DescribesWhatEachRankHas) {
  const std::string text = describe(plan(problem(Fp4Format::kNvfp4), {.runner = "flashinfer_cutedsl",
                                                                      .a2a = "flashinfer",
                                                                      .tp = 2,
                                                                      .dp = 2,
                                                                      .enable_dp_attention = true,
                                                                      .flashinfer_combine = "fp8"}));
  for (const char* part :
       {"nvfp4 w4a4 (scalar a1, scalar a2, intermediate quantised from f32), activations BF16", ", 2 ranks\n",
        "chosen   a2a    flashinfer, nvfp4 rows, fp8 results\n",
        "ep=1 raised to tp=2 because a2a=flashinfer moves rows to whole experts",
        "layout   rank   0: experts [0, 16), I [0, 2880), group 0 of 2\n",
        "layout   rank   1: experts [16, 32), I [0, 2880), group 1 of 2"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin\n" << text;
}

// Shards are whole tiles of 64 columns if there are enough, otherwise half tiles or whole scale blocks.
TEST(PlanTest, TensorShardsAreWholeTiles) {
  MoeProblem narrow = problem();
  narrow.intermediate_size = 160;
  EXPECT_EQ(plan(narrow, {.tp = 4}).at_rank(0).problem().local_intermediate().count, 64);
  EXPECT_EQ(plan(narrow, {.tp = 4}).at_rank(3).problem().local_intermediate().count, 32);
  narrow.format = Fp4Format::kNvfp4;
  narrow.intermediate_size = 96;
  EXPECT_EQ(plan(narrow, {.tp = 2}).at_rank(0).problem().local_intermediate().count, 64);
  EXPECT_EQ(plan(narrow, {.tp = 2}).at_rank(1).problem().local_intermediate().count, 32);
  EXPECT_EQ(plan(narrow, {.tp = 4}).at_rank(2).problem().local_intermediate().count, 16);
  const MoePlan made = plan(problem(), {.tp = 4});
  const int64_t expected[] = {768, 704, 704, 704};
  for (int rank = 0; rank < 4; ++rank) {
    const MoeProblem p = made.at_rank(rank).problem();
    EXPECT_EQ(p.local_intermediate().count, expected[rank]);
    EXPECT_EQ(p.local_experts().count, 32);
  }
  EXPECT_TRUE(made.shared_expert_is_sharded());
  EXPECT_FALSE(plan(problem(), {.a2a = "deepep", .tp = 4}).shared_expert_is_sharded());
  EXPECT_FALSE(plan(problem(), {.tp = 4, .dp = 2, .enable_dp_attention = true}).shared_expert_is_sharded());
}

// ---- numerics -------------------------------------------------------------------------------------

TEST(PlanNumericsTest, NamesOfSglangsCarryTheirOwn) {
  constexpr auto kScalar = ActScaleChoice::kScalar, kPerExpert = ActScaleChoice::kPerExpert;
  constexpr auto kDirect = IntermediateRounding::kDirect, kBf16First = IntermediateRounding::kBf16First;
  const auto numerics = [](const MoeChoice& c) { return plan(problem(Fp4Format::kNvfp4), c).numerics(); };
  const Numerics direct = {Scheme::kW4A4, kScalar, kScalar, kDirect};
  const Numerics through_bf16 = {Scheme::kW4A4, kScalar, kScalar, kBf16First};
  const Numerics masked = {Scheme::kW4A4, kScalar, kPerExpert, kBf16First};
  EXPECT_EQ(numerics({}), Numerics());
  EXPECT_EQ(numerics({.runner = "marlin"}), Numerics());
  EXPECT_EQ(numerics({.fp4_compute = "w4a4"}), direct);
  EXPECT_EQ(numerics({.a2a = "deepep", .fp4_compute = "w4a4"}), direct);
  EXPECT_EQ(numerics({.runner = "flashinfer_cutedsl"}), direct);
  EXPECT_EQ(numerics({.runner = "flashinfer_cutedsl", .a2a = "flashinfer"}), direct);
  EXPECT_EQ(numerics({.runner = "flashinfer_cutedsl", .a2a = "deepep"}), masked);
  EXPECT_EQ(numerics({.runner = "flashinfer_cutlass"}), through_bf16);
  EXPECT_EQ(numerics({.runner = "flashinfer_trtllm", .a2a = "deepep"}), through_bf16);
  EXPECT_EQ(numerics({.fp4_compute = "w4a8"}).scheme, Scheme::kW4A8);
  const Numerics per_token = numerics({.runner = "flashinfer_cutlass", .act_scales = "per_token"});
  EXPECT_EQ(per_token.a1, ActScaleChoice::kPerToken);
  EXPECT_EQ(per_token.a2, ActScaleChoice::kPerToken);
  EXPECT_EQ(per_token.intermediate, kBf16First);
}

TEST(PlanNumericsTest, PerTokenScalesAreOfW4a4) {
  EXPECT_EQ(refusal(problem(Fp4Format::kNvfp4), {.act_scales = "per_token"}),
            "fp4_act_scales=per_token applies to w4a4 only, but fp4_compute is w4a16; nearest legal choice: "
            "--fp4-compute w4a4");
}

// ---- payloads -------------------------------------------------------------------------------------

TEST(PlanPayloadTest, QuantisedRowsTravelAsNvfp4WhereSglangDoesSo) {
  const auto payload = [](const MoeChoice& c) {
    return plan(problem(Fp4Format::kNvfp4), c).a2a_settings().payload;
  };
  EXPECT_EQ(payload({.runner = "flashinfer_cutedsl", .a2a = "flashinfer"}), Payload::kNvfp4);
  EXPECT_EQ(payload({.runner = "flashinfer_cutedsl", .a2a = "flashinfer", .flashinfer_payload = "bf16"}),
            Payload::kAct);
  EXPECT_EQ(payload({.runner = "flashinfer_cutedsl", .a2a = "deepep"}), Payload::kAct);
  EXPECT_EQ(payload({.a2a = "deepep", .deepep_payload = "fp8"}), Payload::kFp8);
  EXPECT_EQ(payload({.a2a = "deepep", .deepep_payload = "nvfp4"}), Payload::kNvfp4);
  EXPECT_EQ(payload({.a2a = "flashinfer"}), Payload::kAct);
  MoeChoice gathered = {.runner = "flashinfer_cutlass", .tp = 4, .dp = 4, .enable_dp_attention = true};
  EXPECT_EQ(payload(gathered), Payload::kNvfp4);
  gathered.disable_fp4_allgather = true;
  EXPECT_EQ(payload(gathered), Payload::kAct);
}

// ---- legality -------------------------------------------------------------------------------------

// Covers every supported combination of name, protocol and number of ranks.
TEST(PlanLegalityTest, EveryRunnerOverEveryProtocolOnOneTwoAndFourRanks) {
  const std::pair<Fp4Format, std::vector<std::string>> formats[] = {
      {Fp4Format::kNvfp4,
       {"flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_trtllm", "marlin", "auto", "ref"}},
      {Fp4Format::kMxfp4, {"flashinfer_mxfp4", "triton_kernel", "marlin", "auto", "ref"}}};
  for (const auto& [format, names] : formats)
    for (const std::string& name : names)
      for (const char* a2a : {"none", "deepep", "flashinfer"})
        for (int ranks : {1, 2, 4})
          for (int ep : {1, ranks})
            for (int dp : {1, ranks}) {
              const MoeChoice choice = {
                  .runner = name, .a2a = a2a, .tp = ranks, .ep = ep, .dp = dp, .enable_dp_attention = dp > 1};
              const auto made = plan_moe(problem(format), choice);
              ASSERT_TRUE(made.ok()) << made.status().to_string();
              EXPECT_EQ(made->problem().layout.ep, std::string(a2a) == "none" ? ep : ranks);
              EXPECT_GE(ranks, made->a2a()->min_ranks);
            }
}

TEST(PlanLegalityTest, RulesAreNamedAndExplained) {
  std::set<std::string> names;
  for (const LegalityRule& rule : legality_rules()) {
    EXPECT_TRUE(names.insert(rule.name).second) << rule.name;
    EXPECT_GT(std::string(rule.text).size(), 10u) << rule.name;
    EXPECT_TRUE(rule.check(problem(), {}).ok()) << rule.name << " refuses the defaults";
  }
}

TEST(PlanTest, SummaryTellsTheChoiceWhyNotABetterRowAndTheRunnerUp) {
  EXPECT_EQ(
      summary(plan(problem(Fp4Format::kMxfp4, Isa::kAvx2), {})),
      "w4a16 by cpu_avx2 over a2a none, fabric local; not cpu_amx: needs amx, but this CPU has avx2; not "
      "cpu_avx512: needs avx512, but this CPU has avx2; runner-up cpu_scalar");
  EXPECT_EQ(summary(MoePlan()), "nothing planned");
}

TEST(PlanRefusalTest, ForcedRowTheMachineCannotRun) {
  EXPECT_EQ(refusal(problem(), {.runner = "cpu_amx"}),
            "moe_runner_backend=cpu_amx needs amx, but this CPU has avx512; nearest legal choice: "
            "--moe-runner-backend cpu_avx512");
  EXPECT_EQ(refusal(problem(Fp4Format::kMxfp4, Isa::kAvx2), {.runner = "cpu_avx512"}),
            "moe_runner_backend=cpu_avx512 needs avx512, but this CPU has avx2; nearest legal choice: "
            "--moe-runner-backend cpu_avx2");
}

TEST(PlanRefusalTest, UnknownNamesListTheKnownOnes) {
  constexpr auto kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(refusal(problem(), {.runner = "triton"}, kInvalid),
            "unknown moe_runner_backend 'triton'; use auto, sm90, cuda_mma, sm90_bf16, cuda_bf16, cpu_amx, "
            "cpu_avx512, cpu_avx2, cpu_scalar, cpu_bf16, ref, ref_fp8, ref_bf16, marlin, "
            "triton_kernel, flashinfer_mxfp4, flashinfer_cutedsl, flashinfer_cutlass or flashinfer_trtllm");
  EXPECT_EQ(refusal(problem(), {.a2a = "pplx"}, kInvalid),
            "unknown moe_a2a_backend 'pplx'; use none, deepep or flashinfer");
  EXPECT_EQ(refusal(problem(), {.fp4_compute = "w8a8"}, kInvalid),
            "unknown fp4_compute 'w8a8'; use auto, w4a16, w4a4 or w4a8");
  EXPECT_EQ(refusal(problem(), {.fabric = "nccl"}, kInvalid),
            "unknown fabric 'nccl'; use auto, local, threads or mpi");
}

TEST(PlanRefusalTest, Mxfp4HasNoActivationScalesForW4a4) {
  EXPECT_EQ(
      refusal(problem(), {.fp4_compute = "w4a4"}),
      "fp4_compute=w4a4 needs calibrated activation scales, which an mxfp4 checkpoint does not have; nearest "
      "legal choice: --fp4-compute w4a16");
  EXPECT_EQ(
      refusal(problem(), {.runner = "flashinfer_cutedsl"}),
      "fp4_compute=w4a4 (implied by moe_runner_backend=flashinfer_cutedsl) needs calibrated activation "
      "scales, which an mxfp4 checkpoint does not have; nearest legal choice: --moe-runner-backend marlin "
      "--fp4-compute w4a16");
}

TEST(PlanRefusalTest, SchemeThatContradictsTheRunnersName) {
  EXPECT_EQ(
      refusal(problem(Fp4Format::kNvfp4), {.runner = "flashinfer_cutedsl", .fp4_compute = "w4a16"}),
      "fp4_compute=w4a16 contradicts moe_runner_backend=flashinfer_cutedsl, which computes w4a4; nearest "
      "legal choice: --moe-runner-backend auto");
  EXPECT_EQ(
      refusal(problem(Fp4Format::kNvfp4), {.runner = "marlin", .fp4_compute = "w4a4"}),
      "fp4_compute=w4a4 contradicts moe_runner_backend=marlin, which computes w4a16; nearest legal choice: "
      "--moe-runner-backend auto");
}

TEST(PlanRefusalTest, FabricsThatCannotBe) {
  EXPECT_EQ(refusal(problem(), {.fabric = "mpi"}),
            "fabric=mpi needs mpirun or srun, and neither started this process; nearest legal choice: "
            "--fabric local");
}

TEST(PlanRefusalTest, Parallelism) {
  EXPECT_EQ(refusal(problem(), {.tp = 0}, StatusCode::kInvalidArgument), "tp=0 must be between 1 and 1024");
  EXPECT_EQ(refusal(problem(), {.tp = 4, .dp = 3}),
            "dp=3 does not divide tp=4; nearest legal choice: --dp 2");
  EXPECT_EQ(refusal(problem(), {.tp = 4, .ep = 2}),
            "ep=2 is neither 1 nor tp=4; nearest legal choice: --ep 4");
  EXPECT_EQ(refusal(problem(), {.tp = 3, .ep = 3}),
            "ep=3 does not divide num_experts=32; nearest legal choice: --ep 1");
  EXPECT_EQ(refusal(problem(), {.a2a = "deepep", .tp = 6}),
            "ep=6 (raised to tp by a2a=deepep) does not divide num_experts=32; nearest legal choice: --tp 4");
  EXPECT_EQ(
      refusal(problem(), {.tp = 6, .deterministic = true}),
      "ep=6 (raised to tp by enable_deterministic_inference) does not divide num_experts=32; nearest legal "
      "choice: --tp 4");
  EXPECT_EQ(refusal(problem(), {.tp = 4, .dp = 2}),
            "dp=2 requires enable_dp_attention (without it, dp would start 2 servers); nearest legal choice: "
            "--dp 2 --enable-dp-attention");
  MoeProblem narrow = problem();
  narrow.intermediate_size = 96;
  EXPECT_EQ(
      refusal(narrow, {.tp = 4}),
      "tp=4 shards intermediate_size=96 into 3 whole scale blocks of 32, which leaves ranks without one; "
      "nearest legal choice: --ep 4");
  narrow.num_experts = 6;
  EXPECT_EQ(
      refusal(narrow, {.tp = 4}),
      "tp=4 shards intermediate_size=96 into 3 whole scale blocks of 32, which leaves ranks without one; "
      "nearest legal choice: --tp 3");
  EXPECT_EQ(refusal(problem(), {.a2a = "deepep", .deepep_mode = "normal"}),
            "deepep_mode=normal has no masked batches, which FP4 runners require from deepep; nearest legal "
            "choice: --deepep-mode low_latency");
  EXPECT_TRUE(plan_moe(problem(), {.enable_dp_attention = true}).ok());  // one group: nothing to do
  EXPECT_EQ(
      refusal(problem(), {.a2a = "flashinfer", .tp = 4, .dp = 2, .enable_dp_attention = true}),
      "a2a=flashinfer with DP attention needs dp = tp, but dp=2 and tp=4; nearest legal choice: --dp 4");
}

TEST(PlanRefusalTest, SizesThatMakeNoSense) {
  const auto with = [](int64_t MoeProblem::*field, int64_t value, Fp4Format format = Fp4Format::kMxfp4) {
    MoeProblem p = problem(format);
    p.*field = value;
    return refusal(p, {}, StatusCode::kInvalidArgument);
  };
  EXPECT_EQ(with(&MoeProblem::hidden_size, 48),
            "hidden_size=48 must be a multiple of mxfp4's block size 32 and between 32 and 1048576");
  EXPECT_EQ(with(&MoeProblem::intermediate_size, 8, Fp4Format::kNvfp4),
            "intermediate_size=8 must be a multiple of nvfp4's block size 16 and between 16 and 1048576");
  EXPECT_EQ(
      with(&MoeProblem::hidden_size, int64_t{1} << 40),
      "hidden_size=1099511627776 must be a multiple of mxfp4's block size 32 and between 32 and 1048576");
  EXPECT_EQ(with(&MoeProblem::num_experts, 0), "num_experts=0 must be between 1 and 65536");
  EXPECT_EQ(with(&MoeProblem::top_k, 33), "top_k=33 must be between 1 and num_experts=32");
  MoeProblem p = problem();
  p.act_dtype = DType::kF16;
  EXPECT_EQ(refusal(p, {}, StatusCode::kInvalidArgument),
            "activation type F16 is not supported; use BF16 or F32");
}

TEST(PlanRefusalTest, Q8DenseLayersOnAGpu) {
  MoeProblem p = problem();
  for (const char* quant : {"none", "q8", "fp8"}) EXPECT_TRUE(plan_moe(p, {.dense_quant = quant}).ok());
  p.device = DeviceKind::kCuda;
  p.compute_capability = 90;
  for (const char* quant : {"none", "fp8"}) EXPECT_TRUE(plan_moe(p, {.dense_quant = quant}).ok());
  EXPECT_EQ(
      refusal(p, {.dense_quant = "q8"}),
      "dense_quant=q8 is not supported on device=cuda, where dense layers are bf16 or fp8; nearest legal "
      "choice: --dense-quant fp8");
}

// Under a launcher, --fabric auto means mpi. Each process has one rank.
TEST(PlanRefusalTest, GpuRanksInSeveralProcesses) {
  MoeProblem p = problem();
  p.device = DeviceKind::kCuda;
  p.compute_capability = 90;
  EXPECT_EQ(refusal(p, {.fabric = "mpi", .tp = 2}),
            "fabric=mpi needs mpirun or srun, and neither started this process; nearest legal choice: "
            "--fabric threads");
  ASSERT_TRUE(plan_moe(p, {.tp = 2}).ok());
  EXPECT_FALSE(plan_moe(p, {.tp = 2})->spans_processes());
  setenv("OMPI_COMM_WORLD_RANK", "0", 1);
  setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
  EXPECT_EQ(refusal(p, {.fabric = "mpi", .tp = 2}),
            "tp=2 with fabric=mpi needs as many processes on device=cuda, but the launcher started 1; "
            "nearest legal choice: --fabric threads");
  setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  for (const char* fabric : {"auto", "mpi"}) {
    const Result<MoePlan> plan = plan_moe(p, {.fabric = fabric, .tp = 2});
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_TRUE(plan->spans_processes());
    EXPECT_NE(summary(*plan).find("fabric mpi, rows and sums over NCCL, tp=2"), std::string::npos)
        << summary(*plan);
  }
  EXPECT_EQ(
      refusal(p, {.tp = 4}),
      "tp=4 with fabric=mpi needs as many processes on device=cuda, but the launcher started 2; nearest "
      "legal choice: --tp 2");
  const std::string placed =
      "placing experts by load is not supported on GPUs in several processes (fabric=mpi); nearest legal "
      "choice: one process with --fabric threads";
  EXPECT_EQ(refusal(p, {.a2a = "deepep", .tp = 2, .places_experts = true}), placed);
  EXPECT_EQ(refusal(p, {.a2a = "deepep", .tp = 2, .num_redundant = 2}), placed);
  EXPECT_EQ(refusal(p, {.fabric = "threads", .tp = 2}),
            "fabric=threads runs in one process, but the launcher started 2; nearest legal choice: --fabric "
            "mpi");
  p.compute_capability = 80;
  EXPECT_EQ(refusal(p, {.tp = 2}), "tp=2 needs GPUs of compute capability 9.0; nearest legal choice: --tp 1");
  unsetenv("OMPI_COMM_WORLD_RANK");
  unsetenv("OMPI_COMM_WORLD_SIZE");
}

TEST(PlanRefusalTest, DeviceWithoutARow) {
  MoeProblem p = problem();
  p.device = DeviceKind::kCuda;
  p.compute_capability = 75;
  EXPECT_EQ(refusal(p, {}),
            "no runner fits; sm90 needs compute capability 9.0, but this GPU has 7.5; cuda_mma needs compute "
            "capability 8.0 or more, but this GPU has 7.5; sm90_bf16 needs compute capability 9.0, but this "
            "GPU has 7.5; cuda_bf16 needs compute capability 8.0 or more, but this GPU has 7.5; cpu_amx runs "
            "on cpu, but the device is cuda; "
            "cpu_avx512 runs on cpu, but the device is cuda; cpu_avx2 runs on cpu, but the device is cuda; "
            "cpu_scalar runs on cpu, but the device is cuda; cpu_bf16 runs on cpu, but the device is cuda; "
            "ref runs on cpu, but the device is cuda; ref_fp8 runs on cpu, but the device is cuda; ref_bf16 "
            "runs on cpu, but the device is cuda");
}

// bf16 experts have a row on every device that runs FP4 experts.
TEST(PlanTest, Bf16ExpertsOnEveryDevice) {
  MoeProblem p = problem(Fp4Format::kNone);
  EXPECT_STREQ(plan(p, {}).runner()->name, "cpu_bf16");
  p.act_dtype = DType::kF32;
  EXPECT_STREQ(plan(p, {}).runner()->name, "ref_bf16");
  p.act_dtype = DType::kBF16;
  p.device = DeviceKind::kCuda;
  for (const auto& [compute, name] : {std::pair{90, "sm90_bf16"}, {80, "cuda_bf16"}, {100, "cuda_bf16"}}) {
    p.compute_capability = compute;
    EXPECT_STREQ(plan(p, {}).runner()->name, name) << compute;
    for (const char* a2a : {"none", "deepep", "flashinfer"})
      if (compute == 90) {
        EXPECT_STREQ(plan(p, {.a2a = a2a, .tp = 2, .ep = 2}).runner()->name, name) << a2a;
      }
  }
  EXPECT_EQ(refusal(p, {.runner = "sm90_bf16"}),
            "moe_runner_backend=sm90_bf16 needs compute capability 9.0, but this GPU has 10.0; nearest legal "
            "choice: --moe-runner-backend cuda_bf16");
  EXPECT_EQ(refusal(p, {.runner = "cuda_bf16", .fp4_compute = "w4a8"}),
            "moe_runner_backend=cuda_bf16 does not compute w4a8; nearest legal choice: none");
}

}  // namespace
}  // namespace fp4moe
