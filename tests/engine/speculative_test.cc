// Speculative decoding on the demo checkpoints: texts and log-probabilities have the bits of plain decoding.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <thread>

#include "base/check.h"
#include "engine/speculative_crowd.h"
#include "engine/trained_drafts.h"
#include "engine/uneven_crowd.h"
#include "formats/bf16.h"
#include "io/checkpoint/checkpoint.h"
#include "io/checkpoint/safetensors.h"
#include "io/config/model_config.h"
#include "io/small_model.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

class Speculation : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Demos, Speculation, ::testing::Values("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"),
                         demo_name);

struct Layout {
  int tp = 1, dp = 1;
  const char* kv_dtype = "auto";
  int64_t max_total_tokens = 8192;  // few: some requests are retracted
  const char* a2a = "none";
  bool deterministic = false;
  std::string text() const {
    return "tp " + std::to_string(tp) + " dp " + std::to_string(dp) + " KV " + kv_dtype + " pool " +
           std::to_string(max_total_tokens) + " a2a " + a2a;
  }
};

EngineConfig layout_config(const std::string& model, const Layout& layout) {
  EngineConfig config = config_of(model);
  config.device = "cpu";
  config.tp_size = layout.tp;
  config.dp_size = layout.dp;
  config.enable_dp_attention = layout.dp > 1;
  config.kv_cache_dtype = layout.kv_dtype;
  config.max_total_tokens = layout.max_total_tokens;
  config.moe_a2a_backend = layout.a2a;
  config.enable_deterministic_inference = layout.deterministic;
  config.schedule_conservativeness = 0;
  return config;
}

const char* other_demo(const std::string& model) {
  return model == "demo-dsv3-nvfp4" ? "demo-gptoss-mxfp4" : "demo-dsv3-nvfp4";
}

std::string demo_path(const std::string& model) { return std::string(FP4MOE_MODELS "/") + model; }

TEST_P(Speculation, OutputsAreThoseOfPlainDecoding) {
  for (const Layout& layout : {Layout{}, Layout{.kv_dtype = "fp8_e4m3"}, Layout{.max_total_tokens = 640},
                               Layout{.tp = 2}, Layout{.tp = 2, .dp = 2}}) {
    const EngineConfig config = layout_config(GetParam(), layout);
    const Crowd plain = run_crowd(config), drafted = run_crowd(with_ngrams(config));
    expect_plain(drafted, plain, "NGRAM " + layout.text());
    if (layout.max_total_tokens == 640) {
      EXPECT_GT(drafted.stats.num_retracted_reqs, 0);
    }
  }
}

TEST_P(Speculation, OutputsWithADraftModelAreThoseOfPlainDecoding) {
  for (const Layout& layout : {Layout{}, Layout{.kv_dtype = "fp8_e4m3"}, Layout{.max_total_tokens = 640},
                               Layout{.tp = 4, .a2a = "deepep"}, Layout{.tp = 4, .dp = 2}}) {
    EngineConfig config = layout_config(GetParam(), layout);
    const Crowd plain = run_crowd(config);
    config.speculative_algorithm = "STANDALONE";
    for (const char* draft : {other_demo(GetParam()), GetParam()}) {
      config.speculative_draft_model_path = demo_path(draft);
      config.speculative_num_steps = draft == GetParam() ? 5 : 3;
      expect_plain(run_crowd(config), plain, std::string(draft) + " drafts, " + layout.text());
    }
  }
}

TEST_P(Speculation, ADraftModelOfDataParallelGroupsHasTheOutputsOfOneRank) {
  for (const Layout& layout : {Layout{.tp = 2, .dp = 2, .deterministic = true},
                               Layout{.tp = 4, .dp = 2, .a2a = "deepep", .deterministic = true},
                               Layout{.tp = 4, .dp = 4, .a2a = "flashinfer", .deterministic = true}}) {
    const Crowd plain = run_crowd(layout_config(GetParam(), {.a2a = layout.a2a, .deterministic = true}));
    EngineConfig config = layout_config(GetParam(), layout);
    config.speculative_algorithm = "STANDALONE";
    config.speculative_draft_model_path = config.model_path;
    config.speculative_num_steps = 3;
    expect_plain(run_crowd(config), plain, layout.text());
  }
}

