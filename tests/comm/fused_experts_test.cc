// Sums that the few-token layer of experts sends, against separate launches, bit for bit. The layer needs
// half of a GPU, so two ranks share one if there are no two.
#include <gtest/gtest.h>

#include <cstdlib>

namespace {

// Before the default of gpu_ranks.h.
inline const bool two_ranks_per_gpu = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "2", 0);
  return true;
}();

}  // namespace

#include "comm/fused_rank.h"
#include "device/graph.h"
#include "kernels/cuda/experts/few_tokens.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/expert_case.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 16, kTopk = 4, kIntermediate = 64;

// A rank's experts and the routes of its tokens.
class ExpertsOfRank {
 public:
  ExpertsOfRank(Fp4Format format, const FusedShape& s, int rank) : format_(format), s_(s) {
    const auto seed = static_cast<uint64_t>(10 * rank + 3);
    Random random(seed);
    const int64_t h = s.hidden, i = kIntermediate;
    const int64_t up_bytes = tiled_bytes(format, 2 * i, h), down_bytes = tiled_bytes(format, h, i);
    std::vector<uint8_t> up_tiles(static_cast<size_t>(kExperts * up_bytes)),
        down_tiles(static_cast<size_t>(kExperts * down_bytes));
    std::vector<float> scales;
    for (int64_t e = 0; e < kExperts; ++e) {
      const Fp4Matrix gate(format, i, h, random), up(format, i, h, random), down(format, h, i, random);
      const GateUpFactors f =
          pack_gate_up_tiles(gate.view(), up.view(), up_tiles.data() + e * up_bytes).value();
      const float down_factor = pack_tiles(down.view(), down_tiles.data() + e * down_bytes).value();
      scales.insert(scales.end(), {f.gate * gate.view().tensor_scale, f.up * up.view().tensor_scale,
                                   down_factor * down.view().tensor_scale});
    }
    gate_up_ = on_device(up_tiles), down_ = on_device(down_tiles), scales_ = on_device(scales);
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t k = 0; k < kTopk; ++k)
        ids.push_back(static_cast<int32_t>((3 * t + 5 * k + rank) % kExperts));
    ids[1] = -1;  // an expert of another rank
    ids_ = on_device(ids);
    weights_ = on_device(random_floats(s.tokens * kTopk, seed + 1));
    x_ = on_device(random_bf16(s.tokens * h, seed + 2, 1));
    counters_ = on_device(std::vector<uint8_t>(kMoeCounterBytes));
    const int64_t workspace = few_tokens_workspace_bytes(experts(), kTopk);
    workspace_ = on_device(std::vector<uint8_t>(static_cast<size_t>(workspace)));
  }
  void run(const SumsToSend* send, float* partial) const {
    const DeviceMoeArgs args{.experts = experts(),
                             .x = x_.as<bf16>(),
                             .ids = ids_.as<int32_t>(),
                             .weights = weights_.as<float>(),
                             .num_tokens = s_.tokens,
                             .topk = kTopk,
                             .out = partial,
                             .send = send,
                             .counters = counters_.data(),
                             .workspace = workspace_.data()};
    ASSERT_TRUE(few_tokens_fits(args));
    few_tokens_layer(args);
  }

 private:
  TiledExperts experts() const {
    return {.format = format_,
            .num_experts = kExperts,
            .hidden_size = s_.hidden,
            .intermediate_size = kIntermediate,
            .gate_up = gate_up_.data(),
            .down = down_.data(),
            .scales = scales_.as<float>()};
  }

  const Fp4Format format_;
  const FusedShape s_;
  Buffer gate_up_, down_, scales_, ids_, weights_, x_, counters_, workspace_;
};

auto producer_of(Fp4Format format) {
  return [format](const FusedShape& s, int rank) -> FusedRank::Producer {
    const auto experts = std::make_shared<const ExpertsOfRank>(format, s, rank);
    return [experts](const SumsToSend* send, float* partial) { experts->run(send, partial); };
  };
}

class FusedExperts : public testing::TestWithParam<Fp4Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, FusedExperts, testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4));

TEST_P(FusedExperts, HaveTheBitsOfSeparateKernels) {
  for (const int64_t hidden : {256, 2880}) {
    TestGroup group(2, fused_region(hidden));
    for (int64_t tokens = 1; tokens <= kMaxSentRows; ++tokens) {
      const FusedRanks ranks = fused_ranks(group, {tokens, hidden}, producer_of(GetParam()));
      for (const Next next : {Next::kLinear, Next::kRouter}) {
        for (const bool fused : {true, false}) enqueue(group, ranks, next, fused);
        group.expect_ok();
        for (const auto& rank : ranks)
          rank->expect_same_bits(std::to_string(tokens) + " x " + std::to_string(hidden));
      }
    }
  }
}

// As in a model: attention's output with a router after it, experts with a linear layer after them.
TEST_P(FusedExperts, AlternateWithLinearLayersInAGraph) {
  TestGroup group(2, fused_region(2880));
  const FusedShape shape{2, 2880};
  const FusedRanks experts = fused_ranks(group, shape, producer_of(GetParam())),
                   linear = fused_ranks(group, shape, linear_producer);
  std::vector<Graph> graphs;
  group.for_each([&](int r, DeviceCommunicator& communicator) {
    const auto i = static_cast<size_t>(r);
    graphs.push_back(Graph::capture(group.ranks[i]->stream, [&]() -> Status {
                       for (int layer = 0; layer < 12; ++layer) {
                         linear[i]->run_fused(communicator, {"attention_out", layer}, Next::kRouter);
                         experts[i]->run_fused(communicator, {"experts", layer}, Next::kLinear);
                       }
                       return {};
                     }).value());
  });
  constexpr int kReplays = 20;
  group.replay(graphs, kReplays);
  for (int i = 0; i < 12 * kReplays; ++i) {
    enqueue(group, linear, Next::kRouter, /*fused=*/false);
    enqueue(group, experts, Next::kLinear, /*fused=*/false);
  }
  group.expect_ok();
  for (const FusedRanks* ranks : {&experts, &linear})
    for (const auto& rank : *ranks) rank->expect_same_bits("replays");
}

TEST(FusedExpertTactics, FewTokensSends) {
  for (const DeviceMoeTactic& tactic : sm90_moe_ops()->tactics)
    EXPECT_EQ(tactic.sends_sums, tactic.name == std::string("few_tokens")) << tactic.name;
}

}  // namespace
}  // namespace fp4moe
