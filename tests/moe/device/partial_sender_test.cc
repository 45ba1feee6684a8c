// Kernels that send their partial sums to the other ranks (kernels/cuda/comm/partial_sender.cuh), and the
// sums that add them: the bits of a loop on the host over the partials, which the kernels also store.
#include <cstdlib>

// Before gpu_ranks.h, whose number of ranks would leave each too few CTAs for few_tokens.
static const bool two_ranks_share_a_gpu = setenv("FP4MOE_RANKS_PER_GPU", "2", 0) == 0;

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/gpu_ranks.h"
#include "device/device.h"
#include "kernels/ops.h"
#include "moe/device/device_expert_runner.h"
#include "moe/layer_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kMostTokens = 64;

// Ranks whose kernels send partials [T, columns].
class Senders {
 public:
  Senders(int num_ranks, int64_t columns)
      : group(num_ranks, {0, kMostTokens * columns * 4, 128}),
        columns_(columns),
        before_(random_floats(kMostTokens * columns, 3)) {
    group.for_each([&](int, DeviceCommunicator&) {
      partial_.push_back(on_device(before_));
      out_.push_back(on_device(before_));
      between_.push_back(on_device(before_));
      norm_weight_.push_back(on_device(random_floats(columns, 5)));
      normed_.push_back(on_device(std::vector<bf16>(before_.size())));
    });
  }

  // produce(rank, partial, send) enqueues the kernel. sends: whether it is one that sends. Some of the sums
  // run a norm, and some follow a sum that sends its partials itself.
  template <class Produce>
  void expect_sum(int64_t tokens, bool sends, const Produce& produce) {
    const int64_t n = tokens * columns_;
    const int number = num_sums_++;
    // Before a rank waits for another: an upload can wait for the GPU.
    group.for_each([&](int r, DeviceCommunicator&) {
      const Buffer& out = out_[static_cast<size_t>(r)];
      EXPECT_TRUE(device_memory().upload(out.data(), before_.data(), out.num_bytes()).ok());
    });
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto i = static_cast<size_t>(r);
      float *const partial = partial_[i].as<float>(), *const out = out_[i].as<float>();
      if (number % 3 == 2) rank.add_all_reduced({"between", 0}, partial, between_[i].as<float>(), columns_);
      std::optional<PartialsToSend> send = rank.partials_to_send(n);
      ASSERT_TRUE(send.has_value());
      produce(r, partial, &*send);
      EXPECT_EQ(send->are_sent, sends) << tokens << " tokens";
      if (number % 2 == 0) return rank.add_all_reduced({"sum", 1}, partial, out, n, send->are_sent);
      const RmsNormArgs norm{.x = out,
                             .weight = norm_weight_[i].as<float>(),
                             .eps = 1e-5f,
                             .out_act = {normed_[i].data(), DType::kBF16, tokens, columns_}};
      rank.add_all_reduced_norm({"normed", 1}, {partial, send->are_sent}, out, norm);
    });
    group.expect_ok();
    std::vector<float> sums(static_cast<size_t>(n), 0), expected(before_.begin(), before_.begin() + n);
    group.for_each([&](int r, DeviceCommunicator&) {
      const std::vector<float> partial = from_device<float>(partial_[static_cast<size_t>(r)]);
      EXPECT_FALSE(same_bits({partial.begin(), partial.begin() + n}, expected)) << "nothing was computed";
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += partial[i];
    });
    for (size_t i = 0; i < sums.size(); ++i) expected[i] += sums[i];
    group.for_each([&](int r, DeviceCommunicator&) {
      std::vector<float> out = from_device<float>(out_[static_cast<size_t>(r)]);
      out.resize(sums.size());
      EXPECT_TRUE(same_bits(out, expected)) << tokens << " tokens, sum " << number << ", rank " << r;
    });
  }

  TestGroup group;

 private:
  const int64_t columns_;
  const std::vector<float> before_;
  std::vector<Buffer> partial_, out_, between_, norm_weight_, normed_;
  int num_sums_ = 0;
};

bool has_gpus_for(int num_ranks) { return num_ranks <= ranks_per_gpu() * (gpus_of(num_ranks).back() + 1); }

