#include "engine/startup/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "device/absent_gpu.h"
#include "io/tiny_config.h"
#include "io/write/dummy_checkpoint.h"
#include "kernels/device_sampler.h"
#include "model/mtp_head.h"
#include "model/plan_draft.h"

namespace fp4moe {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30, kMiB = 1 << 20;

// A budget of 10 GiB, 2 GiB of weights, pages of 1 MiB for 16 tokens, a context of 4096 tokens.
MemoryProblem problem() {
  return {.available_bytes = 20 * kGiB,
          .weight_bytes = 2 * kGiB,
          .kv_bytes_per_page = kMiB,
          .max_position_embeddings = 4096};
}
EngineConfig flags() {
  EngineConfig flags;
  flags.mem_fraction_static = 0.5;
  flags.page_size = 16;
  flags.max_running_requests = 8;
  return flags;
}

// FP8 stays 8 bits with f32 scales for 128 columns of each row, except MLA's up-projections, which become
// bf16.
TEST(HeldBytes, OfFp8Weights) {
  const auto bytes = [](const std::string& name) {
    return held_bytes({.name = name, .view = {nullptr, DType::kF8E4M3, {512, 256}}, .file = ""},
                      DenseQuant::kQ8);
  };
  EXPECT_EQ(bytes("model.layers.0.self_attn.o_proj.weight"), 512 * 256 + 512 * 2 * 4);
  EXPECT_EQ(bytes("lm_head.weight"), 512 * 256 + 512 * 2 * 4);
  EXPECT_EQ(bytes("model.layers.0.self_attn.kv_b_proj.weight"), 2 * 512 * 256);
  EXPECT_EQ(bytes("model.layers.0.mlp.experts.0.up_proj.weight_scale"), 512 * 256);  // NVFP4's
}

TEST(MemoryPlan, ThePoolNeedsNoMoreThanAContextForEveryRequest) {
  const Result<MemoryPlan> plan = plan_memory(problem(), flags());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->budget_bytes, 10 * kGiB);
  EXPECT_EQ(plan->num_kv_pages, 8 * 4096 / 16);
  EXPECT_EQ(plan->context_length, 4096);
  EXPECT_EQ(plan->note, "");
}

TEST(MemoryPlan, ThePoolTakesWhatTheWeightsLeave) {
  EngineConfig many = flags();
  many.max_running_requests = 1000;
  EXPECT_EQ(plan_memory(problem(), many)->num_kv_pages, 8 * 1024);
}

TEST(MemoryPlan, TheModelsContextIsShortenedWithANoteButTheUsersIsRefused) {
  MemoryProblem tight = problem();
  tight.weight_bytes = 10 * kGiB - 100 * kMiB - 5;
  const Result<MemoryPlan> plan = plan_memory(tight, flags());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->num_kv_pages, 100);
  EXPECT_EQ(plan->context_length, 1600);
  EXPECT_EQ(plan->note, "context shortened from the model's 4096 tokens: the KV pool holds 1600 tokens");
  EngineConfig strict = flags();
  strict.context_length = 1601;
  const Status status = plan_memory(tight, strict).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(status.message(),
            "--context-length 1601: the KV pool holds 1600 tokens; --context-length 1600 would do");
  strict.context_length = 1600;
  EXPECT_TRUE(plan_memory(tight, strict).ok());
}

TEST(MemoryPlan, WeightsThatDoNotFitNameTheFractionThatWouldDo) {
  MemoryProblem big = problem();
  big.weight_bytes = 12 * kGiB;
  const Status status = plan_memory(big, flags()).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(
      status.message(),
      "the weights take 12.00 GiB, which is 2.00 GiB more than 10.00 GiB (--mem-fraction-static 0.50 of "
      "20.00 GiB available); "
      "--mem-fraction-static 0.60 would do");
  big.weight_bytes = 38 * kGiB;
  EXPECT_NE(plan_memory(big, flags()).status().message().find("a machine with about 40.00 GiB"),
            std::string::npos);
}