// The adaptive choice changes which drafts are verified, and nothing else.
TEST_P(Speculation, OutputsWithTheAdaptiveChoiceAreThoseOfPlainDecoding) {
  EngineConfig config = layout_config(GetParam(), {});
  const Crowd plain = run_crowd(config);
  config.speculative_adaptive = true;
  for (const char* algorithm : {"NGRAM", "STANDALONE"}) {
    config.speculative_algorithm = algorithm;
    config.speculative_draft_model_path = algorithm == std::string("NGRAM") ? "" : demo_path(GetParam());
    const Crowd drafted = run_crowd(config);
    for (size_t i = 0; i < plain.outputs.size(); ++i)
      EXPECT_EQ(drafted.outputs[i], plain.outputs[i]) << "request " << i << " " << algorithm;
    EXPECT_GT(drafted.stats.spec_proposed_drafts_total, 0) << algorithm;
  }
}

// Expects each of kSteps drafts in each step to be right: after a prompt in chunks, and after one whose pages
// are reused.
void expect_all_right(EngineConfig config, const std::string& what) {
  constexpr int64_t kSteps = 3, kOutput = 1 + 10 * (1 + kSteps);
  config.chunked_prefill_size = 7;
  config.speculative_num_steps = kSteps;
  const auto engine = make_engine(config);
  ASSERT_NE(engine, nullptr);
  for (int64_t copy = 0; copy < 3; ++copy) {
    const EngineStats before = engine->stats();
    Request request = requests(*engine)[2];
    // One token: the sequence ends before its prompt's last rows have been extended.
    request.sampling = {.temperature = 0, .max_new_tokens = copy == 0 ? 1 : kOutput, .ignore_eos = true};
    submit(*engine, std::move(request)).get();
    EngineStats after = engine->stats();
    for (; after.num_requests_total == before.num_requests_total; after = engine->stats())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const int64_t num_steps = copy == 0 ? 0 : 10;
    EXPECT_EQ(after.spec_verify_calls_total - before.spec_verify_calls_total, num_steps)
        << what << " copy " << copy;
    EXPECT_EQ(after.spec_correct_drafts_total - before.spec_correct_drafts_total, num_steps * kSteps) << what;
    if (copy > 0) {
      EXPECT_GT(after.cached_tokens_total, before.cached_tokens_total);
    }
  }
}

TEST_P(Speculation, AModelThatDraftsForItselfIsAlwaysRight) {
  for (const Layout& layout : {Layout{}, Layout{.tp = 4}}) {
    EngineConfig config = layout_config(GetParam(), layout);
    config.speculative_algorithm = "STANDALONE";
    config.speculative_draft_model_path = config.model_path;
    expect_all_right(config, layout.text());
  }
}

// The last two have layers with states.
constexpr const char* kMtpShapes[] = {"deepseek-v3-tiny", "glm-4.5", "qwen3.5-moe-tiny", "qwen3-next-tiny"};

