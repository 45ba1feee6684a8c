// Sends rows to the ranks of their experts and results back, and compares both with loops on the host, bit
// for bit.
#include "moe/device/device_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "comm/gpu_ranks.h"
#include "formats/e4m3.h"
#include "formats/fp8.h"
#include "formats/nvfp4.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int64_t kExperts = 24, kTopk = 5;

// The form in which the experts' kernels pass results to combine().
enum class From { kRowsBf16, kRowsF32, kSums };

// How a protocol scales its NVFP4 rows. "Kept": the layer receives the rows without that scale.
enum class Nvfp4 { kOff, kPerRow, kPerRowKept, kScalar, kScalarKept };

struct Protocol {
  const char* name;
  bool slots_return, whole_experts;
  A2aResultFormat result_format;
  From from;
  A2aRowFormat row_format = A2aRowFormat::kBf16;
  Nvfp4 nvfp4 = Nvfp4::kOff;
};
constexpr auto kResultF32 = A2aResultFormat::kF32;
constexpr auto kResultBf16 = A2aResultFormat::kBf16;
constexpr auto kResultFp8 = A2aResultFormat::kFp8;
constexpr Protocol kProtocols[] = {
    {"deepep", true, true, kResultBf16, From::kRowsBf16},
    {"deepep_w4a4", true, true, kResultBf16, From::kRowsF32},
    {"flashinfer", false, true, kResultBf16, From::kRowsBf16},
    {"flashinfer_sums", false, true, kResultBf16, From::kSums},
    {"none_ep", false, true, kResultF32, From::kRowsF32},
    {"none_tp", false, false, kResultF32, From::kRowsBf16},
    {"none_tp_sums", false, false, kResultF32, From::kSums},
    {"none_slots", true, true, kResultF32, From::kRowsF32},
    {"fp8_rows", true, true, kResultBf16, From::kRowsBf16, A2aRowFormat::kFp8},
    {"fp8_results", false, true, kResultFp8, From::kRowsBf16},
    {"nvfp4_per_row", true, true, kResultBf16, From::kRowsBf16, A2aRowFormat::kNvfp4, Nvfp4::kPerRow},
    {"nvfp4_per_row_kept", false, true, kResultFp8, From::kSums, A2aRowFormat::kNvfp4, Nvfp4::kPerRowKept},
    {"nvfp4_scalar", false, true, kResultBf16, From::kRowsF32, A2aRowFormat::kNvfp4, Nvfp4::kScalar},
    {"nvfp4_scalar_kept", false, false, kResultF32, From::kRowsF32, A2aRowFormat::kNvfp4, Nvfp4::kScalarKept},
};
constexpr float kEncodeScale = 300.5f;

// A row as it arrives, computed with the functions of formats/: bf16 values, and the scale by which the layer
// multiplies them.
struct ArrivedRow {
  std::vector<bf16> x;
  float scale = 1;
};
ArrivedRow arrived(const Protocol& protocol, const bf16* x, int64_t cols) {
  const auto n = static_cast<size_t>(cols);
  ArrivedRow row{std::vector<bf16>(x, x + cols)};
  if (protocol.row_format == A2aRowFormat::kFp8) {
    std::vector<uint8_t> codes(n);
    std::vector<float> scales(static_cast<size_t>(fp8_num_groups(cols)));
    fp8_quantize_row(x, cols, codes.data(), scales.data());
    for (size_t i = 0; i < n; ++i)
      row.x[i] = float_to_bf16(e4m3_decode(codes[i]) * scales[i / static_cast<size_t>(kFp8Group)]);
  } else if (protocol.row_format == A2aRowFormat::kNvfp4) {
    const bool per_row = protocol.nvfp4 == Nvfp4::kPerRow || protocol.nvfp4 == Nvfp4::kPerRowKept;
    const bool kept = protocol.nvfp4 == Nvfp4::kPerRowKept || protocol.nvfp4 == Nvfp4::kScalarKept;
    std::vector<uint8_t> codes(n / 2), scales(n / kNvfp4Block);
    DecodeScale scale = to_decode(EncodeScale{kEncodeScale});
    if (per_row)
      scale = nvfp4_quantize_row_per_token(x, cols, codes.data(), scales.data());
    else
      nvfp4_quantize_row(x, cols, EncodeScale{kEncodeScale}, codes.data(), scales.data());
    std::vector<float> values(n);
    nvfp4_dequantize_row(codes.data(), scales.data(), cols, kept ? DecodeScale{1} : scale, values.data());
    row.x = to_bf16(values);
    row.scale = scale.value;
  }
  return row;
}

