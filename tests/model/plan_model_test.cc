#include "model/plan_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "device/absent_gpu.h"

namespace fp4moe {
namespace {

ModelConfig gpt_oss() {
  ModelConfig config;
  config.hidden_size = 256;
  config.num_heads = config.num_kv_heads = 4;
  config.intermediate_size = 256;
  config.num_experts = 16;
  config.top_k = 4;
  config.quant.method = QuantMethod::kMxfp4GptOss;
  config.quant.group_size = 32;
  config.quant.declared_by = "config.json quantization_config";
  return config;
}

StatusCode code_of(const EngineConfig& flags) { return plan_model(gpt_oss(), flags).status().code(); }

TEST(PlanModel, DefaultsRunOnTheCpuInBf16) {
  const Result<ModelPlan> plan = plan_model(gpt_oss(), EngineConfig{});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->device(), DeviceKind::kCpu);
  EXPECT_EQ(plan->act_dtype, DType::kBF16);
  EXPECT_EQ(plan->moe.scheme(), Scheme::kW4A16);
}

// GPUs in several processes run the model, but not with drafts, nor as a node of disaggregated serving.
TEST(PlanModel, FeaturesThatProcessesDoNotHaveAreRefused) {
  const AbsentGpu gpu = absent_gpu("h200", 0).value();
  const auto refusal = [&](const EngineConfig& flags, bool on_gpu = true) {
    return plan_model(gpt_oss(), flags, on_gpu ? std::optional(gpu) : std::nullopt).status().message();
  };
  EngineConfig flags, drafts, node;
  flags.tp_size = 2;
  flags.device = "cuda";
  drafts = node = flags;
  node.disaggregation_mode = "prefill";
  EXPECT_EQ(refusal(node), "");
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  EXPECT_EQ(refusal(flags), "");
  for (const char* algorithm : {"NGRAM", "NEXTN", "EAGLE3", "STANDALONE"}) {
    drafts.speculative_algorithm = algorithm;
    drafts.speculative_draft_model_path = drafts.speculative_algorithm.size() < 6 ? "" : "DRAFT";
    EXPECT_EQ(refusal(drafts), "--speculative-algorithm " + drafts.speculative_algorithm +
                                   " is not supported on GPUs in several processes (--fabric mpi); nearest "
                                   "legal choice: --speculative-algorithm none");
  }
  for (const char* device : {"cuda", "cpu"}) {
    node.device = device;
    EXPECT_EQ(refusal(node, node.device == "cuda"),
              "--disaggregation-mode prefill does not support ranks in several processes (--fabric mpi); "
              "nearest legal choice: one process with --fabric threads");
  }
  drafts.speculative_algorithm = "NGRAM";
  drafts.speculative_draft_model_path.clear();
  drafts.device = "cpu";
  EXPECT_EQ(refusal(drafts, false), "");
  unsetenv("OMPI_COMM_WORLD_RANK");
  unsetenv("OMPI_COMM_WORLD_SIZE");
}

// What models with recurrent layers do not have yet is refused by name.
TEST(PlanModel, StatesAreRefusedWhereTheyAreNotSupported) {
  ModelConfig config = gpt_oss();
  config.num_layers = 2;
  config.layer_has_state = {true, false};
  config.delta = {
      .num_key_heads = 6, .num_value_heads = 6, .key_head_dim = 8, .value_head_dim = 8, .conv_width = 4};
  const auto refusal = [&](const EngineConfig& flags) {
    return plan_model(config, flags).status().message();
  };
  const auto expect_part = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  EXPECT_EQ(refusal({}), "");
  EngineConfig drafts, ranks;
  drafts.speculative_algorithm = "NGRAM";
  drafts.speculative_num_draft_tokens = 17;
  EXPECT_EQ(refusal(drafts), "");
  drafts.speculative_num_draft_tokens = 18;
  expect_part(refusal(drafts),
              "--speculative-num-draft-tokens 18 does not support models with recurrent layers");
  ranks.tp_size = 4;
  expect_part(refusal(ranks), "the 6 key heads of the recurrent layers cannot be shared by the 4 ranks");
  MoeProblem problem;
  problem.device = DeviceKind::kCuda;
  config.delta.num_value_heads = 8 * config.delta.num_key_heads;
  EXPECT_TRUE(check_states(config, problem, {}).ok());
  config.delta.num_value_heads = 9 * config.delta.num_key_heads;
  expect_part(check_states(config, problem, {}).message(),
              "--device cuda supports at most 8 value heads of a key head in recurrent layers, not 9");
  config.delta.num_value_heads = config.delta.num_key_heads;
  drafts.speculative_num_draft_tokens = 4;
  EXPECT_TRUE(check_states(config, problem, drafts).ok());
  drafts.speculative_num_draft_tokens = 18;
  expect_part(check_states(config, problem, drafts).message(), "--speculative-num-draft-tokens 17");
  config.layer_has_state = {false, false};
  EXPECT_TRUE(check_states(config, problem, drafts).ok());
}

TEST(PlanModel, Float32TakesTheReferenceRunner) {
  EngineConfig flags;
  flags.dtype = "float32";
  const Result<ModelPlan> plan = plan_model(gpt_oss(), flags);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->act_dtype, DType::kF32);
}