TEST(MemoryPlan, AdviceWorksWhenFollowed) {
  for (int64_t weights = 1; weights <= 19 * kGiB; weights += 317 * kMiB + 1) {
    MemoryProblem big = problem();
    big.weight_bytes = weights;
    const Result<MemoryPlan> plan = plan_memory(big, flags());
    if (plan.ok()) continue;
    const std::string& message = plan.status().message();
    const size_t at = message.rfind("--mem-fraction-static ");
    ASSERT_NE(at, std::string::npos) << message;
    EngineConfig advised = flags();
    advised.mem_fraction_static = std::stod(message.substr(at + 22));
    const Result<MemoryPlan> second = plan_memory(big, advised);
    EXPECT_TRUE(second.ok() || second.status().message().find("KV page") != std::string::npos)
        << message << "\n"
        << second.status().message();
  }
}

TEST(MemoryPlan, MaxTotalTokens) {
  EngineConfig exact = flags();
  exact.max_total_tokens = 4097;
  EXPECT_EQ(plan_memory(problem(), exact)->num_kv_pages, 257);
  exact.max_total_tokens = 8 * 1024 * 16 + 1;
  const Status status = plan_memory(problem(), exact).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_NE(status.message().find("--max-total-tokens 131072 would do"), std::string::npos)
      << status.message();
  exact.max_total_tokens = 131072;
  EXPECT_TRUE(plan_memory(problem(), exact).ok());
}

TEST(MemoryPlan, NotOnePageFits) {
  MemoryProblem tight = problem();
  tight.weight_bytes = 10 * kGiB;
  EXPECT_EQ(plan_memory(tight, flags()).status().code(), StatusCode::kDoesNotFit);
}

TEST(MemoryPlan, AContextBeyondTheModelsIsRefused) {
  EngineConfig beyond = flags();
  for (const int64_t length : {int64_t{4097}, INT64_MAX}) {
    beyond.context_length = length;
    const Status status = plan_memory(problem(), beyond).status();
    EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
    for (const std::string& number : {std::to_string(length), std::string("4096")})
      EXPECT_NE(status.message().find(number), std::string::npos) << status.message();
  }
}

// Half of the layers have a window: a page of each group has half the bytes.
MemoryProblem window_problem() {
  MemoryProblem windows = problem();
  windows.kv_bytes_per_page = windows.window_bytes_per_page = kMiB / 2;
  windows.least_window_pages = 9;
  windows.wanted_window_pages = 100;
  windows.max_position_embeddings = 1 << 20;
  return windows;
}

TEST(MemoryPlan, WindowLayersLeaveTheirMemoryToTheOthers) {
  const Result<MemoryPlan> plan = plan_memory(window_problem(), flags());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->num_window_pages, 100 + plan->num_kv_pages / 16);
  const auto bytes = [](int64_t full) { return (full + 100 + full / 16) * (kMiB / 2); };
  EXPECT_LE(bytes(plan->num_kv_pages), 8 * kGiB);
  EXPECT_GT(bytes(plan->num_kv_pages + 1), 8 * kGiB);
  EXPECT_GT(plan->num_kv_pages, 18 * 8 * 1024 / 10) << "8192 pages if all layers hold all tokens";
  EngineConfig cold = flags();
  cold.disable_radix_cache = true;
  EXPECT_EQ(plan_memory(window_problem(), cold)->num_window_pages, 100);
}

// With few full pages, window pages are as many: no sequence can use more.
// States of 64 MiB, and a slot for scrap, 8 requests and 4 snapshots for each.
MemoryProblem state_problem() {
  MemoryProblem states = problem();
  states.state_bytes_per_slot = 64 * kMiB;
  states.most_state_slots = 1 + 8 * 5;
  return states;
}