// One rank's tokens, its expected output, and their buffers on the GPU.
struct RankTokens {
  int64_t num_own = 0, num_filled = 0;
  std::vector<bf16> x;
  std::vector<int32_t> ids;
  std::vector<float> weights, before, expected;
  Buffer on_gpu_x, on_gpu_ids, on_gpu_weights, on_gpu_filled, out;
};

class DeviceExchanges : public testing::TestWithParam<std::tuple<int, Protocol, bool>> {
 protected:
  int num_ranks() const { return std::get<0>(GetParam()); }
  const Protocol& protocol() const { return std::get<1>(GetParam()); }
  bool is_staged() const { return std::get<2>(GetParam()); }  // the ranks do not share memory

  void make(int64_t hidden, int64_t max_tokens) {
    const A2aShape shape{.hidden_size = hidden,
                         .top_k = kTopk,
                         .num_experts = kExperts,
                         .experts_per_rank = protocol().whole_experts ? kExperts / num_ranks() : 0,
                         .row_format = protocol().row_format,
                         .result_format = protocol().result_format,
                         .slots_return = protocol().slots_return,
                         .is_staged = is_staged()};
    size_ = {shape, max_tokens, a2a_area(shape, num_ranks(), max_tokens)};
    group_.emplace(num_ranks(), DeviceRegion{.offset = is_staged() ? 0 : 256,
                                             .exchange_bytes = size_.area.num_bytes,
                                             .is_staged = is_staged()});
    exchanges_.clear();
    for (const auto& rank : group_->ranks) exchanges_.emplace_back(size_, *rank->group);
    scratch_.clear();
    nvfp4_scales_.clear();
    const int64_t bytes = num_ranks() * max_tokens * (hidden * 2 + 4) + 512;
    group_->for_each([&](int, DeviceCommunicator&) {
      nvfp4_scales_.push_back(on_device(std::vector<float>{kEncodeScale}));
      scratch_.push_back(Arena::make(bytes, device_memory()).value());
    });
  }

  // Draws tokens for all ranks: different numbers per rank (one rank is idle), some ids that are not experts,
  // and padding.
  void draw_tokens(int64_t most) {
    tokens_.clear();
    for (int r = 0; r < num_ranks(); ++r) {
      RankTokens& t = tokens_.emplace_back();
      t.num_own = r == 1   ? 0
                  : r == 0 ? most
                           : static_cast<int64_t>(random_() % static_cast<uint64_t>(most + 1));
      t.num_filled = r == 0 ? most - most / 4 : t.num_own;
      for (int64_t i = 0; i < t.num_own * kTopk; ++i) {
        const auto id = static_cast<int32_t>(random_() % (kExperts + 4)) - 2;  // no expert: -2, -1, E, E + 1
        const auto token = t.ids.end() - i % kTopk;
        t.ids.push_back(std::find(token, t.ids.end(), id) == t.ids.end() ? id : -1);
        t.weights.push_back(static_cast<float>(random_() % 1000) / 1000);
      }
      t.x = to_bf16(random_floats(t.num_own * size_.shape.hidden_size, random_()));
      add_special_rows(t);
      t.before = random_floats(t.num_own * size_.shape.hidden_size, random_());
      t.expected = t.before;
    }
    group_->for_each([&](int r, DeviceCommunicator&) {
      RankTokens& t = tokens_[static_cast<size_t>(r)];
      const auto some = [](auto values) {  // device buffers are not empty
        values.resize(std::max<size_t>(values.size(), 1));
        return values;
      };
      t.on_gpu_x = on_device(some(t.x));
      t.on_gpu_ids = on_device(some(t.ids));
      t.on_gpu_weights = on_device(some(t.weights));
      t.on_gpu_filled = on_device(std::vector<int32_t>{static_cast<int32_t>(t.num_filled)});
      t.out = on_device(some(t.before));
    });
  }

