// Experts placed by load on CPU ranks: placements and moves change no output, and even out the ranks' loads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>

#include "engine/ranks/loaded_ranks.h"
#include "engine/speculative_crowd.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"
#include "model/plan_placements.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 32;
constexpr const char* kBias = "mlp.gate.e_score_correction_bias";

// Replaces a float32 tensor [E] of a safetensors file.
void write_floats(const std::string& path, const std::string& name, const std::vector<float>& values) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string header(length, ' ');
  file.read(header.data(), static_cast<std::streamsize>(length));
  const size_t entry = header.find("\"" + name + "\"");
  ASSERT_NE(entry, std::string::npos) << name;
  const std::string key = "\"data_offsets\":[";
  const size_t offsets = header.find(key, entry);
  ASSERT_NE(offsets, std::string::npos) << name;
  const int64_t offset = std::stoll(header.substr(offsets + key.size()));
  file.seekp(static_cast<std::streamoff>(sizeof length + length) + offset);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(float)));
  ASSERT_TRUE(file.good());
}

// A model with DeepSeek's router, whose biases favour experts as Zipf's law does: expert (7 r) % 32 has rank
// r in layer 1, and other ones in layer 2.
class PlacedExperts32 : public testing::Test {
 protected:
  void SetUp() override {
    MakeTinyOptions options = small_model("deepseek-v3-tiny");
    options.num_hidden_layers = 3;
    options.num_experts = kExperts;
    options.top_k = 4;
    options.vocab_size = 259;
    options.num_groups = 8;
    options.top_k_groups = 4;
    ASSERT_TRUE(is_ok(make_tiny(folder_.path(), options)));
    for (const int layer : {1, 2}) {
      std::vector<float> bias(kExperts);
      for (int64_t r = 0; r < kExperts; ++r)
        bias[static_cast<size_t>((7 * r + 3 * layer) % kExperts)] =
            -0.05f * std::log(static_cast<float>(r + 1));
      write_floats(folder_.path() + "/model.safetensors",
                   "model.layers." + std::to_string(layer) + "." + kBias, bias);
    }
  }

  EngineConfig config(int tp, int dp = 1) const {
    EngineConfig config;
    config.model_path = folder_.path();
    config.device = "cpu";
    config.threads = 2;
    config.page_size = 8;
    config.context_length = 512;
    config.max_total_tokens = 16384;
    config.chunked_prefill_size = 48;
    config.tp_size = tp;
    config.dp_size = dp;
    config.enable_dp_attention = dp > 1;
    config.moe_a2a_backend = "deepep";
    return config;
  }

  EngineConfig placed(int tp, int dp = 1) const {
    EngineConfig with = config(tp, dp);
    with.ep_num_redundant_experts = 2 * tp;
    with.enable_eplb = true;
    with.eplb_rebalance_num_iterations = 0;
    return with;
  }

  TempFolder folder_;
};

LoadedRanks load(const EngineConfig& flags) {
  return load_ranks(flags,
                    {.max_batch_tokens = 96, .max_logit_rows = 96 * flags.dp_size, .num_kv_pages = 24});
}

// Runs a prompt on all groups; returns all rows of logits.
std::vector<float> logits_of(LoadedRanks& loaded, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids, pages(12);
  std::iota(pages.begin(), pages.end(), 1);
  for (int i = 0; i < 90; ++i) ids.push_back(static_cast<int32_t>(random() % 256));
  std::vector<int64_t> rows(ids.size());
  std::iota(rows.begin(), rows.end(), 0);
  const SequenceRows sequence{0, std::ssize(ids), 0, pages};
  std::vector<Batch> groups(static_cast<size_t>(loaded.ranks->num_groups()),
                            Batch{ids, rows, {&sequence, 1}, rows});
  EXPECT_TRUE(is_ok(loaded.ranks->execute_step(groups)));
  const float* logits = loaded.ranks->logits();
  return {logits, logits + static_cast<int64_t>(groups.size() * ids.size()) * loaded.config.vocab_size};
}