TEST(MemoryPlan, StatesAndPagesShareTheRestOfTheBudget) {
  const Result<MemoryPlan> plan = plan_memory(state_problem(), flags());
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->num_slots, 41);
  EXPECT_EQ(plan->max_running_requests, 8);
  EXPECT_EQ(plan->state_note, "");
  EXPECT_EQ(plan->num_kv_pages, 8 * 4096 / 16);
  EngineConfig many = flags();
  many.max_total_tokens = (8 * 1024 - 41 * 64) * 16;
  EXPECT_TRUE(plan_memory(state_problem(), many).ok()) << "all that the states leave";
  many.max_total_tokens += 16;
  EXPECT_EQ(plan_memory(state_problem(), many).status().code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(plan_memory(problem(), flags())->num_slots, 0);
}

// A ratio of 1 gives states half of 8 GiB: 64 slots, one of them scrap.
TEST(MemoryPlan, FewerRequestsRunAtOnceThanHaveSlots) {
  EngineConfig half = flags();
  half.mamba_full_memory_ratio = 1;
  half.max_running_requests = 100;
  MemoryProblem states = state_problem();
  states.most_state_slots = 501;
  const Result<MemoryPlan> plan = plan_memory(states, half);
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->num_slots, 64);
  EXPECT_EQ(plan->max_running_requests, 63);
  EXPECT_EQ(plan->state_note,
            "at most 63 requests run at once instead of 100 (--max-running-requests): each needs a state of "
            "64.00 MiB");
  states.num_groups = 2;
  EXPECT_EQ(plan_memory(states, half)->max_running_requests, 100);
  states.state_bytes_per_slot = 3 * kGiB;
  EXPECT_EQ(plan_memory(states, half).status().code(), StatusCode::kDoesNotFit);
}

TEST(MemoryPlan, AGivenNumberOfSlotsIsKeptOrRefused) {
  EngineConfig given = flags();
  MemoryProblem states = state_problem();
  for (const int64_t size : {1, 5, 100}) {
    given.max_mamba_cache_size = size;
    states.most_state_slots = 1 + size;
    const Result<MemoryPlan> plan = plan_memory(states, given);
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_EQ(plan->num_slots, 1 + size);
    EXPECT_EQ(plan->max_running_requests, std::min<int64_t>(8, size));
  }
  given.max_mamba_cache_size = 128;
  states.most_state_slots = 129;
  const Status status = plan_memory(states, given).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_NE(status.message().find("--max-mamba-cache-size 127 would do"), std::string::npos)
      << status.message();
}

TEST(MemoryPlan, ThereAreNeverMoreWindowPagesThanFullOnes) {
  EngineConfig few = flags();
  for (const int64_t pages : {1, 50, 100, 107, 108, 200}) {
    few.max_total_tokens = pages * 16;
    const Result<MemoryPlan> plan = plan_memory(window_problem(), few);
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->num_kv_pages, pages);
    EXPECT_EQ(plan->num_window_pages, std::min(pages, 100 + pages / 16));
  }
}

TEST(MemoryPlan, TheRatioOfWindowTokensIsKeptOrRefused) {
  EngineConfig half = flags();
  half.swa_full_tokens_ratio = 0.5;
  const Result<MemoryPlan> plan = plan_memory(window_problem(), half);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->num_window_pages, (plan->num_kv_pages + 1) / 2);
  half.swa_full_tokens_ratio = 1;
  EXPECT_EQ(plan_memory(window_problem(), half)->num_kv_pages, 8 * 1024);
  EXPECT_EQ(plan_memory(window_problem(), half)->num_window_pages, 8 * 1024);
  half.swa_full_tokens_ratio = 0.01;
  half.max_total_tokens = 100 * 16;
  const Status status = plan_memory(window_problem(), half).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_NE(status.message().find("gives 1 window pages beside 100 KV pages, but one request needs 9; "
                                  "--swa-full-tokens-ratio 0.0900 would do"),
            std::string::npos)
      << status.message();
  half.swa_full_tokens_ratio = 0.09;
  EXPECT_TRUE(plan_memory(window_problem(), half).ok());
  half.max_total_tokens = 1 << 20;
  EXPECT_NE(plan_memory(window_problem(), half)
                .status()
                .message()
                .find(" KV pages of 0.50 MiB and 5899 window "
                      "pages of 0.50 MiB"),
            std::string::npos)
      << plan_memory(window_problem(), half).status().message();
}