  // Adds rows with zeros, NaN, infinity and a block of zeros, whose results the formats define.
  void add_special_rows(RankTokens& t) const {
    if (t.num_own < 4 || protocol().row_format == A2aRowFormat::kBf16) return;
    const auto row = [&](int64_t i) { return t.x.begin() + i * size_.shape.hidden_size; };
    std::fill(row(0), row(1), float_to_bf16(0.0f));
    *row(1) = float_to_bf16(std::numeric_limits<float>::quiet_NaN());
    *(row(2) + 5) = float_to_bf16(-std::numeric_limits<float>::infinity());
    std::fill(row(3), row(3) + 16, float_to_bf16(-0.0f));
  }

  void run(int64_t most) {
    const int64_t rounds = (most + size_.max_tokens - 1) / size_.max_tokens;
    for (int64_t round = 0; round < rounds; ++round) {
      std::vector<A2aRound> sent;
      batches_.clear();
      group_->for_each([&](int r, DeviceCommunicator&) {
        const DeviceExchange& exchange = exchanges_[static_cast<size_t>(r)];
        EXPECT_EQ(exchange.num_rounds(inputs(r, most)), rounds);
        sent.push_back(exchange.round_of(inputs(r, most), round));
        exchange.send(sent.back(), inputs(r, most));
        Arena& arena = scratch_[static_cast<size_t>(r)];
        arena.reset();
        const bool kept = protocol().nvfp4 == Nvfp4::kPerRowKept || protocol().nvfp4 == Nvfp4::kScalarKept;
        batches_.push_back(exchange.wait(sent.back(), kept, arena));
      });
      group_->expect_ok();
      check_lanes(sent, round);
      std::vector<std::vector<float>> results;
      std::vector<Buffer> alive;
      std::vector<A2aResults> drawn;
      group_->for_each([&](int r, DeviceCommunicator&) {
        drawn.push_back(draw_results(r, sent[static_cast<size_t>(r)], alive));
      });
      group_->for_each([&](int r, DeviceCommunicator&) {
        const auto at = static_cast<size_t>(r);
        exchanges_[at].combine(sent[at], drawn[at], tokens_[at].out.as<float>());
      });
      group_->expect_ok();
      for (int r = 0; r < num_ranks(); ++r) add_expected(r, round);
    }
    for (int r = 0; r < num_ranks(); ++r) {
      const RankTokens& t = tokens_[static_cast<size_t>(r)];
      if (t.num_own == 0) continue;
      EXPECT_TRUE(same_bits(from_device<float>(t.out), t.expected)) << protocol().name << ", rank " << r;
    }
  }

 private:
  ExchangeTokens inputs(int rank, int64_t most) {
    RankTokens& t = tokens_[static_cast<size_t>(rank)];
    return {.layer = 3,
            .num_lane_tokens = most,
            .num_own = t.num_own,
            .num_filled = t.on_gpu_filled.as<int32_t>(),
            .x = t.on_gpu_x.as<bf16>(),
            .ids = t.on_gpu_ids.as<int32_t>(),
            .weights = t.on_gpu_weights.as<float>(),
            .nvfp4_scale = protocol().nvfp4 == Nvfp4::kScalar || protocol().nvfp4 == Nvfp4::kScalarKept
                               ? nvfp4_scales_[static_cast<size_t>(rank)].as<float>()
                               : nullptr};
  }
  // Returns the id of a token's slot; -1 if the token is padding or the id is not an expert.
  int32_t id_of(int rank, int64_t token, int64_t k) const {
    const RankTokens& t = tokens_[static_cast<size_t>(rank)];
    if (token >= std::min(t.num_own, t.num_filled)) return -1;
    const int32_t id = t.ids[static_cast<size_t>(token * kTopk + k)];
    return id >= 0 && id < kExperts ? id : -1;
  }
  bool is_local(int32_t id, int rank) const {
    if (id < 0) return false;
    return !protocol().whole_experts || id / size_.shape.experts_per_rank == rank;
  }
  bool goes_to(int source, int64_t token, int rank) const {
    for (int64_t k = 0; k < kTopk; ++k)
      if (is_local(id_of(source, token, k), rank)) return true;
    return false;
  }

