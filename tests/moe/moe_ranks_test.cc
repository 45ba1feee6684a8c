// Compares whole MoE layers on thread ranks (router, transport and runner together) with one rank.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>

#include "comm/job.h"
#include "moe/layer_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

using Rows = std::vector<float>;

constexpr LayerSize kSize{128, 256, 8, 3};

class RanksCase : public ExpertsCase {
 public:
  explicit RanksCase(Fp4Format format, const LayerSize& size = kSize)
      : ExpertsCase(size, format, ActivationKind::kSilu) {
    router_weight_ = to_bf16(random.normal(size.num_experts * size.hidden, 0.2f));
    router.weight = router_weight_.data();
  }
  // Adds a bf16 shared expert and the gate vector from which its sigmoid scale is computed.
  void add_shared_expert() {
    constexpr int64_t kI = 96;
    const int64_t H = problem.hidden_size;
    const auto linear = [&](int64_t n, int64_t k) {
      dense_.push_back(std::make_unique<std::vector<bf16>>(to_bf16(random.normal(n * k, 0.1f))));
      return LinearWeightsView{.weight = dense_.back()->data(), .n = n, .k = k};
    };
    shared.mlp = {H, kI, linear(kI, H), linear(kI, H), linear(H, kI)};
    shared.gate = linear(1, H).weight;
    has_shared = true;
  }
  RouterWeights router;
  SharedExpertWeights shared;
  bool has_shared = false;

 private:
  std::vector<bf16> router_weight_;
  std::vector<std::unique_ptr<std::vector<bf16>>> dense_;
};

// Computes one rank's residual + layer(x), for its group's `x` [T, H].
Status run_rank(const RanksCase& c, const MoePlan& whole, const Rows& x, int rank, const TransportSite& site,
                Rows& out) {
  ThreadPool pool(1);
  const MoePlan plan = whole.at_rank(rank);
  auto layer =
      MoeLayer::make(plan, ref_dense_ops(), c.router, c.weights, c.has_shared ? &c.shared : nullptr, pool);
  if (!layer.ok()) return layer.status();
  auto transport = make_transport(plan, site);
  if (!transport.ok()) return transport.status();
  const int64_t H = c.problem.hidden_size, T = static_cast<int64_t>(x.size()) / H;
  ActBuffer act(plan.problem().act_dtype, T, H, x);
  out.assign(x.size(), 0.5f);
  Arena scratch = std::move(*Arena::make((*layer)->scratch_bytes(site.max_group_rows, **transport)));
  return (*layer)->forward_moe({0, act.view(), x.data(), out.data()}, **transport, scratch, pool);
}

