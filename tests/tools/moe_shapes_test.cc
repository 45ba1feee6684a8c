#include "bench/moe_shapes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <vector>

namespace fp4moe {
namespace {

const MoeShape& shape_named(const std::string& name) {
  for (const MoeShape& shape : moe_shapes()) {
    if (name == shape.name) return shape;
  }
  std::abort();
}

TEST(MoeShapesTest, AreChosenByName) {
  EXPECT_EQ(moe_shapes_of({"all"})->size(), moe_shapes().size());
  const auto two = moe_shapes_of({"qwen3_30b", "gptoss20b"});
  ASSERT_EQ(two->size(), 2u);
  EXPECT_EQ((*two)[1].hidden_size, 2880);
  EXPECT_EQ(moe_shapes_of({"qwen"}).status().message().rfind(
                "unknown shape 'qwen'; use one of: all, gptoss120b", 0),
            0u);
  EXPECT_EQ(moe_routing_of("random").status().message(),
            "unknown routing 'random'; use uniform, zipf or onehot");
}

// The lower bounds match those used for the peers' measurements: 11.2 us at 4708 GB/s for four experts of
// gpt-oss, 2323 us at 702 TFLOP/s for 8192 tokens.
TEST(MoeShapesTest, CostsAreWeightsReadAndFlops) {
  const MoeShape& gptoss = shape_named("gptoss120b");
  EXPECT_NEAR(moe_weight_bytes(gptoss, Fp4Format::kMxfp4, 4) / 4708e3, 11.2, 0.05);
  EXPECT_NEAR(moe_weight_bytes(gptoss, Fp4Format::kNvfp4, 4) / 4708e3, 11.9, 0.05);
  EXPECT_NEAR(moe_flops(gptoss, 8192 * 4) / 702e6, 2323, 1);
  EXPECT_NEAR(moe_weight_bytes(shape_named("dsv3_full"), Fp4Format::kMxfp4, 256) / 4708e3, 1272.1, 0.1);
}

class RoutingDrawTest : public testing::TestWithParam<MoeRouting> {};

TEST_P(RoutingDrawTest, EveryTokenHasDifferentExpertsAndWeightsOfOne) {
  for (const MoeShape& shape : moe_shapes()) {
    const RoutingDraw draw = draw_routing(shape, GetParam(), 37, 5);
    std::set<int32_t> local;
    int64_t pairs = 0;
    for (int64_t t = 0; t < 37; ++t) {
      std::set<int32_t> of_token;
      float sum = 0;
      for (int64_t k = 0; k < shape.topk; ++k) {
        const auto i = static_cast<size_t>(t * shape.topk + k);
        of_token.insert(draw.ids[i]);
        sum += draw.weights[i];
        EXPECT_GE(draw.ids[i], 0);
        EXPECT_LT(draw.ids[i], shape.num_experts);
        if (draw.ids[i] < shape.first_expert || draw.ids[i] >= shape.first_expert + shape.num_local) continue;
        local.insert(draw.ids[i]);
        ++pairs;
      }
      EXPECT_EQ(of_token.size(), static_cast<size_t>(shape.topk)) << shape.name;
      EXPECT_NEAR(sum, 1, 1e-5);
    }
    EXPECT_EQ(draw.active_experts, static_cast<int64_t>(local.size())) << shape.name;
    EXPECT_EQ(draw.local_pairs, pairs) << shape.name;
    if (GetParam() == MoeRouting::kOneHot) {
      EXPECT_EQ(draw.active_experts, shape.topk);
      EXPECT_EQ(draw.local_pairs, 37 * shape.topk);
    }
  }
}

TEST_P(RoutingDrawTest, TheSeedDecides) {
  const MoeShape& shape = shape_named("gptoss120b");
  EXPECT_EQ(draw_routing(shape, GetParam(), 9, 1).ids, draw_routing(shape, GetParam(), 9, 1).ids);
  EXPECT_NE(draw_routing(shape, GetParam(), 9, 1).ids, draw_routing(shape, GetParam(), 9, 2).ids);
}

INSTANTIATE_TEST_SUITE_P(All, RoutingDrawTest,
                         testing::Values(MoeRouting::kUniform, MoeRouting::kZipf, MoeRouting::kOneHot));

// Renaming preserves the draw: it is one-to-one and does not change the experts of other ranks.
TEST_P(RoutingDrawTest, RenamedExpertsFollowEachOther) {
  const MoeShape& shape = shape_named("dsv3_ep8");
  const RoutingDraw draw = draw_routing(shape, GetParam(), 5, 3);
  for (const int64_t first : {int64_t{0}, int64_t{7}, shape.num_local - 1}) {
    RoutingDraw renamed = draw;
    rename_experts(shape, first, renamed);
    std::map<int32_t, int32_t> names;
    for (size_t i = 0; i < draw.ids.size(); ++i) {
      const auto name = names.emplace(draw.ids[i], renamed.ids[i]).first->second;
      EXPECT_EQ(renamed.ids[i], name) << "the draw renamed one expert in two ways";
    }
    int64_t next = first;
    for (const auto& [id, name] : names) {
      const bool is_local = id >= shape.first_expert && id < shape.first_expert + shape.num_local;
      EXPECT_EQ(name, is_local ? shape.first_expert + next++ % shape.num_local : id);
    }
    EXPECT_EQ(next - first, draw.active_experts);
    EXPECT_EQ(renamed.weights, draw.weights);
  }
}

TEST(RoutingDrawTest, ZipfIsSkewed) {
  const MoeShape& shape = shape_named("gptoss120b");
  std::vector<int> count(128, 0), uniform_count(128, 0);
  for (const int32_t id : draw_routing(shape, MoeRouting::kZipf, 4096, 1).ids)
    ++count[static_cast<size_t>(id)];
  for (const int32_t id : draw_routing(shape, MoeRouting::kUniform, 4096, 1).ids)
    ++uniform_count[static_cast<size_t>(id)];
  EXPECT_GT(*std::max_element(count.begin(), count.end()), 4096 / 3);
  EXPECT_LT(*std::max_element(uniform_count.begin(), uniform_count.end()), 200);
}

TEST(MoePeersTest, HaveEveryPointOfTheTable) {
  const auto peers = MoePeers::read(FP4MOE_PEERS);
  ASSERT_TRUE(peers.ok()) << peers.status().message();
  for (const MoeShape& shape : moe_shapes()) {
    for (int64_t t = 1; t <= 8192; t *= 2) EXPECT_NE(peers->find(shape.name, t), nullptr) << shape.name << t;
  }
  EXPECT_EQ(peers->find("gptoss120b", 1)->name, "Marlin");
  EXPECT_EQ(peers->find("gptoss120b", 1)->us, 44.6);
  EXPECT_EQ(peers->find("gptoss120b", 1)->multiple, 3.97);
  EXPECT_EQ(peers->find("dsv4_flash", 8192)->us, peers->find("seedbench", 8192)->us);
  EXPECT_EQ(peers->find("gptoss120b", 3), nullptr);
  EXPECT_EQ(MoePeers::read("/nowhere").status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace fp4moe
