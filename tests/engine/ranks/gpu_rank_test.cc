// Both demo checkpoints on a GPU: recorded decode steps against launched ones, decode against prefill,
// device sampling against host sampling.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/relative_l2.h"
#include "device/device_memory.h"
#include "engine/demo_engine.h"
#include "engine/output/sampler.h"
#include "engine/ranks/growing_drafts.h"
#include "engine/startup/autotune.h"
#include "io/checkpoint/checkpoint.h"
#include "io/file.h"
#include "io/temp_folder.h"
#include "model/plan_model.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

class GpuRanks : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Demos, GpuRanks, testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"), demo_name);

TEST_P(GpuRanks, ARecordedStepGivesTheBitsOfALaunchedOne) {
  Growing recorded(GetParam(), true), launched(GetParam(), false);
  Logits a = recorded.step(kPrompts), b = launched.step(kPrompts);
  for (int i = 0; i < 12; ++i) {
    for (size_t s = 0; s < 3; ++s)
      ASSERT_EQ(std::memcmp(a[s].data(), b[s].data(), a[s].size() * sizeof(float)), 0)
          << "step " << i << ", sequence " << s;
    const auto next = best_of(a);
    a = recorded.step(next);
    b = launched.step(next);
  }
}

TEST_P(GpuRanks, EveryTacticGivesTheSameBitsRecordedAndLaunchedAndAgreesWithTheFirst) {
  Growing first(GetParam(), false, uint8_t{0});
  const auto next = best_of(first.step(kPrompts));
  const Logits expected = first.step(next);
  for (uint8_t tactic = 1; tactic < first.num_tactics(); ++tactic) {
    Growing recorded(GetParam(), true, tactic), launched(GetParam(), false, tactic);
    recorded.step(kPrompts), launched.step(kPrompts);
    const Logits a = recorded.step(next), b = launched.step(next);
    EXPECT_EQ(a, b) << int{tactic};
    EXPECT_LT(sorted_errors(a, expected)[1], 2e-2) << int{tactic};
  }
}

TEST_P(GpuRanks, DecodeContinuesWhatPrefillWouldSay) {
  Growing decoded(GetParam(), true);
  Logits last = decoded.step(kPrompts);
  for (int i = 0; i < 6; ++i) last = decoded.step(best_of(last));
  Growing prefilled(GetParam(), false);
  const Logits whole = prefilled.step({decoded.tokens(0), decoded.tokens(1), decoded.tokens(2)});
  const std::vector<double> errors = sorted_errors(last, whole);
  EXPECT_LT(errors[1], 2e-2);
  EXPECT_LT(errors[2], 1.0);
}

TEST_P(GpuRanks, TheSameStepAgainGivesTheSameBits) {
  Growing first(GetParam(), true), second(GetParam(), true);
  EXPECT_EQ(first.step(kPrompts), second.step(kPrompts));
}

TEST_P(GpuRanks, DraftsAreVerifiedWithTheBitsOfPlainDecodingIfItIsDeterministic) {
  EngineConfig flags;
  flags.device = "cuda";
  flags.enable_deterministic_inference = true;
  for (const char* kv : {"auto", "fp8_e4m3"})
    for (const bool graphs : {true, false}) {
      flags.kv_cache_dtype = kv;
      flags.disable_cuda_graph = !graphs;
      Growing drafted(GetParam(), with_drafts(flags)), plain(GetParam(), flags);
      compare_with_plain(drafted, plain, [&](const auto& a, const auto& b, const std::string& what) {
        EXPECT_EQ(a, b) << what << ", KV " << kv << (graphs ? " by graphs" : "");
      });
    }
}