// --kv-cache-dtype auto is the activations' type, whatever the checkpoint declares.
TEST(PlanModel, KvPagesHaveTheActivationsTypeOrEightBits) {
  for (const char* declared : {"", "FP8", "INT8", "NVFP4"})
    for (const char* dtype : {"bfloat16", "float32"})
      for (const char* kv : {"auto", "bfloat16", "fp8_e4m3"}) {
        ModelConfig config = gpt_oss();
        config.quant.kv_cache_type = declared;
        EngineConfig flags;
        flags.dtype = dtype;
        flags.kv_cache_dtype = kv;
        const Result<ModelPlan> plan = plan_model(config, flags);
        const bool is_fp8 = flags.kv_cache_dtype == "fp8_e4m3";
        if (is_fp8 && config.quant.kv_cache_type.size() > 3) {
          EXPECT_EQ(plan.status().code(), StatusCode::kUnsupported);
          for (const char* part : {"--kv-cache-dtype fp8_e4m3", declared, "legal: --kv-cache-dtype auto"})
            EXPECT_NE(plan.status().message().find(part), std::string::npos) << plan.status().message();
          continue;
        }
        ASSERT_TRUE(plan.ok()) << plan.status().to_string();
        EXPECT_EQ(plan->kv_dtype, is_fp8 ? DType::kF8E4M3 : plan->act_dtype) << declared << dtype << kv;
      }
}

TEST(PlanModel, UnknownDtypeNamesTheLegalOnes) {
  EngineConfig flags;
  flags.dtype = "float16";
  const Result<ModelPlan> plan = plan_model(gpt_oss(), flags);
  EXPECT_EQ(plan.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(plan.status().message().find("bfloat16 or float32"), std::string::npos);
}

TEST(PlanModel, FlagsOutOfRangeAreNamedWithWhatIsLegal) {
  struct Case {
    void (*change)(EngineConfig&);
    const char* message;
  };
  for (const Case& c :
       {Case{[](EngineConfig& f) { f.page_size = 0; }, "--page-size 0 is out of range; it must be 1 to 4096"},
        Case{[](EngineConfig& f) { f.threads = -3; }, "--threads -3 is out of range; it must be 0 to 4096"},
        Case{[](EngineConfig& f) { f.context_length = -1; },
             "--context-length -1 is out of range; it must be at least 0"},
        Case{[](EngineConfig& f) { f.mem_fraction_static = 1.5; },
             "--mem-fraction-static 1.500000 must be above 0 and at most 1"}}) {
    EngineConfig flags;
    c.change(flags);
    const Status status = plan_model(gpt_oss(), flags).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), c.message);
  }
}

TEST(PlanModel, WhatTheDeviceDecidesIsDecided) {
  const Result<ModelPlan> plan = plan_model(gpt_oss(), {});
  ASSERT_TRUE(plan.ok());
  if (plan->device() == DeviceKind::kCpu) {
    EXPECT_EQ(plan->flags.mem_fraction_static, 0.6);
    EXPECT_EQ(plan->flags.chunked_prefill_size, 512);
    EXPECT_EQ(plan->flags.max_prefill_tokens, 512);
  } else {
    EXPECT_EQ(plan->flags.mem_fraction_static, 0.9);
    EXPECT_EQ(plan->flags.chunked_prefill_size, 8192);
    EXPECT_EQ(plan->flags.max_prefill_tokens, 8192);
  }
  EngineConfig flags;
  flags.max_prefill_tokens = 77;
  EXPECT_EQ(plan_model(gpt_oss(), flags)->flags.max_prefill_tokens, 77);
}

TEST(PlanModel, QuantizationMustAgreeWithTheCheckpoint) {
  EngineConfig flags;
  flags.quantization = "mxfp4";
  EXPECT_EQ(code_of(flags), StatusCode::kOk);
  flags.quantization = "modelopt_fp4";
  EXPECT_EQ(code_of(flags), StatusCode::kUnsupported);
  flags.quantization = "int3";
  EXPECT_EQ(code_of(flags), StatusCode::kInvalidArgument);
}