  void check_lanes(const std::vector<A2aRound>& sent, int64_t round) {
    const int64_t h = size_.shape.hidden_size;
    group_->for_each([&](int r, DeviceCommunicator&) {
      const A2aRound& a = sent[static_cast<size_t>(r)];
      const LaneBatch& batch = batches_[static_cast<size_t>(r)];
      ASSERT_EQ(batch.x.rows, num_ranks() * a.num_tokens);
      std::vector<bf16> x(static_cast<size_t>(batch.x.rows * h));
      std::vector<int32_t> ids(static_cast<size_t>(batch.x.rows * kTopk));
      std::vector<float> scales(static_cast<size_t>(batch.x.rows));
      EXPECT_EQ(batch.x_row_scales != nullptr, protocol().nvfp4 == Nvfp4::kPerRowKept);
      if (batch.x_row_scales != nullptr) {
        ASSERT_TRUE(device_memory().download(scales.data(), batch.x_row_scales, std::ssize(scales) * 4).ok());
      }
      ASSERT_TRUE(device_memory().download(x.data(), batch.x.data, std::ssize(x) * 2).ok());
      ASSERT_TRUE(device_memory().download(ids.data(), batch.ids, std::ssize(ids) * 4).ok());
      for (int64_t lane = 0; lane < batch.x.rows; ++lane) {
        const int source = static_cast<int>(lane / a.num_tokens);
        const int64_t token = round * size_.max_tokens + lane % a.num_tokens;
        for (int64_t k = 0; k < kTopk; ++k)
          ASSERT_EQ(ids[static_cast<size_t>(lane * kTopk + k)], id_of(source, token, k)) << lane;
        if (!goes_to(source, token, r)) continue;
        const ArrivedRow row =
            arrived(protocol(), tokens_[static_cast<size_t>(source)].x.data() + token * h, h);
        for (int64_t c = 0; c < h; ++c)
          ASSERT_TRUE(same_value(x[static_cast<size_t>(lane * h + c)], row.x[static_cast<size_t>(c)]))
              << "rank " << r << ", lane " << lane << ", column " << c;
        if (batch.x_row_scales != nullptr) {
          ASSERT_EQ(scales[static_cast<size_t>(lane)], row.scale) << "rank " << r << ", lane " << lane;
        }
      }
    });
  }

