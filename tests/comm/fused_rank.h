// The layers around a fused sum on one rank, for tests: what computes a part of the sum, and the norm with a
// linear layer or a router after it. They run fused, or one after another with an all-reduce between them.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/gpu_ranks.h"
#include "formats/bf16.h"
#include "kernels/device_moe.h"
#include "kernels/device_router.h"
#include "kernels/ops.h"
#include "support/compare.h"

namespace fp4moe {

enum class Next { kLinear, kRouter };

struct FusedShape {
  int64_t tokens = 1, hidden = 2880;
  bool fp8 = false;  // the linear layers' weights
  int64_t outputs = 48, experts = 8;
};

inline std::vector<bf16> random_bf16(int64_t n, uint64_t seed, float scale) {
  std::vector<bf16> values;
  for (const float v : random_floats(n, seed)) values.push_back(float_to_bf16(v * scale));
  return values;
}

// A weight [N, K] of a linear layer, with one scale per row if it is FP8.
class FusedWeight {
 public:
  FusedWeight(int64_t n, int64_t k, bool fp8, uint64_t seed) : n_(n), k_(k), fp8_(fp8) {
    if (!fp8) {
      values_ = on_device(random_bf16(n * k, seed, 0.05f));
      return;
    }
    std::mt19937_64 random(seed);
    std::vector<uint8_t> codes(static_cast<size_t>(n * k));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random() & 0xbf);  // of magnitudes below 2
    values_ = on_device(codes);
    std::vector<float> scales = random_floats(n, seed + 1);
    for (float& scale : scales) scale = 0.01f + 0.01f * scale * scale;
    scales_ = on_device(scales);
  }
  LinearArgs args(const ActRows& x, float* out) const {
    LinearArgs args{.x = x, .out = out, .n = n_};
    if (!fp8_) {
      args.weight = values_.data();
      return args;
    }
    args.format = LinearFormat::kFp8;
    args.fp8.codes = values_.data();
    args.fp8.scales = scales_.as<float>();
    args.fp8.row_block = 1;
    args.fp8.col_block = k_;
    return args;
  }

 private:
  int64_t n_, k_;
  bool fp8_;
  Buffer values_, scales_;
};

// Everything is allocated when it is made: an allocation can wait for the GPU.
class FusedRank {
 public:
  // Computes this rank's part of the sum [T, H]: sends it, or writes it to `partial`.
  using Producer = std::function<void(const SumsToSend* send, float* partial)>;

  FusedRank(const FusedShape& shape, Producer producer)
      : s_(shape),
        producer_(std::move(producer)),
        next_(shape.outputs, shape.hidden, shape.fp8, 31),
        norm_weight_(on_device(random_floats(shape.hidden, 32))),
        gate_(on_device(random_bf16(shape.experts * shape.hidden, 33, 0.05f))),
        words_(on_device(std::vector<RouterWord>(static_cast<size_t>(kRouterFewTokens * shape.experts)))),
        partial_(floats(shape.hidden)) {
    for (Buffer& residual : residual_) residual = on_device(random_floats(shape.tokens * shape.hidden, 34));
    for (Outputs& o : outputs_) {
      const int64_t cols[] = {shape.outputs, shape.hidden, shape.hidden, shape.experts, kTopk, kTopk};
      for (size_t i = 0; i < o.size(); ++i) o[i] = floats(cols[i]);
    }
  }

  void run_fused(const DeviceCommunicator& group, const CommOp& op, Next next) {
    const SumsToSend send = group.sums_to_send();
    producer_(&send, nullptr);
    const SumsToTake take = group.sums_to_take(send, op, residual_[1 - current_].as<float>());
    consume(next, residual_[current_], &take, outputs_[0]);
    current_ = 1 - current_;
  }
  void run_separate(const DeviceCommunicator& group, const CommOp& op, Next next) {
    producer_(nullptr, partial_.as<float>());
    group.add_all_reduced(op, partial_.as<float>(), residual_[2].as<float>(), s_.tokens * s_.hidden);
    consume(next, residual_[2], nullptr, outputs_[1]);
  }
  // Compares the residuals and the last outputs of both ways.
  void expect_same_bits(const std::string& what) const {
    EXPECT_TRUE(same_bits(from_device<float>(residual_[current_]), from_device<float>(residual_[2]))) << what;
    const auto words = [](const Outputs& o) {
      std::vector<uint32_t> all;
      for (const Buffer& buffer : o) {
        const std::vector<uint32_t> part = from_device<uint32_t>(buffer);
        all.insert(all.end(), part.begin(), part.end());
      }
      return all;
    };
    EXPECT_EQ(words(outputs_[0]), words(outputs_[1])) << what;
  }
  std::vector<float> residual() const { return from_device<float>(residual_[current_]); }