// Otherwise the rows of drafts change the last bits. If rounding routes a token to another expert, its row
// and those after it have a larger error.
TEST_P(GpuRanks, VerifiedRowsAgreeWithPlainDecoding) {
  EngineConfig flags;
  flags.device = "cuda";
  for (const char* kv : {"auto", "fp8_e4m3"}) {
    flags.kv_cache_dtype = kv;
    Growing drafted(GetParam(), with_drafts(flags)), plain(GetParam(), flags);
    std::vector<double> errors;
    compare_with_plain(drafted, plain, [&](const auto& a, const auto& b, const std::string&) {
      errors.push_back(relative_l2(a, b));
    });
    std::ranges::sort(errors);
    EXPECT_LT(errors[errors.size() / 2], 2e-2) << kv;
    EXPECT_LT(errors.back(), 1.0) << kv;
  }
}

TEST_P(GpuRanks, ARecordedStepThatVerifiesDraftsGivesTheBitsOfALaunchedOne) {
  EngineConfig flags;
  flags.device = "cuda";
  Growing recorded(GetParam(), with_drafts(flags));
  flags.disable_cuda_graph = true;
  Growing launched(GetParam(), with_drafts(flags));
  expect_equal_bits_with_drafts(recorded, launched);
}

// Decode steps of three rows run padded to four. The last layer runs only the rows with logits.
TEST_P(GpuRanks, EveryTokenIsCountedOnceForEachOfItsExperts) {
  for (const bool graphs : {true, false}) {
    Growing growing(GetParam(), graphs);
    Logits logits = growing.step(kPrompts);
    for (int i = 0; i < 4; ++i) logits = growing.step(best_of(logits));
    const ExpertLoad load = growing.ranks().expert_load();
    EXPECT_EQ(load.failure, "");
    EXPECT_EQ(load.layers.back(), 3);
    ASSERT_EQ(std::ssize(load.tokens), std::ssize(load.layers) * 16);
    for (size_t row = 0; row < load.layers.size(); ++row) {
      const auto first = load.tokens.begin() + static_cast<int64_t>(row * 16);
      const int64_t prompts = row + 1 < load.layers.size() ? 5 + 9 + 11 : 3;
      EXPECT_EQ(std::accumulate(first, first + 16, int64_t{0}), 4 * (prompts + 4 * 3))
          << "layer " << row << (graphs ? " by graphs" : "");
    }
  }
}

// Prompts and decode steps of three rows, which run padded to four: the experts reported per row must match
// the routers' counters.
TEST_P(GpuRanks, EveryTokensExpertsAreToldAsTheyAreCounted) {
  std::vector<std::vector<int32_t>> told[2];
  for (const bool graphs : {true, false}) {
    Growing growing(GetParam(), graphs);
    growing.wants_experts = true;
    const int64_t k = growing.config().top_k, num_layers = growing.config().num_layers;
    ExpertLoad before = growing.ranks().expert_load();
    Logits logits = growing.step(kPrompts);
    for (int i = 0; i < 5; ++i) {
      const ExpertLoad after = growing.ranks().expert_load();
      const std::vector<int32_t>& experts = growing.experts();
      const int64_t t = std::ssize(experts) / (num_layers * k);
      ASSERT_EQ(t, i == 0 ? 5 + 9 + 11 : 3);
      std::vector<int64_t> counts(after.tokens.size());
      for (int64_t layer = 0; layer < num_layers; ++layer) {
        const int64_t row = std::ranges::find(after.layers, layer) - after.layers.begin();
        const bool has_router = row < std::ssize(after.layers);
        const int64_t filled = !has_router ? 0 : layer + 1 < num_layers ? t : 3;
        for (int64_t place = 0; place < t * k; ++place) {
          const int32_t id = experts[static_cast<size_t>(layer * t * k + place)];
          if (place >= filled * k) {
            ASSERT_EQ(id, -1) << "layer " << layer << ", " << place;
            continue;
          }
          ASSERT_TRUE(id >= 0 && id < after.num_experts) << id;
          ++counts[static_cast<size_t>(row * after.num_experts + id)];
        }
      }
      for (size_t j = 0; j < counts.size(); ++j)
        ASSERT_EQ(counts[j], after.tokens[j] - before.tokens[j]) << "step " << i << ", " << j;
      told[graphs].push_back(experts);
      before = after;
      logits = growing.step(best_of(logits));
    }
  }
  EXPECT_EQ(told[0], told[1]);
}