TEST_F(PlacedExperts32, LogitsAreThoseWithoutAPlacementBeforeAndAfterMoves) {
  for (const auto& [tp, dp] : {std::pair{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}}) {
    SCOPED_TRACE(testing::Message() << "tp " << tp << " dp " << dp);
    LoadedRanks plain = load(config(tp, dp)), moved = load(placed(tp, dp));
    ASSERT_NE(plain.ranks, nullptr);
    ASSERT_NE(moved.ranks, nullptr);
    const auto added = static_cast<double>(moved.ranks->weight_bytes() - plain.ranks->weight_bytes());
    const int64_t planned = rank_weight_bytes(*moved.checkpoint, moved.config, moved.plan) -
                            rank_weight_bytes(*plain.checkpoint, plain.config, plain.plan);
    EXPECT_GT(planned, 0);
    EXPECT_NEAR(added / static_cast<double>(tp * planned), 1, 0.2);
    int64_t num_moved = 0;
    for (uint32_t round = 0; round < 3; ++round) {
      EXPECT_EQ(logits_of(moved, round), logits_of(plain, round)) << "round " << round;
      const Result<ExpertMoves> moves = moved.ranks->rebalance_experts();
      ASSERT_TRUE(is_ok(moves.status()));
      EXPECT_LE(moves->imbalance_after, moves->imbalance_before);
      num_moved += moves->num_experts;
    }
    EXPECT_EQ(num_moved > 0, tp > 1);
    EXPECT_EQ(moved.ranks->expert_load().tokens, plain.ranks->expert_load().tokens);
    EXPECT_EQ(plain.ranks->rebalance_experts().status().code(), StatusCode::kUnsupported);
  }
}

TEST_F(PlacedExperts32, TheBusiestRankHasAtMostATenthMoreThanTheMean) {
  for (const int tp : {2, 4}) {
    SCOPED_TRACE(testing::Message() << "ep " << tp);
    LoadedRanks ranks = load(placed(tp));
    for (uint32_t seed = 0; seed < 20; ++seed) logits_of(ranks, seed);
    const ExpertMoves moves = ranks.ranks->rebalance_experts().value();
    EXPECT_GT(moves.imbalance_before, 1.15);
    EXPECT_LE(moves.imbalance_after, 1.1);
    EXPECT_EQ(moves.num_layers, 2);
    EXPECT_GT(moves.num_bytes, 0);
    for (uint32_t seed = 100; seed < 120; ++seed) logits_of(ranks, seed);  // other rows of the same routing
    EXPECT_LE(ranks.ranks->rebalance_experts()->imbalance_before, 1.1);
  }
}

TEST_F(PlacedExperts32, PlacementsFromFilesAndLoadsChangeNoLogits) {
  LoadedRanks plain = load(config(2));
  const std::vector<float> want = logits_of(plain, 1);
  std::string map = "[", counts = "[", report = R"({"model": "m", "layers": [)";
  for (int layer = 0; layer < 3; ++layer) {
    map += layer == 0 ? "[" : ",[";
    counts += layer == 0 ? "[" : ",[";
    report += (layer == 0 ? "" : ",") + (R"({"layer": )" + std::to_string(layer)) +
              R"(, "tokens": 1, "experts": [)";
    for (int64_t p = 0; p < kExperts + 4; ++p)
      map += (p == 0 ? "" : ",") + std::to_string((p * 5 + layer) % kExperts);
    for (int64_t e = 0; e < kExperts; ++e) {
      counts += (e == 0 ? "" : ",") + std::to_string(1000 / (e + 1));
      report += (e == 0 ? "" : ",") + std::to_string(1000 / (e + 1));
    }
    map += "]";
    counts += "]";
    report += "]}";
  }
  map += "]";
  counts += "]";
  std::ofstream(folder_.file("load.json")) << report << "]}";
  for (const std::string& location :
       {R"({"physical_to_logical_map": )" + map + "}", R"({"logical_count": )" + counts + "}",
        R"({"logical_count": [)" + counts + "," + counts + "]}", folder_.file("load.json")}) {
    EngineConfig flags = config(2);
    flags.ep_num_redundant_experts = 4;
    flags.init_expert_location = location;
    LoadedRanks ranks = load(flags);
    ASSERT_NE(ranks.ranks, nullptr) << location;
    EXPECT_EQ(logits_of(ranks, 1), want) << location.substr(0, 40);
    if (!location.starts_with(R"({"physical)")) {
      EXPECT_FALSE((*ranks.plan.placements)[1] == ExpertPlacement::trivial({kExperts, kExperts + 4, 2}));
    }
  }
}

// The packed weights of every format and scheme move: with biases, with input scales, and as bf16.
TEST(PlacedDemos, LogitsAreThoseWithoutAPlacementForEveryScheme) {
  struct Case {
    const char *model, *scheme, *rows;
    const char* dtype = "auto";
  };
  for (const Case& c : {Case{"demo-gptoss-mxfp4", "w4a16", "bf16"},
                        {"demo-gptoss-mxfp4", "w4a8", "fp8"},
                        {"demo-dsv3-nvfp4", "w4a4", "nvfp4"},
                        {"demo-dsv3-nvfp4", "w4a8", "bf16"},
                        {"demo-dsv3-nvfp4", "w4a16", "bf16", "float32"}}) {
    SCOPED_TRACE(testing::Message() << c.model << " " << c.scheme << " " << c.rows << " " << c.dtype);
    EngineConfig flags = config_of(c.model);
    flags.device = "cpu";
    flags.fp4_compute = c.scheme;
    flags.dtype = c.dtype;
    flags.deepep_dispatcher_output_dtype = c.rows;
    flags.moe_a2a_backend = "deepep";
    flags.tp_size = 2;
    LoadedRanks plain = load(flags);
    flags.ep_num_redundant_experts = 4;
    flags.enable_eplb = true;
    LoadedRanks moved = load(flags);
    ASSERT_NE(moved.ranks, nullptr);
    EXPECT_EQ(logits_of(moved, 1), logits_of(plain, 1));
    EXPECT_GT(moved.ranks->rebalance_experts().value().num_experts, 0);
    EXPECT_EQ(logits_of(moved, 2), logits_of(plain, 2));
  }
}