TEST(PlanModel, HeadsThatRanksCannotShareAreRefused) {
  struct Case {
    int64_t heads, kv_heads;
    int tp, dp, nearest_dp;  // nearest_dp is 0 if the layout is legal
  };
  for (const Case& c : {Case{4, 2, 4, 1, 0},
                        {4, 4, 4, 1, 0},
                        {12, 3, 4, 1, 4},
                        {6, 1, 4, 1, 2},
                        {3, 1, 4, 2, 4},
                        {3, 1, 4, 4, 0},
                        {12, 2, 4, 1, 0},
                        {8, 8, 2, 1, 0}}) {
    ModelConfig config = gpt_oss();
    config.num_heads = c.heads;
    config.num_kv_heads = c.kv_heads;
    EngineConfig flags;
    flags.tp_size = c.tp;
    flags.dp_size = c.dp;
    flags.enable_dp_attention = c.dp > 1;
    const Status status = plan_model(config, flags).status();
    SCOPED_TRACE(std::to_string(c.heads) + "/" + std::to_string(c.kv_heads) + " tp " + std::to_string(c.tp));
    EXPECT_EQ(status.code(), c.nearest_dp == 0 ? StatusCode::kOk : StatusCode::kUnsupported)
        << status.to_string();
    if (c.nearest_dp == 0) continue;
    const std::string nearest = "--dp " + std::to_string(c.nearest_dp) + " ";
    EXPECT_NE(status.message().find(nearest), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("num_attention_heads=" + std::to_string(c.heads)), std::string::npos);
  }
}

TEST(PlanModel, HeadsTooWideForTheAttentionAreRefused) {
  ModelConfig config = gpt_oss();
  config.head_dim = 578;
  EXPECT_EQ(plan_model(config, EngineConfig{}).status().message(),
            "head_dim = 578 is too large; the limit is 576");
  config.mla = {.kv_lora_rank = 512, .qk_rope_head_dim = 64};
  EXPECT_TRUE(plan_model(config, EngineConfig{}).ok());
  config.mla.kv_lora_rank = 514;
  EXPECT_EQ(plan_model(config, EngineConfig{}).status().code(), StatusCode::kUnsupported);
}

// Latents are one KV head, independent of num_key_value_heads: only the query heads are divided.
TEST(PlanModel, LatentAttentionSharesQueryHeadsOnly) {
  ModelConfig config = gpt_oss();
  config.num_heads = config.num_kv_heads = 6;
  config.mla.kv_lora_rank = 32;
  EngineConfig flags;
  flags.tp_size = 2;
  EXPECT_TRUE(plan_model(config, flags).ok());
  flags.tp_size = 4;
  EXPECT_EQ(plan_model(config, flags).status().code(), StatusCode::kUnsupported);
}

TEST(PlanModel, Bf16SumsAreForGpusThatShareLayers) {
  EngineConfig flags;
  flags.tp_size = 2;
  flags.tp_reduce_dtype = "bfloat16";
  const AbsentGpu gpu = absent_gpu("h200", 0).value();
  flags.device = "cuda";
  EXPECT_TRUE(plan_model(gpt_oss(), flags, gpu).ok());
  const auto refused = [&](const char* why, const auto& change, bool on_gpu = true) {
    EngineConfig changed = flags;
    change(changed);
    const Status status =
        plan_model(gpt_oss(), changed, on_gpu ? std::optional<AbsentGpu>(gpu) : std::nullopt).status();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  refused(
      "device=cpu", [](EngineConfig& f) { f.device = "cpu"; }, false);
  refused("--enable-deterministic-inference",
          [](EngineConfig& f) { f.enable_deterministic_inference = true; });
  refused("tp=2 and dp=2", [](EngineConfig& f) { f.dp_size = 2, f.enable_dp_attention = true; });
  refused("use one of float32, bfloat16", [](EngineConfig& f) { f.tp_reduce_dtype = "fp8"; });
}

TEST(PlanModel, GpusOtherThanHopperAreRefused) {
  EngineConfig flags;
  flags.device = "cuda";
  for (const int capability : {80, 86, 89, 100, 120}) {
    const Status status = plan_model(gpt_oss(), flags, AbsentGpu{capability, int64_t{80} << 30}).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find("compute capability " + std::to_string(capability / 10) + "."),
              std::string::npos)
        << status.message();
  }
  EXPECT_TRUE(plan_model(gpt_oss(), flags, AbsentGpu{90, int64_t{80} << 30}).ok());
}

TEST(PlanModel, WhatCannotRunIsRefused) {
  for (const auto& change :
       {+[](EngineConfig& f) { f.ep_size = 2; },
        +[](EngineConfig& f) { f.moe_a2a_backend = "carrier pigeon"; },
        +[](EngineConfig& f) { f.fp4_compute = "w4a4"; }, +[](EngineConfig& f) { f.device = "abacus"; }}) {
    EngineConfig flags;
    change(flags);
    const Result<ModelPlan> plan = plan_model(gpt_oss(), flags);
    EXPECT_FALSE(plan.ok());
    EXPECT_FALSE(plan.status().message().empty());
  }
}

}  // namespace
}  // namespace fp4moe