// 60 GiB of weights on a GPU with 100 GiB free, 90 % of which can be used; 1 MiB of activations per token.
MemoryProblem gpu_problem() {
  return {.device = DeviceKind::kCuda,
          .available_bytes = 100 * kGiB,
          .weight_bytes = 60 * kGiB,
          .kv_bytes_per_page = kMiB,
          .work_bytes = 8 * kGiB + kGiB / 2,
          .work_bytes_per_token = kMiB,
          .max_position_embeddings = 1 << 20};
}
EngineConfig gpu_flags() {
  EngineConfig flags;
  flags.mem_fraction_static = 0.9;
  flags.max_prefill_tokens = 8192;
  return flags;
}

TEST(MemoryPlanOnAGpu, ThePoolTakesWhatWeightsAndWorkLeave) {
  const Result<MemoryPlan> plan = plan_memory(gpu_problem(), gpu_flags());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->num_kv_pages, (90 - 60) * 1024 - 8 * 1024 - 512);
}

TEST(MemoryPlanOnAGpu, WorkThatDoesNotFitNamesTheTokensThatWould) {
  MemoryProblem tight = gpu_problem();
  tight.weight_bytes = 86 * kGiB;
  const Status status = plan_memory(tight, gpu_flags()).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  EXPECT_EQ(status.message(),
            "the weights take 86.00 GiB and the activations for 8192 prompt tokens per step take 8.50 GiB, "
            "which is 4.50 GiB more than 90.00 GiB (--mem-fraction-static 0.90 of 100.00 GiB free on the "
            "GPU); "
            "--max-prefill-tokens 3584 would do");
}

TEST(MemoryPlanOnAGpu, WeightsThatDoNotFitNameTheGpuThatWould) {
  MemoryProblem big = gpu_problem();
  big.weight_bytes = 340 * kGiB;
  const Status status = plan_memory(big, gpu_flags()).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit);
  for (const char* part :
       {"the weights take 340.00 GiB", "258.50 GiB more than 90.00 GiB", "a GPU with about 366.84 GiB free"})
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

TEST(MemoryPlan, AnAbsurdPoolIsRefused) {
  EngineConfig absurd = flags();
  absurd.max_total_tokens = INT64_MAX;
  EXPECT_EQ(plan_memory(problem(), absurd).status().code(), StatusCode::kDoesNotFit);
}

// gpt-oss-20b with the defaults on GPUs of three sizes: the pool holds at least 1.8 times the tokens that it
// holds if window layers hold all tokens.
TEST(MemoryPlanOnAGpu, GptOssHoldsAlmostTwiceTheTokens) {
  const ModelConfig config = config_of({.like = "gpt-oss-20b"});
  const auto checkpoint = dummy_checkpoint(config, "folder");
  ASSERT_TRUE(checkpoint.ok());
  for (const char* gpu : {"h100", "h200", "gh200"}) {
    EngineConfig flags;
    flags.device = "cuda";
    flags.max_running_requests = 256;
    int64_t num_pages[2];
    for (const bool splits : {false, true}) {
      flags.disable_hybrid_swa_memory = !splits;
      const auto plan = plan_model(config, flags, absent_gpu(gpu, 0).value());
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      const auto problem = memory_problem(*checkpoint, config, *plan, plan->flags);
      ASSERT_TRUE(problem.ok());
      const auto memory = plan_memory(*problem, plan->flags);
      ASSERT_TRUE(memory.ok()) << memory.status().message();
      num_pages[splits] = memory->num_kv_pages;
      EXPECT_LE(memory->num_kv_pages * problem->kv_bytes_per_page +
                    memory->num_window_pages * problem->window_bytes_per_page + problem->weight_bytes +
                    problem->work_bytes,
                memory->budget_bytes);
    }
    EXPECT_GE(static_cast<double>(num_pages[1]), 1.8 * static_cast<double>(num_pages[0])) << gpu;
  }
}