  // Draws results for a rank's lanes and keeps them for add_expected().
  A2aResults draw_results(int rank, const A2aRound& a, std::vector<Buffer>& alive) {
    const int64_t h = size_.shape.hidden_size, lanes = num_ranks() * a.num_tokens;
    std::vector<int32_t> ids(static_cast<size_t>(lanes * kTopk));
    EXPECT_TRUE(device_memory()
                    .download(ids.data(), batches_[static_cast<size_t>(rank)].ids, std::ssize(ids) * 4)
                    .ok());
    Results& results = results_[rank];
    results = {.num_tokens = a.num_tokens};
    if (protocol().from == From::kSums) {
      results.y = random_floats(lanes * h, random_());
      alive.push_back(on_device(results.y));
      return {.sums = alive.back().as<float>()};
    }
    int32_t rows = 0;
    for (const int32_t id : ids) results.row_of_slot.push_back(is_local(id, rank) ? rows++ : -1);
    std::vector<int32_t> order;  // any permutation of the rows is valid
    for (int32_t i = 0; i < rows; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), random_);
    for (int32_t& row : results.row_of_slot) row = row < 0 ? -1 : order[static_cast<size_t>(row)];
    results.y = random_floats(std::max(rows, 1) * h, random_());
    alive.push_back(on_device(results.row_of_slot));
    const int32_t* const row_of_slot = alive.back().as<int32_t>();
    if (protocol().from == From::kRowsF32) {
      alive.push_back(on_device(results.y));
      return {.y = alive.back().as<float>(), .row_of_slot = row_of_slot};
    }
    const std::vector<bf16> rounded = to_bf16(results.y);
    results.y = bf16_to_floats(rounded);
    alive.push_back(on_device(rounded));
    return {.y_bf16 = alive.back().as<bf16>(), .row_of_slot = row_of_slot};
  }

  // Adds the results that return for the round's tokens to `expected`.
  void add_expected(int rank, int64_t round) {
    RankTokens& t = tokens_[static_cast<size_t>(rank)];
    const int64_t first = round * size_.max_tokens, h = size_.shape.hidden_size;
    for (int64_t token = first; token < std::min(first + size_.max_tokens, t.num_own); ++token)
      for (int64_t c = 0; c < h; ++c) {
        if (token >= t.num_filled) continue;
        t.expected[static_cast<size_t>(token * h + c)] += protocol().slots_return
                                                              ? sum_of_slots(rank, token, token - first, c)
                                                              : sum_of_ranks(rank, token, token - first, c);
      }
  }
  float weight_of(int rank, int64_t token, int64_t k) const {
    return tokens_[static_cast<size_t>(rank)].weights[static_cast<size_t>(token * kTopk + k)];
  }
  float sum_of_slots(int rank, int64_t token, int64_t at, int64_t column) const {
    float sum = 0;
    for (int64_t k = 0; k < kTopk; ++k)
      for (int r = 0; r < num_ranks(); ++r)
        if (is_local(id_of(rank, token, k), r))
          sum = std::fma(weight_of(rank, token, k), rounded(results_.at(r).slot(rank, at, k, column, h())),
                         sum);
    return sum;
  }
  float sum_of_ranks(int rank, int64_t token, int64_t at, int64_t column) const {
    float sum = 0;
    for (int r = 0; r < num_ranks(); ++r) {
      if (!goes_to(rank, token, r)) continue;
      const Results& from = results_.at(r);
      float part = 0;
      if (protocol().from == From::kSums) {
        part = from.y[static_cast<size_t>((rank * from.num_tokens + at) * h() + column)];
      } else {
        for (int64_t k = 0; k < kTopk; ++k)
          if (is_local(id_of(rank, token, k), r))
            part = std::fma(weight_of(rank, token, k), from.slot(rank, at, k, column, h()), part);
      }
      sum += rounded(part);
    }
    return sum;
  }
  // Compares the bits, but ignores the sign and payload of a NaN.
  static bool same_value(bf16 a, bf16 b) {
    const float x = bf16_to_float(a), y = bf16_to_float(b);
    return std::isnan(x) ? std::isnan(y) : std::memcmp(&a, &b, sizeof a) == 0;
  }
  float rounded(float v) const {
    switch (protocol().result_format) {
      case A2aResultFormat::kF32:
        return v;
      case A2aResultFormat::kBf16:
        return bf16_to_float(float_to_bf16(v));
      case A2aResultFormat::kFp8:
        return e4m3_decode(e4m3_encode(v));
    }
    return v;
  }
  int64_t h() const { return size_.shape.hidden_size; }

  struct Results {
    int64_t num_tokens = 0;
    std::vector<float> y;  // rows, or sums by lane
    std::vector<int32_t> row_of_slot;
    float slot(int source, int64_t token, int64_t k, int64_t column, int64_t hidden) const {
      const int64_t lane = source * num_tokens + token;
      const int64_t row = row_of_slot[static_cast<size_t>(lane * kTopk + k)];
      return y[static_cast<size_t>(row * hidden + column)];
    }
  };
  std::map<int, Results> results_;

 protected:
  DeviceExchangeSize size_;
  std::optional<TestGroup> group_;
  std::vector<DeviceExchange> exchanges_;
  std::vector<RankTokens> tokens_;
  std::vector<Arena> scratch_;        // per rank
  std::vector<LaneBatch> batches_;    // of the current round, per rank
  std::vector<Buffer> nvfp4_scales_;  // by rank
  std::mt19937_64 random_{7};
};

TEST_P(DeviceExchanges, EveryRowAndResultArrives) {
  for (const auto& [hidden, max_tokens, most] :
       {std::tuple{64, 7, 20}, std::tuple{2880, 16, 16}, std::tuple{8, 300, 290}, std::tuple{7168, 4, 1},
        std::tuple{208, 33, 33}}) {
    if (protocol().row_format == A2aRowFormat::kNvfp4 && hidden % kNvfp4Block != 0) continue;
    make(hidden, max_tokens);
    for (int repeat = 0; repeat < 3; ++repeat) {  // reuses the memory of earlier rounds
      draw_tokens(most);
      run(most);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceExchanges,
                         testing::Combine(testing::Values(1, 2, 3, 4, 8), testing::ValuesIn(kProtocols),
                                          testing::Bool()),
                         [](const auto& p) {
                           return std::string(std::get<1>(p.param).name) + "_" +
                                  std::to_string(std::get<0>(p.param)) +
                                  (std::get<2>(p.param) ? "_staged" : "");
                         });

}  // namespace
}  // namespace fp4moe