 private:
  static constexpr int64_t kTopk = 2;
  // Linear output, normed rows as bf16 and f32, logits, ids, weights.
  using Outputs = std::array<Buffer, 6>;

  Buffer floats(int64_t cols) const {
    return on_device(std::vector<float>(static_cast<size_t>(s_.tokens * cols), 9));
  }
  void consume(Next next, const Buffer& residual, const SumsToTake* take, const Outputs& o) {
    RmsNormArgs norm{.x = residual.as<float>(),
                     .weight = norm_weight_.as<float>(),
                     .eps = 1e-5f,
                     .out_act = {o[1].data(), DType::kBF16, s_.tokens, s_.hidden},
                     .take = take};
    if (next == Next::kLinear) {
      const NormLinearArgs args{norm, next_.args(norm.out_act, o[0].as<float>())};
      EXPECT_TRUE(cuda_dense_ops()->takes_sums(args));
      return cuda_dense_ops()->norm_linear(args, pool_);
    }
    norm.out_f32 = o[2].as<float>();
    const DeviceRouterArgs args{.x = norm.out_f32,
                                .weight = gate_.as<bf16>(),
                                .num_tokens = s_.tokens,
                                .hidden_size = s_.hidden,
                                .rule = {.num_experts = s_.experts, .top_k = kTopk},
                                .logits = o[3].as<float>(),
                                .ids = o[4].as<int32_t>(),
                                .weights = o[5].as<float>(),
                                .norm = &norm,
                                .words = words_.as<RouterWord>()};
    EXPECT_TRUE(sm90_moe_ops()->route_fuses_norm(args));
    sm90_moe_ops()->route(args);
  }

  const FusedShape s_;
  const Producer producer_;
  ThreadPool pool_{1};
  const FusedWeight next_;
  const Buffer norm_weight_, gate_, words_, partial_;
  Buffer residual_[3];  // fused: the current one and the spare one; the other way
  size_t current_ = 0;
  Outputs outputs_[2];  // fused; the other way
};

// A linear layer [T, K] -> [T, H] whose weight, x and bias differ between ranks.
inline FusedRank::Producer linear_producer(const FusedShape& s, int rank) {
  constexpr int64_t kCols = 64;
  struct Layer {
    FusedWeight weight;
    Buffer x, bias;
    ThreadPool pool{1};
  };
  const auto seed = static_cast<uint64_t>(100 * rank + 7);
  const auto layer = std::shared_ptr<Layer>(new Layer{FusedWeight(s.hidden, kCols, s.fp8, seed),
                                                      on_device(random_bf16(s.tokens * kCols, seed + 3, 1)),
                                                      on_device(random_floats(s.hidden, seed + 4))});
  return [layer, s, rank](const SumsToSend* send, float* partial) {
    LinearArgs args = layer->weight.args({layer->x.data(), DType::kBF16, s.tokens, kCols}, partial);
    if (rank == 0) args.bias = layer->bias.as<float>();
    args.send = send;
    EXPECT_TRUE(cuda_dense_ops()->sends_sums(args));
    cuda_dense_ops()->linear(args, layer->pool);
  };
}

// One FusedRank for each rank of a group.
using FusedRanks = std::vector<std::unique_ptr<FusedRank>>;
template <class MakeProducer>
FusedRanks fused_ranks(TestGroup& group, const FusedShape& shape, const MakeProducer& make_producer) {
  FusedRanks ranks;
  group.for_each([&](int r, DeviceCommunicator&) {
    ranks.push_back(std::make_unique<FusedRank>(shape, make_producer(shape, r)));
  });
  group.synchronize();
  return ranks;
}

// Enqueues the sum on all ranks but `missing`, fused or not.
inline void enqueue(TestGroup& group, const FusedRanks& ranks, Next next, bool fused, int missing = -1) {
  group.for_each([&](int r, DeviceCommunicator& communicator) {
    if (r == missing) return;
    FusedRank& rank = *ranks[static_cast<size_t>(r)];
    if (fused)
      rank.run_fused(communicator, {"attention_out", 3}, next);
    else
      rank.run_separate(communicator, {"separate", 4}, next);
  });
}

inline DeviceRegion fused_region(int64_t hidden) {
  return {.word_bytes = 256 << 10, .gather_bytes = 64 << 10, .sent_bytes = kMaxSentRows * hidden * 4};
}

}  // namespace fp4moe