// The draft's weights and, beside every full page, its page of all layers count.
TEST(MemoryProblem, CountsADraftModel) {
  const ModelConfig target = config_of({.like = "gpt-oss-120b"}), small = config_of({.like = "gpt-oss-20b"});
  const Checkpoint checkpoint = dummy_checkpoint(target, "target").value();
  const Checkpoint draft_checkpoint = dummy_checkpoint(small, "draft").value();
  EngineConfig flags;
  flags.device = "cpu";
  ModelPlan plan = plan_model(target, flags).value();
  const MemoryProblem alone = memory_problem(checkpoint, target, plan, plan.flags).value();
  auto draft = std::make_shared<DraftPlan>();
  draft->config = small;
  draft->plan = plan_model(small, flags).value();
  plan.draft = draft;
  const MemoryProblem both = memory_problem(checkpoint, target, plan, plan.flags, &draft_checkpoint).value();
  EXPECT_EQ(both.weight_bytes - alone.weight_bytes, rank_weight_bytes(draft_checkpoint, small, draft->plan));
  // 24 layers of keys and values, 8 heads of 64 bf16 values.
  EXPECT_EQ(both.kv_bytes_per_page - alone.kv_bytes_per_page, int64_t{24} * 2 * 8 * 64 * 2 * flags.page_size);
  EXPECT_EQ(both.window_bytes_per_page, alone.window_bytes_per_page);
  EXPECT_EQ(memory_problem(checkpoint, target, plan, plan.flags)->weight_bytes, alone.weight_bytes)
      << "a draft among the target's weights";
}

// Rows of drafts have activations and logits, and their edits grow with the pool.
TEST(MemoryPlanOnAGpu, DraftsTakeTheMemoryOfTheirRows) {
  const ModelConfig config = config_of({.like = "gpt-oss-20b"});
  const auto checkpoint = dummy_checkpoint(config, "folder");
  ASSERT_TRUE(checkpoint.ok());
  EngineConfig flags;
  flags.device = "cuda";
  const auto problem_of = [&] {
    const auto plan = plan_model(config, flags, absent_gpu("h200", 0).value());
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    return memory_problem(*checkpoint, config, *plan, plan->flags).value();
  };
  const MemoryProblem plain = problem_of();
  flags.speculative_algorithm = "NGRAM";
  flags.speculative_num_draft_tokens = 5;
  const MemoryProblem drafted = problem_of();
  const int64_t more_rows = 64 * 4;
  EXPECT_EQ(drafted.work_bytes - plain.work_bytes,
            more_rows * (plain.work_bytes_per_token + config.vocab_size * 8));
  EXPECT_EQ(plain.edit_bytes_per_page, 0);
  EXPECT_EQ(drafted.edit_bytes_per_page, 4 * flags.page_size * int64_t{sizeof(LogitEdit)});
  EngineConfig all = flags;
  all.mem_fraction_static = 0.9;
  all.max_running_requests = 1 << 20;  // the pool takes all that is left
  const auto memory = plan_memory(drafted, all);
  ASSERT_TRUE(memory.ok()) << memory.status().message();
  const int64_t used = memory->num_kv_pages * (drafted.kv_bytes_per_page + drafted.edit_bytes_per_page) +
                       memory->num_window_pages * drafted.window_bytes_per_page + drafted.weight_bytes +
                       drafted.work_bytes;
  EXPECT_LE(used, memory->budget_bytes);
  EXPECT_GT(used + drafted.kv_bytes_per_page + drafted.edit_bytes_per_page + drafted.window_bytes_per_page,
            memory->budget_bytes);
}