// Random checkpoints with a layer for multi-token prediction.
class MtpSpeculation : public testing::Test {
 protected:
  std::string make(const std::string& like, const std::string& dialect) const {
    MakeTinyOptions options = small_model(like);
    options.dialect = dialect;
    options.num_mtp_layers = 1;
    options.vocab_size = 259;         // every id has a token
    options.intermediate_size = 128;  // for bf16 experts on 4 ranks
    const Status made = make_tiny(folder_.file(like + dialect), options);
    EXPECT_TRUE(made.ok()) << made.to_string();
    return folder_.file(like + dialect);
  }
  // Writes a copy of a bf16 checkpoint whose layers add nothing to the residual: its next token depends on
  // the last token alone, and its MTP layer passes on the token's embedding.
  static Status write_bigram(const std::string& from, const std::string& to) {
    std::filesystem::create_directories(to);
    for (const auto& file : std::filesystem::directory_iterator(from))
      if (file.path().extension() == ".json") std::filesystem::copy(file.path(), to);
    FP4MOE_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::open(from));
    FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(from));
    const bool has_centered_norms = config.centered_norms;
    std::vector<TensorSpec> specs;
    std::map<std::string, std::vector<bf16>> values;
    for (const TensorEntry& tensor : source.tensors()) {
      const std::string& name = tensor.name;
      specs.push_back({name, tensor.view.dtype, tensor.view.shape});
      std::vector<bf16>& data = values[name];
      data.resize(static_cast<size_t>(tensor.view.num_bytes()) / sizeof(bf16));
      std::memcpy(data.data(), tensor.view.data, data.size() * sizeof(bf16));
      if (name.ends_with("norm.weight")) std::ranges::fill(data, float_to_bf16(has_centered_norms ? 0 : 1));
      for (const char* zero : {"o_proj.weight", "out_proj.weight", "down_proj.weight", "eh_proj.weight"})
        if (name.ends_with(zero)) std::ranges::fill(data, float_to_bf16(0));
      if (name.ends_with("eh_proj.weight"))
        for (int64_t i = 0; i < tensor.view.shape[0]; ++i)
          data[static_cast<size_t>(i * tensor.view.shape[1] + i)] = float_to_bf16(1);
    }
    return write_safetensors(
        to + "/model.safetensors", specs, [&](const TensorSpec& spec, const ByteSink& sink) {
          const std::vector<bf16>& data = values.at(spec.name);
          return sink({reinterpret_cast<const uint8_t*>(data.data()), data.size() * sizeof(bf16)});
        });
  }
  static EngineConfig config_of_layout(const std::string& path, const Layout& layout) {
    EngineConfig config = layout_config("", layout);
    config.model_path = path;
    return config;
  }

  const TempFolder folder_;
};

TEST_F(MtpSpeculation, OutputsAreThoseOfPlainDecoding) {
  for (const char* dialect : {"modelopt", "compressed-nvfp4"})  // bf16 and FP4 experts
    for (const char* like : kMtpShapes) {
      const std::string path = make(like, dialect);
      for (const Layout& layout : {Layout{}, Layout{.max_total_tokens = 640},
                                   Layout{.tp = 2, .a2a = "deepep"}, Layout{.tp = 4, .dp = 2}}) {
        EngineConfig config = config_of_layout(path, layout);
        const Crowd plain = run_crowd(config);
        config.speculative_algorithm = "EAGLE";
        config.speculative_num_steps = 3;
        const std::string what = std::string(like) + " " + dialect + " " + layout.text();
        expect_plain(run_crowd(config), plain, what, /*correct=*/0);
      }
    }
}

TEST_F(MtpSpeculation, ALayerThatKnowsTheModelIsAlwaysRight) {
  for (const char* like : kMtpShapes) {
    const std::string path = folder_.file(std::string("bigram") + like);
    const Status written = write_bigram(make(like, "bf16"), path);
    ASSERT_TRUE(written.ok()) << written.to_string();
    for (const Layout& layout : {Layout{}, Layout{.tp = 2}}) {
      EngineConfig config = config_of_layout(path, layout);
      config.speculative_algorithm = "NEXTN";
      expect_all_right(config, layout.text());
    }
  }
}

// Drafts of any kind leave the outputs as they are; right ones save steps.
TEST_P(Speculation, DraftsComeFromTheSourceIfThereIsOne) {
  EngineConfig config = config_of(GetParam());
  config.device = "cpu";
  config.max_total_tokens = 8192;
  const Crowd plain = run_crowd(config);
  const std::vector<std::vector<int32_t>> whole = whole_texts(config, plain);
  for (const std::string kind : {"right", "wrong", "illegal"}) {
    const DraftSource source = drafts_of(whole, [kind](int32_t id, size_t i) {
      return kind == "right" ? id : kind == "wrong" ? 7 : i % 2 == 0 ? -1 : 1 << 30;
    });
    config.draft_source = [source](std::span<const int32_t> ids, int64_t max_tokens) {
      EXPECT_EQ(max_tokens, 5);
      return source(ids, max_tokens);
    };
    const Crowd drafted = run_crowd(with_ngrams(config));
    ASSERT_EQ(drafted.outputs, plain.outputs) << kind;
    const double length = drafted.stats.spec_accept_length();
    if (kind == "right") {
      EXPECT_GT(length, 4.5) << "of at most 6 tokens a step";
    }
    if (kind == "wrong") {
      EXPECT_LT(length, 1.2);
      EXPECT_GT(drafted.stats.spec_proposed_drafts_total, 1000);
    }
    EXPECT_EQ(drafted.stats.spec_proposed_drafts_total > 0, kind != "illegal");
  }
}