class PartialSenders : public testing::TestWithParam<int> {
  void SetUp() override {
    if (!has_gpus_for(GetParam())) GTEST_SKIP() << GetParam() << " ranks";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, PartialSenders, testing::Values(1, 2, 4));

TEST_P(PartialSenders, LinearLayersOfFewTokens) {
  constexpr int64_t kColumns = 2880, kInner = 96;
  Senders senders(GetParam(), kColumns);
  ThreadPool pool(1);
  std::vector<Buffer> x, weight;
  senders.group.for_each([&](int r, DeviceCommunicator&) {
    x.push_back(on_device(to_bf16(random_floats(kMostTokens * kInner, 21 + static_cast<uint64_t>(r)))));
    weight.push_back(on_device(to_bf16(random_floats(kColumns * kInner, 31 + static_cast<uint64_t>(r)))));
  });
  for (const int64_t tokens : {1, 3, 4, 5, 8, 16, 24, 1, 2})
    senders.expect_sum(tokens, tokens <= 16, [&](int r, float* partial, PartialsToSend* send) {
      const auto i = static_cast<size_t>(r);
      cuda_dense_ops()->linear({.x = {x[i].data(), DType::kBF16, tokens, kInner},
                                .weight = weight[i].data(),
                                .out = partial,
                                .n = kColumns,
                                .send = send},
                               pool);
    });
}

// Only sums of f32 partials in one exchange can be sent by the kernel before.
TEST_P(PartialSenders, SendNothingThatTheSumSendsDifferently) {
  TestGroup group(GetParam(), {0, 48 << 10, 128});
  group.for_each([](int, DeviceCommunicator& rank) {
    EXPECT_TRUE(rank.partials_to_send(12 << 10).has_value());
    EXPECT_FALSE(rank.partials_to_send((12 << 10) + 4).has_value());
    rank.send_bf16_partials();
    EXPECT_FALSE(rank.partials_to_send(2880).has_value());
  });
}

class ExpertSenders : public testing::TestWithParam<std::tuple<int, Fp4Format, const char*>> {};

TEST_P(ExpertSenders, FewTokens) {
  if (resolve_device("cuda", 0)->compute_capability != 90) GTEST_SKIP() << "few_tokens needs Hopper";
  const auto [num_ranks, format, scheme] = GetParam();
  if (!has_gpus_for(num_ranks)) GTEST_SKIP() << num_ranks << " ranks";
  constexpr LayerSize kSize{512, 192, 12, 3};
  Senders senders(num_ranks, kSize.hidden);
  ExpertsCase experts(kSize, format, ActivationKind::kSwigluOai);
  MoeProblem problem = experts.problem;
  problem.device = DeviceKind::kCuda;
  problem.compute_capability = 90;
  const MoePlan plan = plan_moe(problem, {.fp4_compute = scheme}).value();
  ThreadPool pool(2);
  std::vector<DeviceExpertRunner> runners;
  std::vector<Arena> scratch;
  std::vector<Buffer> x, ids, weights;
  senders.group.for_each([&](int, DeviceCommunicator&) {
    DeviceExperts tiles = DeviceExperts::make(plan.problem(), plan.numerics(), experts.weights, pool).value();
    runners.push_back(DeviceExpertRunner::make(plan.device_ops(), std::move(tiles)).value());
    scratch.push_back(
        Arena::make(runners.back().scratch_bytes(kMostTokens, kSize.top_k), device_memory()).value());
    std::vector<int32_t> chosen;
    for (int64_t i = 0; i < kMostTokens * kSize.top_k; ++i)
      chosen.push_back(static_cast<int32_t>(experts.random.integer(-1, kSize.num_experts)));
    ids.push_back(on_device(chosen));
    x.push_back(on_device(to_bf16(experts.random.normal(kMostTokens * kSize.hidden))));
    weights.push_back(on_device(experts.random.normal(kMostTokens * kSize.top_k)));
  });
  for (const int64_t tokens : {1, 2, 8, 64, 3, 1})
    senders.expect_sum(tokens, tokens <= 8, [&](int r, float* partial, PartialsToSend* send) {
      const auto i = static_cast<size_t>(r);
      const DeviceSlots slots{.ids = ids[i].as<int32_t>(),
                              .num_tokens = tokens,
                              .topk = kSize.top_k,
                              .num_routed_experts = kSize.num_experts,
                              .send = send};
      runners[i].run_device_experts({x[i].data(), DType::kBF16, tokens, kSize.hidden}, slots,
                                    weights[i].as<float>(), partial, /*accumulate=*/false, scratch[i]);
    });
}

INSTANTIATE_TEST_SUITE_P(Experts, ExpertSenders,
                         testing::Combine(testing::Values(1, 2, 4),
                                          testing::Values(Fp4Format::kMxfp4, Fp4Format::kNvfp4),
                                          testing::Values("w4a16", "w4a8")),
                         [](const auto& p) {
                           return std::to_string(std::get<0>(p.param)) + "_" +
                                  std::string(fp4_format_name(std::get<1>(p.param))) + "_" +
                                  std::get<2>(p.param);
                         });

}  // namespace
}  // namespace fp4moe