// Runs the layer on choice.tp ranks with each group's x. Every rank of a group must have the same bits.
std::vector<Rows> run(const RanksCase& c, const MoeChoice& choice, const std::vector<Rows>& groups) {
  const auto plan = plan_moe(c.problem, choice);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  if (!plan.ok()) return {};
  EXPECT_EQ(plan->a2a()->name, choice.a2a);
  const int R = choice.tp, group = R / choice.dp;
  constexpr int64_t kRecord = 128 << 10, kStaging = 16 << 10, kMaxRows = 64;
  const auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const int64_t world_bytes = up(Communicator::heap_bytes(R, kRecord, kStaging));
  const int64_t group_bytes = up(Communicator::heap_bytes(group, 64, kStaging));
  JobOptions options;
  options.fabric = "threads";
  options.num_ranks = R;
  options.heap_bytes = world_bytes + group_bytes + transport_heap_bytes(*plan, kMaxRows);
  auto job = Job::open(options);
  EXPECT_TRUE(job.ok()) << job.status().to_string();
  std::vector<Rows> out(static_cast<size_t>(R));
  std::vector<Status> status(out.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < R; ++r)
    threads.emplace_back([&, r] {
      Endpoint& endpoint = (*job)->endpoint(r);
      Communicator world(endpoint, 0, R, {0, kRecord, kStaging, 0}, {});
      Communicator attention(endpoint, r / group * group, group, {world_bytes, 64, kStaging, 4}, {});
      const bool alone = R == 1;
      const auto i = static_cast<size_t>(r);
      status[i] = run_rank(
          c, *plan, groups[i / static_cast<size_t>(group)], r,
          {alone ? nullptr : &world, group == R ? nullptr : &attention, world_bytes + group_bytes, kMaxRows},
          out[i]);
      if (!status[i].ok()) endpoint.fail(status[i]);
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<Rows> result;
  for (size_t r = 0; r < out.size(); ++r) {
    EXPECT_TRUE(status[r].ok()) << "rank " << r << ": " << status[r].to_string();
    if (r % static_cast<size_t>(group) == 0) result.push_back(out[r]);
    EXPECT_EQ(out[r], result.back()) << "rank " << r;
  }
  return result;
}

MoeChoice ranks(int tp, const char* a2a, int dp = 1) {
  MoeChoice choice{.a2a = a2a, .tp = tp, .ep = tp, .dp = dp};
  choice.enable_dp_attention = dp > 1;
  return choice;
}

struct SchemeCase {
  Fp4Format format;
  const char* runner;
  const char* compute;
};
const SchemeCase kSchemes[] = {{Fp4Format::kMxfp4, "auto", "w4a16"},
                               {Fp4Format::kNvfp4, "auto", "w4a16"},
                               {Fp4Format::kNvfp4, "flashinfer_cutedsl", "auto"},
                               {Fp4Format::kNvfp4, "flashinfer_cutlass", "auto"},
                               {Fp4Format::kMxfp4, "auto", "w4a8"},
                               {Fp4Format::kNvfp4, "auto", "w4a8"}};

TEST(MoeRanksTest, DeepepIsOneRanksBitsOnAnyNumber) {
  for (const SchemeCase& s : kSchemes)
    for (const char* payload : {"bf16", "fp8", "nvfp4"}) {
      RanksCase c(s.format);
      const Rows x = c.tokens(13);
      SCOPED_TRACE(std::string(fp4_format_name(s.format)) + " " + s.runner + " " + s.compute + " " + payload);
      const auto at = [&](int tp, int dp) {
        MoeChoice choice = ranks(tp, "deepep", dp);
        choice.runner = s.runner;
        choice.fp4_compute = s.compute;
        choice.deepep_payload = payload;
        return choice;
      };
      const Rows one = run(c, at(1, 1), {x})[0];
      EXPECT_EQ(run(c, at(2, 1), {x})[0], one);
      EXPECT_EQ(run(c, at(4, 1), {x})[0], one);
      const auto parts =
          run(c, at(4, 4), {Rows(x.begin(), x.begin() + 128), {}, Rows(x.begin() + 128, x.end()), x});
      EXPECT_EQ(parts[3], one);
      EXPECT_EQ(parts[0], Rows(one.begin(), one.begin() + 128));
      EXPECT_EQ(parts[2], Rows(one.begin() + 128, one.end()));
    }
}

TEST(MoeRanksTest, OtherProtocolsAreWithinTheBudgetOfOneRank) {
  for (const SchemeCase& s : kSchemes) {
    RanksCase c(s.format);
    const Rows x = c.tokens(13);
    const auto with = [&](MoeChoice choice) {
      choice.runner = s.runner;
      choice.fp4_compute = s.compute;
      return choice;
    };
    const Rows one = run(c, with({}), {x})[0];
    for (const int tp : {2, 4})
      for (const char* a2a : {"none", "flashinfer"})
        for (const int dp : {1, tp}) {
          SCOPED_TRACE(std::string(fp4_format_name(s.format)) + " " + s.runner + " " + s.compute + " " + a2a +
                       " tp " + std::to_string(tp) + " dp " + std::to_string(dp));
          MoeChoice choice = with(ranks(tp, a2a, dp));
          choice.disable_fp4_allgather = true;
          const auto out = run(c, choice, std::vector<Rows>(static_cast<size_t>(dp), x));
          for (const Rows& rows : out) EXPECT_TRUE(within_relative_l2(rows, one, 3.5e-3));
        }
  }
}

// Experts are split along I.
TEST(MoeRanksTest, SplitExperts) {
  for (const Fp4Format format : kExpertFormats) {
    RanksCase c(format);
    const Rows x = c.tokens(13);
    const Rows one = run(c, {}, {x})[0];
    for (const int tp : {2, 4}) {
      MoeChoice choice = ranks(tp, "none");
      choice.ep = 1;
      EXPECT_TRUE(within_relative_l2(run(c, choice, {x})[0], one, 3e-3));
    }
  }
}

// The shared expert is applied once: whole if rows are exchanged; with a2a none, as shards that add up.
TEST(MoeRanksTest, SharedExpertCountsOnce) {
  RanksCase c(Fp4Format::kMxfp4);
  const Rows x = c.tokens(13);
  const Rows without = run(c, {}, {x})[0];
  c.add_shared_expert();
  const Rows one = run(c, {}, {x})[0], deepep = run(c, ranks(1, "deepep"), {x})[0];
  EXPECT_FALSE(within_relative_l2(without, one, 0.05));
  for (const int tp : {2, 4}) {
    EXPECT_EQ(run(c, ranks(tp, "deepep"), {x})[0], deepep);
    for (const Rows& rows : run(c, ranks(tp, "deepep", tp), std::vector<Rows>(static_cast<size_t>(tp), x)))
      EXPECT_EQ(rows, deepep);
    for (const char* a2a : {"none", "flashinfer"}) {
      EXPECT_TRUE(within_relative_l2(run(c, ranks(tp, a2a), {x})[0], one, 3.5e-3)) << a2a;
      std::vector<Rows> groups(static_cast<size_t>(tp), x);
      groups[1].clear();
      const auto parts = run(c, ranks(tp, a2a, tp), groups);
      EXPECT_TRUE(within_relative_l2(parts[0], one, 3.5e-3)) << a2a;
      EXPECT_TRUE(parts[1].empty());
    }
  }
}

// With the deterministic flag, any number of ranks gives the same bits.
TEST(MoeRanksTest, DeterministicSumsDoNotDependOnRanks) {
  RanksCase c(Fp4Format::kMxfp4);
  const Rows x = c.tokens(13);
  const auto with = [&](int tp, const char* a2a) {
    MoeChoice choice = ranks(tp, a2a);
    choice.deterministic = true;
    return run(c, choice, {x})[0];
  };
  const Rows none = with(1, "none"), flashinfer = with(1, "flashinfer");
  for (const int tp : {2, 4}) {
    EXPECT_EQ(with(tp, "none"), none);
    EXPECT_EQ(with(tp, "flashinfer"), flashinfer);
  }
}

// Rows sent as NVFP4 equal the rows that w4a4 would quantise itself.
TEST(MoeRanksTest, Nvfp4DispatchIsW4a4sQuantiser) {
  for (const char* scales : {"static", "per_token"})
    for (const char* runner : {"flashinfer_cutedsl", "flashinfer_cutlass"}) {
      RanksCase c(Fp4Format::kNvfp4);
      const Rows x = c.tokens(13);
      const auto with = [&](const char* a2a, const char* payload) {
        MoeChoice choice = ranks(4, a2a, 4);
        choice.runner = runner;
        choice.act_scales = scales;
        choice.deepep_payload = choice.flashinfer_payload = payload;
        return run(c, choice, {x, {}, x, x})[0];
      };
      SCOPED_TRACE(std::string(runner) + " " + scales);
      EXPECT_EQ(with("deepep", "nvfp4"), with("deepep", "bf16"));
      EXPECT_EQ(with("flashinfer", "nvfp4"), with("flashinfer", "bf16"));
    }
}

// If activations stay bf16, the payload changes the result.
TEST(MoeRanksTest, PayloadsDiffer) {
  RanksCase c(Fp4Format::kNvfp4);
  const Rows x = c.tokens(13);
  for (const char* a2a : {"deepep", "flashinfer"}) {
    MoeChoice choice = ranks(2, a2a, 2);
    const Rows bf16_rows = run(c, choice, {x, x})[0];
    choice.deepep_payload = choice.flashinfer_payload = "nvfp4";
    const Rows nvfp4_rows = run(c, choice, {x, x})[0];
    EXPECT_NE(nvfp4_rows, bf16_rows);
    EXPECT_TRUE(within_relative_l2(nvfp4_rows, bf16_rows, 0.2));
  }
}

// Under DP attention, a2a none gathers NVFP4 rows unless disabled.
TEST(MoeRanksTest, Fp4AllGatherIsW4a4sQuantiser) {
  RanksCase c(Fp4Format::kNvfp4);
  const Rows x = c.tokens(13);
  MoeChoice choice = ranks(4, "none", 4);
  choice.runner = "flashinfer_cutlass";
  EXPECT_EQ(plan_moe(c.problem, choice)->a2a_settings().payload, Payload::kNvfp4);
  const auto gathered = run(c, choice, {x, {}, x, x});
  choice.disable_fp4_allgather = true;
  EXPECT_EQ(run(c, choice, {x, {}, x, x}), gathered);
}

}  // namespace
}  // namespace fp4moe