class TrainedDrafts : public ::testing::TestWithParam<TrainedDraft> {};
INSTANTIATE_TEST_SUITE_P(Demos, TrainedDrafts, ::testing::ValuesIn(kTrainedDrafts), trained_name);

TEST_P(TrainedDrafts, AreOftenRightAndChangeNoOutput) {
  for (const Layout& layout : {Layout{}, Layout{.tp = 2}})
    expect_trained_drafts(layout_config(GetParam().model, layout), GetParam(), layout.text());
}

TEST_P(TrainedDrafts, OfDataParallelGroupsHaveTheOutputsOfOneRank) {
  const std::string model = GetParam().model;
  for (const Layout& layout : {Layout{.tp = 2, .dp = 2, .deterministic = true},
                               Layout{.tp = 2, .dp = 2, .a2a = "deepep", .deterministic = true},
                               Layout{.tp = 4, .dp = 2, .a2a = "deepep", .deterministic = true},
                               Layout{.tp = 2, .dp = 2, .a2a = "flashinfer", .deterministic = true},
                               Layout{.tp = 4, .dp = 4, .deterministic = true}})
    expect_uneven_outputs(layout_config(model, layout),
                          layout_config(model, {.a2a = layout.a2a, .deterministic = true}), GetParam());
}

TEST(SpeculationFlags, WhatIsNotSupportedIsRefusedByName) {
  const auto refusal = [](auto change) {
    EngineConfig config = config_of("demo-gptoss-mxfp4");
    config.device = "cpu";
    config.speculative_algorithm = "NGRAM";
    config.progress_sink = [](int64_t, int64_t) { ADD_FAILURE() << "weights were read"; };
    change(config);
    const Result<std::unique_ptr<Engine>> engine = Engine::make(config);
    EXPECT_FALSE(engine.ok());
    return engine.status().message();
  };
  for (const char* algorithm : {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "ngram"})
    EXPECT_NE(refusal([&](EngineConfig& c) { c.speculative_algorithm = algorithm; }).find(algorithm),
              std::string::npos);
  EXPECT_NE(refusal([](EngineConfig& c) {
              c.model_path = demo_path("demo-gptoss-mxfp4");
              c.speculative_algorithm = "EAGLE";
            }).find("num_nextn_predict_layers = 0"),
            std::string::npos);
  const auto standalone = [&](auto change) {
    return refusal([&](EngineConfig& c) {
      c.speculative_algorithm = "STANDALONE";
      c.speculative_draft_model_path = demo_path("demo-dsv3-nvfp4");
      change(c);
    });
  };
  EXPECT_NE(standalone([](EngineConfig& c) {
              c.speculative_draft_model_path = "/none/such";
            }).find("--speculative-draft-model-path /none/such"),
            std::string::npos);
  EXPECT_NE(
      standalone([](EngineConfig& c) { c.speculative_eagle_topk = 4; }).find("--speculative-eagle-topk 4"),
      std::string::npos);
  EXPECT_NE(standalone([](EngineConfig& c) { c.speculative_num_steps = 64; }).find("0 to 63"),
            std::string::npos);
  EXPECT_NE(refusal([](EngineConfig& c) { c.speculative_num_draft_tokens = 1; }).find("2 to 64"),
            std::string::npos);
  EXPECT_NE(refusal([](EngineConfig& c) {
              c.speculative_ngram_max_match_window_size = 1;
            }).find("--speculative-ngram-max-match-window-size 1"),
            std::string::npos);
}

}  // namespace
}  // namespace fp4moe