// A rank that receives the pages continues with the same bits, without having seen the prompts.
TEST_P(GpuRanks, PagesThatAreHandedOverAreWorthThePrompt) {
  Growing prefill(GetParam(), true), decode(GetParam(), true);
  Logits logits = prefill.step(kPrompts);
  decode.take_over(prefill);
  EXPECT_EQ(decode.pages(), prefill.pages());
  for (int i = 0; i < 8; ++i) {
    const auto next = best_of(logits);
    logits = prefill.step(next);
    ASSERT_EQ(decode.step(next), logits) << "step " << i;
  }
}

// A CPU's pages have the same layout; in the first layer they differ by rounding only.
TEST_P(GpuRanks, PagesOfACpuAreLaidOutAlike) {
  Growing gpu(GetParam(), false), cpu(GetParam(), false, {}, "cpu");
  gpu.step(kPrompts), cpu.step(kPrompts);
  const auto on_gpu = gpu.pages(), on_cpu = cpu.pages();
  ASSERT_EQ(on_gpu.size(), on_cpu.size());
  for (size_t page = 0; page < on_gpu.size(); ++page) {
    ASSERT_EQ(on_gpu[page].size(), on_cpu[page].size());
    const size_t num_values = on_gpu[page].size() / static_cast<size_t>(2 * gpu.config().num_layers);
    std::vector<float> a, b;
    for (size_t i = 0; i < num_values; ++i) {
      bf16 x, y;
      std::memcpy(&x, on_gpu[page].data() + 2 * i, 2);
      std::memcpy(&y, on_cpu[page].data() + 2 * i, 2);
      a.push_back(bf16_to_float(x));
      b.push_back(bf16_to_float(y));
    }
    EXPECT_LT(relative_l2(a, b), 1e-2) << "page " << page;
  }
}

// A page with any number of tokens is read back as written, and no other page changes.
TEST_P(GpuRanks, AHandedOverPageChangesNoOther) {
  Growing growing(GetParam(), false);
  RankGroup& ranks = growing.ranks();
  const int64_t size = ranks.page_size(), token_bytes = ranks.kv_token_bytes();
  const auto num_pages = static_cast<int32_t>(ranks.num_kv_pages());
  std::mt19937 random(3);
  const auto draw = [&](int64_t num_tokens) {
    std::vector<uint8_t> bytes(static_cast<size_t>(num_tokens * token_bytes));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
  };
  std::vector<std::vector<uint8_t>> pages;
  for (int32_t page = 0; page < num_pages; ++page) {
    pages.push_back(draw(size));
    ASSERT_TRUE(ranks.write_page(0, page, size, pages.back().data()).ok());
  }
  for (int64_t num_tokens = 0; num_tokens <= size; ++num_tokens) {
    const auto written = static_cast<int32_t>(num_tokens * 5 % num_pages);
    const std::vector<uint8_t> few = draw(num_tokens);
    ASSERT_TRUE(ranks.write_page(0, written, num_tokens, few.data()).ok());
    std::vector<uint8_t> back(few.size());
    ASSERT_TRUE(ranks.read_page(0, written, num_tokens, back.data()).ok());
    EXPECT_EQ(back, few);
    // A page is [layers and tensors, tokens, row]; the write replaced the first num_tokens of each tensor.
    auto& whole = pages[static_cast<size_t>(written)];
    const int64_t tensors = growing.config().num_layers * (growing.config().mla.kv_lora_rank > 0 ? 1 : 2);
    const int64_t row = token_bytes / tensors;
    for (int64_t tensor = 0; tensor < tensors; ++tensor)
      std::copy_n(few.begin() + tensor * num_tokens * row, num_tokens * row,
                  whole.begin() + tensor * size * row);
    for (int32_t page = 0; page < num_pages; ++page) {
      std::vector<uint8_t> now(static_cast<size_t>(size * token_bytes));
      ASSERT_TRUE(ranks.read_page(0, page, size, now.data()).ok());
      ASSERT_EQ(now, pages[static_cast<size_t>(page)])
          << "page " << page << " after " << num_tokens << " tokens";
    }
  }
}

