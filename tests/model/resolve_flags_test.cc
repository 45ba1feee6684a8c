// resolve_flags(): each automatic choice, each environment variable, each SGLang name, and their precedence.
#include "model/resolve_flags.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "model/sglang_names.h"
#include "moe/plan/plan.h"

namespace fp4moe {
namespace {

constexpr Fp4Format kMxfp4 = Fp4Format::kMxfp4, kNvfp4 = Fp4Format::kNvfp4;

ResolvedFlags resolved(const EngineConfig& flags, Fp4Format format = kNvfp4,
                       DeviceKind device = DeviceKind::kCpu) {
  Result<ResolvedFlags> result = resolve_flags(flags, format, device);
  EXPECT_TRUE(result.ok()) << result.status().to_string();
  return result.ok() ? *result : ResolvedFlags();
}

Status refused(const EngineConfig& flags, Fp4Format format = kNvfp4) {
  return resolve_flags(flags, format, DeviceKind::kCpu).status();
}

bool says(const ResolvedFlags& flags, LogLevel level, const std::string& text) {
  for (const FlagNote& note : flags.notes)
    if (note.level == level && note.text.find(text) != std::string::npos) return true;
  return false;
}

EngineConfig a2a(const std::string& name, const std::string& runner = "auto") {
  EngineConfig flags;
  flags.moe_a2a_backend = name;
  flags.moe_runner_backend = runner;
  return flags;
}

TEST(ResolveFlags, DefaultsStayAsTheyAreAndSayNothing) {
  for (const Fp4Format format : {kMxfp4, kNvfp4}) {
    const ResolvedFlags r = resolved({}, format);
    EXPECT_TRUE(r.notes.empty());
    EXPECT_EQ(r.flags.ep_size, 1);
    EXPECT_EQ(r.flags.deepep_mode, "auto");
  }
}

TEST(ResolveFlags, AnA2aRaisesExpertParallelismToAllRanks) {
  for (const char* name : {"none", "deepep", "flashinfer"}) {
    for (const int tp : {1, 2, 4}) {
      EngineConfig flags = a2a(name);
      flags.tp_size = tp;
      const ResolvedFlags r = resolved(flags);
      const bool raised = std::string(name) != "none" && tp > 1;
      EXPECT_EQ(r.flags.ep_size, raised ? tp : 1) << name << tp;
      EXPECT_EQ(says(r, LogLevel::kInfo, "--ep-size 1 is raised to --tp-size " + std::to_string(tp)), raised);
    }
  }
  EngineConfig deterministic;
  deterministic.tp_size = 4;
  deterministic.enable_deterministic_inference = true;
  const ResolvedFlags r = resolved(deterministic);
  EXPECT_EQ(r.flags.ep_size, 4);
  EXPECT_TRUE(
      says(r, LogLevel::kInfo, "--ep-size 1 is raised to --tp-size 4: --enable-deterministic-inference"));
  EngineConfig odd = a2a("deepep");
  odd.tp_size = 4;
  odd.ep_size = 2;
  EXPECT_EQ(resolved(odd).flags.ep_size, 2) << "plan_moe refuses a given value, not resolve_flags";
}

TEST(ResolveFlags, DataParallelAttentionSaysThatGroupsShareTheLimits) {
  EngineConfig flags;
  flags.tp_size = flags.dp_size = 4;
  EXPECT_TRUE(resolved(flags).notes.empty());
  flags.enable_dp_attention = true;
  EXPECT_TRUE(says(resolved(flags), LogLevel::kInfo,
                   "--chunked-prefill-size and --max-prefill-tokens are "
                   "divided evenly among 4 data-parallel groups"));
}

TEST(ResolveFlags, DeepepModeIsLowLatencyOrRefused) {
  EXPECT_EQ(resolved(a2a("deepep")).flags.deepep_mode, "low_latency");
  EngineConfig normal = a2a("deepep");
  normal.deepep_mode = "normal";
  EXPECT_EQ(refused(normal).code(), StatusCode::kUnsupported);
  EXPECT_NE(refused(normal).message().find("only DeepEP low_latency dispatch (masked layout)"),
            std::string::npos);
  normal.moe_a2a_backend = "flashinfer";
  EXPECT_TRUE(says(resolved(normal), LogLevel::kWarning, "--deepep-mode normal is ignored"));
  normal.deepep_mode = "fast";
  EXPECT_EQ(refused(normal).code(), StatusCode::kInvalidArgument);
}

// Precedence: the flag, the bf16 variable, the NVFP4 variable (if activations are NVFP4), the default bf16.
TEST(ResolveFlags, DeepepPayload) {
  struct Case {
    const char *flag, *bf16, *nvfp4, *runner;
    Fp4Format format;
    const char* expected;
  };
  for (const Case& c : {
           Case{"auto", "", "", "flashinfer_cutedsl", kNvfp4, "bf16"},
           Case{"auto", "", "1", "flashinfer_cutedsl", kNvfp4, "nvfp4"},
           Case{"auto", "1", "1", "flashinfer_cutedsl", kNvfp4, "bf16"},
           Case{"auto", "0", "1", "flashinfer_cutedsl", kNvfp4, "nvfp4"},
           Case{"fp8", "1", "1", "flashinfer_cutedsl", kNvfp4, "fp8"},
           Case{"nvfp4", "1", "0", "flashinfer_cutedsl", kNvfp4, "nvfp4"},
           Case{"auto", "", "1", "marlin", kNvfp4, "bf16"},
           Case{"auto", "", "1", "auto", kNvfp4, "bf16"},
           Case{"auto", "", "1", "auto", kMxfp4, "bf16"},
       }) {
    EngineConfig flags = a2a("deepep", c.runner);
    flags.deepep_dispatcher_output_dtype = c.flag;
    flags.environment = {{"SGLANG_DEEPEP_BF16_DISPATCH", c.bf16}, {"SGLANG_MOE_NVFP4_DISPATCH", c.nvfp4}};
    EXPECT_EQ(resolved(flags, c.format).flags.deepep_dispatcher_output_dtype, c.expected)
        << c.flag << " " << c.bf16 << " " << c.nvfp4 << " " << c.runner;
  }
  EngineConfig ignored = a2a("deepep", "marlin");
  ignored.environment = {{"SGLANG_MOE_NVFP4_DISPATCH", "1"}};
  EXPECT_TRUE(says(resolved(ignored), LogLevel::kWarning, "SGLANG_MOE_NVFP4_DISPATCH=1 is ignored"));
  EngineConfig int8 = a2a("deepep");
  int8.deepep_dispatcher_output_dtype = "int8";
  EXPECT_EQ(refused(int8).code(), StatusCode::kUnsupported);
}

TEST(ResolveFlags, FlashinferPayloadIsNvfp4UnderW4a4UnlessToldOtherwise) {
  EngineConfig flags = a2a("flashinfer", "flashinfer_cutlass");
  EXPECT_EQ(resolved(flags).flags.flashinfer_dispatcher_output_dtype, "nvfp4");
  EXPECT_EQ(resolved(flags).flags.flashinfer_combine_dtype, "bf16");
  EXPECT_TRUE(says(resolved(flags), LogLevel::kInfo, "SGLANG_MOE_NVFP4_DISPATCH=0 for bf16"));
  EXPECT_EQ(resolved(flags, kMxfp4).flags.flashinfer_dispatcher_output_dtype, "bf16");
  flags.environment = {{"SGLANG_MOE_NVFP4_DISPATCH", "0"}};
  EXPECT_EQ(resolved(flags).flags.flashinfer_dispatcher_output_dtype, "bf16");
  flags.flashinfer_dispatcher_output_dtype = "nvfp4";
  EXPECT_EQ(resolved(flags).flags.flashinfer_dispatcher_output_dtype, "nvfp4");
  flags = a2a("flashinfer", "auto");
  EXPECT_EQ(resolved(flags).flags.flashinfer_dispatcher_output_dtype, "bf16");
  flags.fp4_compute = "w4a4";
  EXPECT_EQ(resolved(flags).flags.flashinfer_dispatcher_output_dtype, "nvfp4");
}

TEST(ResolveFlags, FlashinferPayloadBetweenGpusIsNvfp4OnlyOnRequest) {
  const auto payload = [](const EngineConfig& flags) {
    return resolved(flags, kNvfp4, DeviceKind::kCuda).flags.flashinfer_dispatcher_output_dtype;
  };
  EngineConfig flags = a2a("flashinfer", "flashinfer_cutlass");
  EXPECT_EQ(payload(flags), "bf16");
  EXPECT_TRUE(says(resolved(flags, kNvfp4, DeviceKind::kCuda), LogLevel::kInfo,
                   "SGLANG_MOE_NVFP4_DISPATCH=1 for NVFP4"));
  flags.environment = {{"SGLANG_MOE_NVFP4_DISPATCH", "1"}};
  EXPECT_EQ(payload(flags), "nvfp4");
  flags.environment = {{"SGLANG_MOE_NVFP4_DISPATCH", "0"}};
  EXPECT_EQ(payload(flags), "bf16");
}

TEST(ResolveFlags, TheOldNameOfTheNvfp4VariableIsForwarded) {
  EngineConfig flags = a2a("deepep", "flashinfer_cutedsl");
  flags.environment = {{"SGLANG_CUTEDSL_MOE_NVFP4_DISPATCH", "1"}};
  EXPECT_EQ(resolved(flags).flags.deepep_dispatcher_output_dtype, "nvfp4");
  EXPECT_TRUE(says(resolved(flags), LogLevel::kWarning, "is the old name of"));
  flags.environment.push_back({"SGLANG_MOE_NVFP4_DISPATCH", "0"});
  EXPECT_EQ(resolved(flags).flags.deepep_dispatcher_output_dtype, "bf16");
}

TEST(ResolveFlags, PerTokenScalesByVariable) {
  EngineConfig flags;
  flags.environment = {{"SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "1"}};
  EXPECT_EQ(resolved(flags).flags.fp4_act_scales, "auto");
  flags.fp4_compute = "w4a4";
  EXPECT_EQ(resolved(flags).flags.fp4_act_scales, "per_token");
  flags.fp4_act_scales = "static";
  EXPECT_EQ(resolved(flags).flags.fp4_act_scales, "static");
  flags.environment[0].value = "2";
  const Status status = refused(flags);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=2 must be 0 or 1"),
            std::string::npos);
}

TEST(ResolveFlags, OneCapacityFormula) {
  EngineConfig flags;
  flags.max_prefill_tokens = 4096;
  flags.max_running_requests = 10;
  const auto tokens = [&](int tp, int dp) {
    flags.tp_size = tp;
    flags.dp_size = dp;
    return dispatch_tokens_per_rank(flags);
  };
  EXPECT_EQ(tokens(1, 1), 4106);
  EXPECT_EQ(tokens(4, 1), 1027);  // 1026.5 rounded up
  EXPECT_EQ(tokens(4, 2), 1027);  // groups of 2048 + 5, ranks of 1026.5
  EXPECT_EQ(tokens(4, 4), 1027);  // groups of 1024 + 2.5
}

TEST(ResolveFlags, ATokenLimitThatIsTooSmallIsAWarningWithTheFormula) {
  for (const auto& [name, variable] :
       {std::pair{"deepep", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"},
        std::pair{"flashinfer", "SGLANG_FLASHINFER_NUM_MAX_DISPATCH_TOKENS_PER_RANK"}}) {
    EngineConfig flags = a2a(name);
    flags.max_prefill_tokens = 500;
    flags.max_running_requests = 12;
    const auto warned = [&](const std::string& value) {
      flags.environment = {{variable, value}};
      return says(resolved(flags), LogLevel::kWarning,
                  "512 tokens that a rank can dispatch in a step, (max_prefill_tokens + "
                  "max_running_requests) / tp, rounded up");
    };
    EXPECT_TRUE(warned("511"));
    EXPECT_FALSE(warned("512"));
    for (const char* bad : {"0", "-1", "12x", "9999999999999999999", "2000000"}) {
      flags.environment = {{variable, bad}};
      EXPECT_EQ(refused(flags).code(), StatusCode::kInvalidArgument) << bad;
    }
    flags.moe_a2a_backend = "none";
    EXPECT_TRUE(resolved(flags).notes.empty()) << "the variable is not read without its a2a";
  }
  EngineConfig flags = a2a("deepep");
  flags.environment = {{"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "1025"}};
  EXPECT_EQ(refused(flags).code(), StatusCode::kInvalidArgument) << "SGLang has the same limit";
}

// Every listed name is refused with a suggested alternative; an unknown name is left to plan_moe.
TEST(ResolveFlags, NamesOfSglangAreKnownButRefused) {
  const auto each = [](std::span<const SglangName> names, std::string EngineConfig::*field) {
    for (const SglangName& name : names) {
      EngineConfig flags;
      flags.*field = name.name;
      const Status status = refused(flags);
      EXPECT_EQ(status.code(), StatusCode::kUnsupported) << name.name;
      EXPECT_NE(status.message().find("nearest legal choice: "), std::string::npos) << status.message();
    }
    EngineConfig flags;
    flags.*field = "fast";
    EXPECT_TRUE(refused(flags).ok());
  };
  each(sglang_runners(), &EngineConfig::moe_runner_backend);
  each(sglang_a2a(), &EngineConfig::moe_a2a_backend);
  each(sglang_quantizations(), &EngineConfig::quantization);
}

TEST(ResolveFlags, NoForeignNameHidesANativeOne) {
  for (const SglangName& name : sglang_runners())
    for (const std::string& native : runner_names()) EXPECT_NE(native, name.name);
  for (const SglangName& name : sglang_a2a())
    for (const std::string& native : a2a_names()) EXPECT_NE(native, name.name);
}

TEST(ResolveFlags, ForeignFlagsAreMootRefusedOrHarmlessByTheirTable) {
  std::set<std::string> seen;
  for (const SglangFlag& flag : sglang_flags()) {
    const std::string names = flag.names, name = names.substr(0, names.find(','));
    EXPECT_TRUE(seen.insert(name).second) << name << " is listed twice";
    const Result<std::string> judged = judge_sglang_flag(name, flag.legal != nullptr ? "fp8" : "7");
    switch (flag.fate) {
      case SglangFlag::Fate::kMoot:
        ASSERT_TRUE(judged.ok());
        EXPECT_NE(judged->find(" is ignored: it "), std::string::npos) << *judged;
        break;
      case SglangFlag::Fate::kRefused:
        EXPECT_FALSE(judged.ok()) << name;
        break;
      case SglangFlag::Fate::kSpeculative:
        EXPECT_EQ(judged.status().code(), StatusCode::kUnsupported);
        EXPECT_NE(judged.status().message().find("does not apply"), std::string::npos);
    }
  }
  EXPECT_EQ(*judge_sglang_flag("--nnodes", "1"), "");
  EXPECT_EQ(judge_sglang_flag("--nnodes", "2").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(judge_sglang_flag("--flashinfer-mxfp4-moe-precision", "p").status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(*judge_sglang_flag("--flashinfer-mxfp4-moe-precision", "bf16"), "");
  EXPECT_EQ(judge_sglang_flag("--none-such", "").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      *judge_sglang_flag("--disable-cuda-graph-padding", ""),
      "--disable-cuda-graph-padding is ignored: it configures CUDA graphs; here decode steps are padded to a "
      "captured size, and other steps are not captured");
}

TEST(ResolveFlags, GivenForeignFlagsEndInNotesOrARefusal) {
  EngineConfig flags;
  flags.sglang_flags = {{"--disable-piecewise-cuda-graph", ""}, {"--attention-backend", "trtllm_mla"}};
  const ResolvedFlags r = resolved(flags);
  EXPECT_EQ(r.notes.size(), 2u);
  EXPECT_TRUE(r.flags.sglang_flags.empty());
  flags.sglang_flags.push_back({"--speculative-token-map", "3"});
  EXPECT_EQ(refused(flags).code(), StatusCode::kUnsupported);
}

TEST(ResolveFlags, DraftsAreForRanksThatDecode) {
  EngineConfig flags;
  EXPECT_EQ(rows_per_request(flags), 1);
  flags.speculative_num_draft_tokens = 7;
  EXPECT_EQ(rows_per_request(flags), 1);
  EXPECT_EQ(resolved(flags).notes.size(), 1u) << "without an algorithm the number has no effect";
  const int64_t num_plain = dispatch_tokens_per_rank(flags);
  flags.speculative_algorithm = "NGRAM";
  EXPECT_EQ(rows_per_request(flags), 7);
  EXPECT_EQ(dispatch_tokens_per_rank(flags), num_plain + 6 * flags.max_running_requests);
  EXPECT_TRUE(resolved(flags).notes.empty());
  EXPECT_TRUE(resolve_flags(flags, Fp4Format::kMxfp4, DeviceKind::kCuda).ok());
  EngineConfig with_model = flags;
  with_model.speculative_algorithm = "STANDALONE";
  with_model.speculative_draft_model_path = "folder";
  EXPECT_TRUE(resolve_flags(with_model, Fp4Format::kMxfp4, DeviceKind::kCuda).ok());
  EngineConfig with_ngrams = flags;
  for (EngineConfig* groups : {&with_ngrams, &with_model}) {
    groups->dp_size = groups->tp_size = 2, groups->enable_dp_attention = true;
    for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kCuda})
      EXPECT_TRUE(resolve_flags(*groups, Fp4Format::kMxfp4, device).ok());
  }
  flags.disaggregation_mode = "decode";
  EXPECT_EQ(rows_per_request(resolved(flags).flags), 7);
  flags.disaggregation_mode = "prefill";
  EXPECT_EQ(rows_per_request(resolved(flags).flags), 1);
  EXPECT_EQ(resolved(flags).notes.size(), 1u);
}

// A prefill node computes what a draft model makes of the target's features.
TEST(ResolveFlags, NodesDraftWithModels) {
  EngineConfig flags;
  for (const char* algorithm : {"EAGLE", "NEXTN", "EAGLE3", "STANDALONE"})
    for (const char* mode : {"prefill", "decode"}) {
      flags.speculative_algorithm = algorithm;
      flags.speculative_draft_model_path =
          algorithm == std::string("EAGLE3") || algorithm == std::string("STANDALONE") ? "folder" : "";
      flags.disaggregation_mode = mode;
      const bool is_kept = algorithm != std::string("STANDALONE") || mode == std::string("decode");
      for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kCuda})
        EXPECT_EQ(resolve_flags(flags, Fp4Format::kMxfp4, device).value().flags.speculative_algorithm,
                  is_kept ? algorithm : "none")
            << mode;
    }
}

TEST(ResolveFlags, TheStepsOfADraftModelGiveItsRows) {
  EngineConfig flags;
  flags.speculative_algorithm = "STANDALONE";
  EXPECT_NE(refused(flags).message().find("--speculative-draft-model-path DIR"), std::string::npos);
  flags.speculative_draft_model_path = "folder";
  EXPECT_EQ(rows_per_request(resolved(flags).flags), 4);
  flags.speculative_num_draft_tokens = 6;
  EXPECT_EQ(rows_per_request(resolved(flags).flags), 6);
  flags.speculative_eagle_topk = 1;
  for (const int steps : {1, 5, 63}) {
    flags.speculative_num_steps = steps;
    const ResolvedFlags r = resolved(flags);
    EXPECT_EQ(rows_per_request(r.flags), steps + 1);
    EXPECT_EQ(r.notes.size(), steps == 5 ? 0u : 1u) << "the number of rows is another than the given one";
    EXPECT_EQ(resolved(r.flags).notes.size(), 0u);
  }
  flags.speculative_eagle_topk = 2;
  EXPECT_NE(refused(flags).message().find("--speculative-eagle-topk 2"), std::string::npos);
  flags.speculative_eagle_topk = 1;
  for (const char* algorithm : {"none", "NGRAM", "EAGLE", "NEXTN"}) {
    flags.speculative_algorithm = algorithm;
    EXPECT_NE(refused(flags).message().find("--speculative-draft-model-path folder"), std::string::npos);
  }
  flags.speculative_draft_model_path.clear();
  flags.speculative_algorithm = "NGRAM";
  EXPECT_NE(refused(flags).message().find("--speculative-num-steps 63"), std::string::npos);
}

TEST(ResolveFlags, UnknownWordsListTheLegalOnes) {
  struct Case {
    std::string EngineConfig::*field;
    const char* flag;
  };
  for (const Case& c :
       {Case{&EngineConfig::fp4_act_scales, "--fp4-act-scales"},
        Case{&EngineConfig::deepep_mode, "--deepep-mode"},
        Case{&EngineConfig::deepep_dispatcher_output_dtype, "--deepep-dispatcher-output-dtype"},
        Case{&EngineConfig::flashinfer_dispatcher_output_dtype, "--flashinfer-dispatcher-output-dtype"},
        Case{&EngineConfig::flashinfer_combine_dtype, "--flashinfer-combine-dtype"},
        Case{&EngineConfig::self_test, "--self-test"},
        Case{&EngineConfig::kv_cache_dtype, "--kv-cache-dtype"}}) {
    EngineConfig flags;
    flags.*(c.field) = "zap";
    const Status status = refused(flags);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().find(std::string(c.flag) + " zap is unknown; use one of "), 0u)
        << status.message();
  }
}

TEST(ResolveFlags, ResolvingTwiceChangesNothing) {
  for (const char* name : {"none", "deepep", "flashinfer"}) {
    EngineConfig flags = a2a(name, "flashinfer_cutedsl");
    flags.tp_size = 4;
    const ResolvedFlags once = resolved(flags);
    const ResolvedFlags twice = resolved(once.flags);
    EXPECT_TRUE(twice.notes.empty()) << twice.notes[0].text;
    EXPECT_EQ(twice.flags.ep_size, once.flags.ep_size);
    EXPECT_EQ(twice.flags.deepep_dispatcher_output_dtype, once.flags.deepep_dispatcher_output_dtype);
  }
}

}  // namespace
}  // namespace fp4moe