TEST_F(PlacedExperts32, ARebalanceUnderLoadLosesNoRequestAndChangesNoOutput) {
  const Crowd plain = run_crowd(config(2));
  ASSERT_EQ(plain.outputs.size(), 32u);
  EngineConfig every_step = placed(2);
  every_step.eplb_rebalance_num_iterations = 1;
  EXPECT_EQ(run_crowd(every_step).outputs, plain.outputs) << "a rebalance after each step";

  const auto engine = make_engine(placed(4));
  ASSERT_NE(engine, nullptr);
  std::vector<std::future<Output>> crowd;
  for (Request& request : requests(*engine)) crowd.push_back(submit(*engine, std::move(request)));
  int64_t num_moved = 0;
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const Result<ExpertMoves> moves = engine->rebalance_experts();
    ASSERT_TRUE(is_ok(moves.status()));
    num_moved += moves->num_experts;
  }
  EXPECT_GT(num_moved, 0);
  const ExpertMoveTotals totals = engine->stats().expert_moves;
  EXPECT_EQ(totals.num_rebalances, 5);
  EXPECT_EQ(totals.num_experts, num_moved);
  EXPECT_GT(totals.num_bytes, 0);
  EXPECT_GT(totals.seconds, 0);
  EXPECT_EQ(std::accumulate(totals.by_seconds.begin(), totals.by_seconds.end(), int64_t{0}), 5);
  for (size_t i = 0; i < crowd.size(); ++i) EXPECT_EQ(crowd[i].get(), plain.outputs[i]) << "request " << i;
}

TEST_F(PlacedExperts32, RefusesWhatIsNotSupported) {
  const ModelConfig model = load_model_config(folder_.path()).value();
  const auto refusal = [&](const auto& change) {
    EngineConfig flags = config(2);
    change(flags);
    return plan_model(model, flags).status().message();
  };
  EXPECT_EQ(refusal([](auto& f) { f.ep_num_redundant_experts = 3; }),
            "ep=2 does not divide num_experts=32 plus ep_num_redundant_experts=3; nearest legal choice: "
            "--ep-num-redundant-experts 4");
  for (const char* a2a : {"none", "flashinfer"}) {
    EXPECT_EQ(
        refusal([&](auto& f) {
          f.ep_num_redundant_experts = 2;
          f.moe_a2a_backend = a2a;
        }),
        "ep_num_redundant_experts=2 with a2a=" + std::string(a2a) +
            " is not supported, because sums would depend on the ranks that have an expert; nearest legal "
            "choice: --moe-a2a-backend deepep");
  }
  EXPECT_NE(refusal([](auto& f) { f.ep_num_redundant_experts = -2; }).find("must be between 0 and"),
            std::string::npos);
  const auto location = [&](const std::string& text) {
    return refusal([&](auto& f) { f.init_expert_location = text; });
  };
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"map.pt", "a PyTorch file"},
           {"/nonexistent.json", "/nonexistent.json"},
           {"{", "the expert location"},
           {"{}", "has 0 of these keys"},
           {R"({"logical_count": [], "layers": []})", "has 2 of these keys"},
           {R"({"logical_count": [], "rank": 0})", "unknown key \"rank\""},
           {R"({"logical_count": [[1]]})", "logical_count has 1 elements; legal: 3"},
           {R"({"logical_count": [[1], [1], [1]]})", "logical_count[0] has 1 elements; legal: 32"},
           {R"({"logical_count": 5})", "logical_count is 5, not an array"},
           {R"({"physical_to_logical_map": [[0], [0], [0]]})", "legal: 32"},
           {R"({"layers": [{"layer": 3, "experts": []}]})", "layers[0].layer is 3; legal: 0 to 2"},
           {R"({"layers": [{"layer": 1}]})", "without"}}) {
    const std::string message = location(text);
    EXPECT_TRUE(message.starts_with("--init-expert-location")) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  const auto engine = make_engine(config(2));
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->rebalance_experts().status().message(),
            "experts are moved between ranks only with --enable-eplb");
}

}  // namespace
}  // namespace fp4moe