TEST_P(GpuRanks, AnIdBelowZeroIsTheTokenThatWasChosen) {
  Growing told(GetParam(), true), ahead(GetParam(), true);
  ASSERT_TRUE(ahead.ranks().set_masked_ids({}).ok());
  Logits a = told.step(kPrompts), b = ahead.step(kPrompts);
  const std::vector<SampleRowParams> greedy(3, {.temperature = 0});
  std::vector<SampledRow> sampled(3);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(ahead.ranks().start_sample(greedy, {}, {}, {}).ok());
    const auto next = best_of(a);
    a = told.step(next);
    b = ahead.step({{~0}, {~1}, {~2}});
    ASSERT_TRUE(ahead.ranks().take_sampled(sampled, {}).ok());
    for (size_t s = 0; s < 3; ++s) ASSERT_EQ(sampled[s].token_id, next[s][0]) << "step " << i;
    ASSERT_EQ(a, b) << "step " << i;
  }
}

TEST_P(GpuRanks, TokensAreChosenAsTheHostChoosesThem) {
  Growing model(GetParam(), true);
  const std::vector<int32_t> masked = {1, 2, 3};
  ASSERT_TRUE(model.ranks().set_masked_ids(masked).ok());
  const Logits logits = model.step(kPrompts);
  const int32_t last_id = static_cast<int32_t>(model.vocab_size()) - 1;
  const std::vector<SamplingParams> params = {
      {.temperature = 0, .top_logprobs = 5, .token_ids_logprob = {7, 1}},
      {.temperature = 0.7f, .top_p = 0.9f, .top_k = 40},
      {.temperature = 1.3f, .min_p = 0.01f, .top_logprobs = 0, .token_ids_logprob = {last_id, 0, last_id}}};
  const Sampler sampler(model.vocab_size(), masked);
  std::vector<std::vector<LogitEdit>> edits(3);  // makes the likeliest ids less likely and another one more
  for (size_t i = 0; i < 3; ++i) {
    std::vector<float> row = logits[i];
    const SampledToken best = sampler.sample(row, {.top_logprobs = 5}, 0.5).value();
    for (const TokenLogprob& top : best.top) edits[i].push_back({.token_id = top.token_id, .scale = 1.7f});
    edits[i].push_back({.token_id = 0, .bias = 3});
  }
  std::vector<LogitEdit> all_edits;
  std::vector<SampleRowParams> rows;
  std::vector<int32_t> ids;
  for (const SamplingParams& p : params) {
    const std::vector<LogitEdit>& of_row = edits[rows.size()];
    rows.push_back({.random = 0.37 + 0.2 * static_cast<double>(rows.size()),
                    .temperature = p.temperature,
                    .top_p = p.top_p,
                    .top_k = p.top_k,
                    .top_logprobs = p.top_logprobs,
                    .min_p = p.min_p,
                    .first_edit = static_cast<int32_t>(all_edits.size()),
                    .num_edits = static_cast<int32_t>(of_row.size()),
                    .first_logprob_id = static_cast<int32_t>(ids.size()),
                    .num_logprob_ids = static_cast<int32_t>(p.token_ids_logprob.size())});
    all_edits.insert(all_edits.end(), of_row.begin(), of_row.end());
    ids.insert(ids.end(), p.token_ids_logprob.begin(), p.token_ids_logprob.end());
  }
  std::vector<SampledRow> sampled(3);
  std::vector<float> id_logprobs(ids.size());
  ASSERT_TRUE(model.ranks().start_sample(rows, all_edits, {}, ids).ok());
  ASSERT_TRUE(model.ranks().take_sampled(sampled, id_logprobs).ok());
  size_t next_id = 0;
  for (size_t i = 0; i < 3; ++i) {
    std::vector<float> row = logits[i];
    const SampledToken want = sampler.sample(row, params[i], rows[i].random, edits[i]).value();
    EXPECT_EQ(sampled[i].status, SampleStatus::kOk);
    EXPECT_EQ(sampled[i].token_id, want.token_id) << i;
    if (params[i].top_logprobs < 0) continue;
    EXPECT_NEAR(sampled[i].logprob, want.logprob, 1e-4) << i;
    for (const TokenLogprob& listed : want.ids)
      EXPECT_NEAR(id_logprobs[next_id++], listed.logprob, 1e-4) << i;
    ASSERT_EQ(sampled[i].num_top, std::ssize(want.top));
    for (size_t k = 0; k < want.top.size(); ++k) EXPECT_EQ(sampled[i].top_ids[k], want.top[k].token_id);
  }
}