// On a GPU a draft model's weights have the GPU's layout, and its passes have activations of their own. An
// MTP layer's dense weights are among the target's, its experts are not.
TEST(MemoryPlanOnAGpu, CountsADraftModel) {
  const ModelConfig target = config_of({.like = "deepseek-v3-tiny", .num_mtp_layers = 1});
  const ModelConfig small = config_of({.like = "gpt-oss-20b"});
  const Checkpoint checkpoint = dummy_checkpoint(target, "target").value();
  const Checkpoint other = dummy_checkpoint(small, "draft").value();
  EngineConfig flags;
  flags.device = "cuda";
  const AbsentGpu gpu = absent_gpu("h200", 0).value();
  ModelPlan plan = plan_model(target, flags, gpu).value();
  const MemoryProblem alone = memory_problem(checkpoint, target, plan, plan.flags).value();

  auto draft = std::make_shared<DraftPlan>();
  draft->config = small;
  draft->plan = plan_model(small, flags, gpu).value();
  plan.draft = draft;
  const MemoryProblem both = memory_problem(checkpoint, target, plan, plan.flags, &other).value();
  EXPECT_EQ(both.weight_bytes - alone.weight_bytes, device_weight_bytes(other, small, draft->plan));
  EXPECT_EQ(both.kv_bytes_per_page - alone.kv_bytes_per_page, int64_t{24} * 2 * 8 * 64 * 2 * flags.page_size);
  EXPECT_GT(both.work_bytes_per_token - alone.work_bytes_per_token, 22 * small.hidden_size);
  EXPECT_GT(both.work_bytes, alone.work_bytes);

  auto head = std::make_shared<DraftPlan>();
  head->algorithm = DraftAlgorithm::kMtp;
  head->config = mtp_config(target);
  head->plan = plan_model(head->config, flags, gpu).value();
  head->features.is_final_norm = true;
  plan.draft = head;
  const MemoryProblem mtp = memory_problem(checkpoint, target, plan, plan.flags).value();
  ModelConfig dense = head->config;
  dense.layer_has_experts = {false};
  const int64_t experts = device_weight_bytes(checkpoint, head->config, head->plan) -
                          device_weight_bytes(checkpoint, dense, head->plan);
  EXPECT_GT(experts, 0);
  EXPECT_GE(mtp.weight_bytes - alone.weight_bytes, experts);
  EXPECT_GT(mtp.work_bytes_per_token - alone.work_bytes_per_token, 22 * target.hidden_size);
}

// A slot on a GPU has a replay row for each draft, with the inputs of this rank's heads.
TEST(MemoryPlanOnAGpu, DraftsTakeRowsOfEachState) {
  const ModelConfig config = config_of({.like = "qwen3.5-moe-tiny"});
  const Checkpoint checkpoint = dummy_checkpoint(config, "folder").value();
  for (const int ranks : {1, 2}) {
    EngineConfig flags;
    flags.device = "cuda";
    flags.tp_size = ranks;
    const auto problem_of = [&] {
      const ModelPlan plan = plan_model(config, flags, absent_gpu("h200", 0).value()).value();
      return memory_problem(checkpoint, config, plan, plan.flags).value();
    };
    const MemoryProblem plain = problem_of();
    flags.speculative_algorithm = "NGRAM";
    flags.speculative_num_draft_tokens = 5;
    const MemoryProblem drafted = problem_of();
    const DeltaConfig& delta = config.delta;
    const int64_t layers = std::ranges::count(config.layer_has_state, true);
    EXPECT_EQ(drafted.state_bytes_per_slot - plain.state_bytes_per_slot,
              4 * layers * (delta.conv_channels() + 2 * delta.num_value_heads) * 4 / ranks);
    EXPECT_EQ(drafted.most_state_slots, plain.most_state_slots);
  }
}

TEST(SizeString, ChangesItsUnitAtAGibibyte) {
  EXPECT_EQ(size_string(0), "0.00 MiB");
  EXPECT_EQ(size_string(1023 * kMiB), "1023.00 MiB");
  EXPECT_EQ(size_string(kGiB), "1.00 GiB");
}

}  // namespace
}  // namespace fp4moe