TEST_P(GpuRanks, MemoryThatOthersTookIsAnErrorThatNamesTheFlag) {
  const int64_t free_bytes = device_memory_info(0)->free_bytes;
  const Result<Buffer> taken = Buffer::make(free_bytes - (int64_t{256} << 20), device_memory());
  ASSERT_TRUE(taken.ok()) << taken.status().to_string();
  EngineConfig flags;
  flags.model_path = models() + "/" + GetParam();
  flags.device = "cuda";
  const ModelConfig config = load_model_config(flags.model_path).value();
  const Checkpoint checkpoint = Checkpoint::open(flags.model_path).value();
  const ModelPlan plan = plan_model(config, flags).value();
  RankGroupOptions options = kOptions;
  options.num_kv_pages = 1 << 20;
  const Status status = RankGroup::make(checkpoint, config, plan, plan.flags, options).status();
  EXPECT_EQ(status.code(), StatusCode::kDoesNotFit) << status.to_string();
  EXPECT_NE(status.message().find("the GPU cannot allocate"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("--mem-fraction-static below 0."), std::string::npos) << status.message();
}

TEST_P(GpuRanks, TacticsAreTimedOnceAndThenRead) {
  const TempFolder folder;
  EngineConfig flags;
  flags.model_path = models() + "/" + GetParam();
  flags.device = "cuda";
  flags.max_prefill_tokens = 512;
  flags.autotune_cache = folder.file("tactics.json");
  const ModelConfig config = load_model_config(flags.model_path).value();
  const Checkpoint checkpoint = Checkpoint::open(flags.model_path).value();
  const ModelPlan plan = plan_model(config, flags).value();
  if (plan.moe.device_ops().tactics.size() == 1) GTEST_SKIP() << "this GPU has only one tactic";
  const Result<TuneResult> timed = autotune(checkpoint, config, plan),
                           read = autotune(checkpoint, config, plan);
  ASSERT_TRUE(timed.ok()) << timed.status().to_string();
  EXPECT_NE(timed->note.find("timed in"), std::string::npos) << timed->note;
  EXPECT_GE(timed->moe.device_tactics().buckets.back(), 512);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_NE(read->note.find("cached in"), std::string::npos) << read->note;
  EXPECT_EQ(read->moe.device_tactics(), timed->moe.device_tactics());

  flags.enable_deterministic_inference = true;
  std::string log;
  set_log_sink([&log](LogLevel, const std::string& line) { log += line; });
  const ModelPlan one = plan_model(config, flags).value();
  set_log_sink({});
  EXPECT_NE(log.find("one algorithm for every batch"), std::string::npos) << log;
  EXPECT_EQ(autotune(checkpoint, config, one)->moe.device_tactics().of(1), 0u);
  EXPECT_EQ(one.moe.device_tactics().of(int64_t{1} << 40), 0u);
}

}  // namespace
}  // namespace fp4moe
