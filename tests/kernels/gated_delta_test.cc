// Tests gated_delta and mul_sigmoid: ref on a case computed by hand and against the chunked form in double,
// every CPU table against ref, and bitwise invariance to cuts, batches and threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "kernels/delta_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kEps = DeltaCase::kEps;

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = cpu_tables();
  tables.push_back(&ref_dense_ops());
  return tables;
}

std::string table_name(const testing::TestParamInfo<const DenseOps*>& p) { return p.param->name; }

constexpr Dims kDims[] = {{1, 1, 1, 1},   {2, 2, 16, 16}, {1, 4, 24, 40},
                          {2, 4, 40, 24}, {1, 2, 7, 81},  {1, 1, 5, 145}};

struct DeltaResult {
  std::vector<float> out;
  Slots slots;
  bool operator==(const DeltaResult& other) const {
    return same_bits(out, other.out) && same_bits(slots.recurrent, other.slots.recurrent) &&
           same_bits(slots.conv, other.slots.conv);
  }
};

// Runs the whole case as one sequence in slot 0 of 1, in one call for each piece.
DeltaResult run_pieces(const DeltaCase& c, const DenseOps& ops, const std::vector<int64_t>& pieces,
                       DType dtype = DType::kF32) {
  ThreadPool pool(2);
  DeltaResult r{{}, c.slots(1)};
  ActBuffer out(dtype, c.tokens, c.columns());
  int64_t at = 0;
  for (int64_t n : pieces) {
    c.run(ops, {{.first_row = at, .num_rows = n, .first_position = at}}, r.slots, out, pool);
    at += n;
  }
  r.out = out.values();
  return r;
}

using Rows = std::vector<std::vector<double>>;

// The convolution, SiLU and L2 norm (if scale > 0) of `dims` channels from `first`, for every token.
Rows convolved(const DeltaCase& c, int64_t first, int dims, double scale) {
  Rows rows(static_cast<size_t>(c.tokens), std::vector<double>(static_cast<size_t>(dims)));
  for (int64_t t = 0; t < c.tokens; ++t) {
    double squares = 0;
    for (int i = 0; i < dims; ++i) {
      double sum = 0;
      for (int64_t back = 0; back < c.width && back <= t; ++back)
        sum += double{c.conv_weight[(first + i) * c.width + c.width - 1 - back]} *
               c.qkv[(t - back) * c.qkv_stride() + first + i];
      rows[t][i] = sum / (1 + std::exp(-sum));
      squares += rows[t][i] * rows[t][i];
    }
    if (scale > 0)
      for (double& x : rows[t]) x *= scale / std::sqrt(squares + 1e-6);
  }
  return rows;
}

double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// One chunk of at most 64 tokens in the chunked form: N solves (I + L) N = beta (V - exp(G) K S), with L the
// strictly lower part of beta_i (k_i . k_j) exp(G_i - G_j); then o and S follow without a recurrence.
struct Chunk {
  Rows q, k, v;
  std::vector<double> g, beta;
};
Rows run_chunk(const Chunk& c, Rows& state) {
  const size_t n = c.q.size(), dk = state.size(), dv = state[0].size();
  std::vector<double> sums(n);
  for (size_t i = 0; i < n; ++i) sums[i] = c.g[i] + (i > 0 ? sums[i - 1] : 0);
  Rows corrections(n, std::vector<double>(dv)), out = corrections;
  for (size_t i = 0; i < n; ++i)
    for (size_t x = 0; x < dv; ++x) {
      double from_state = 0, q_state = 0;
      for (size_t d = 0; d < dk; ++d)
        from_state += c.k[i][d] * state[d][x], q_state += c.q[i][d] * state[d][x];
      double right = c.beta[i] * (c.v[i][x] - std::exp(sums[i]) * from_state);
      for (size_t j = 0; j < i; ++j)
        right -= c.beta[i] * dot(c.k[i], c.k[j]) * std::exp(sums[i] - sums[j]) * corrections[j][x];
      corrections[i][x] = right;
      out[i][x] = std::exp(sums[i]) * q_state;
      for (size_t j = 0; j <= i; ++j)
        out[i][x] += dot(c.q[i], c.k[j]) * std::exp(sums[i] - sums[j]) * corrections[j][x];
    }
  for (size_t d = 0; d < dk; ++d)
    for (size_t x = 0; x < dv; ++x) {
      state[d][x] *= std::exp(sums[n - 1]);
      for (size_t j = 0; j < n; ++j)
        state[d][x] += std::exp(sums[n - 1] - sums[j]) * c.k[j][d] * corrections[j][x];
    }
  return out;
}

// Sets the head's columns of r.out, and its state in slot 0.
void run_head_in_chunks(const DeltaCase& c, int head, DeltaResult& r) {
  const auto [key_heads, value_heads, dk, dv] = c.dims;
  const int64_t key_head = head * key_heads / value_heads;
  const Rows q = convolved(c, key_head * dk, dk, 1 / std::sqrt(static_cast<double>(dk)));
  const Rows k = convolved(c, (key_heads + key_head) * dk, dk, 1);
  const Rows v = convolved(c, int64_t{2} * key_heads * dk + int64_t{head} * dv, dv, 0);
  Rows state(static_cast<size_t>(dk), std::vector<double>(static_cast<size_t>(dv)));
  for (int64_t begin = 0; begin < c.tokens; begin += 64) {
    const int64_t end = std::min<int64_t>(c.tokens, begin + 64);
    Chunk chunk{{q.begin() + begin, q.begin() + end},
                {k.begin() + begin, k.begin() + end},
                {v.begin() + begin, v.begin() + end},
                {},
                {}};
    for (int64_t t = begin; t < end; ++t) {
      const double b = c.ba[t * c.ba_stride() + head], a = c.ba[t * c.ba_stride() + value_heads + head];
      chunk.beta.push_back(1 / (1 + std::exp(-b)));
      chunk.g.push_back(c.decay[head] * std::log(1 + std::exp(a + c.dt_bias[head])));
    }
    const Rows o = run_chunk(chunk, state);
    for (int64_t t = begin; t < end; ++t)
      for (int j = 0; j < dv; ++j) {
        const double z = c.z[t * (c.columns() + 5) + head * dv + j];
        const double rms = std::sqrt(dot(o[t - begin], o[t - begin]) / dv + kEps);
        r.out[t * c.columns() + head * dv + j] =
            static_cast<float>(o[t - begin][j] / rms * c.norm_weight[j] * z / (1 + std::exp(-z)));
      }
  }
  for (int i = 0; i < dk; ++i)
    for (int j = 0; j < dv; ++j)
      r.slots.recurrent[(int64_t{head} * dk + i) * dv + j] = static_cast<float>(state[i][j]);
}

DeltaResult run_in_chunks(const DeltaCase& c) {
  DeltaResult r{std::vector<float>(static_cast<size_t>(c.tokens * c.columns())), c.slots(1)};
  for (int head = 0; head < c.dims.value_heads; ++head) run_head_in_chunks(c, head, r);
  for (int64_t ch = 0; ch < c.channels(); ++ch)
    for (int i = 0; i < c.width - 1; ++i) {
      const int64_t t = c.tokens - c.width + 1 + i;
      r.slots.conv[ch * (c.width - 1) + i] = t < 0 ? 0 : c.qkv[t * c.qkv_stride() + ch];
    }
  return r;
}

// |k| = 1 and g, beta <= 1, so the recurrence does not amplify an error: the state's relative error is that
// of one row, whose longest sum has dk terms. q . k is of the order of |q| |k| / sqrt(dk), so o, which the
// RMS norm divides by its own size, loses another factor of sqrt(dk).
void expect_close(const DeltaResult& actual, const DeltaResult& expected, const DeltaCase& c,
                  double out_eps = 0) {
  const double limit = (c.dims.dk + 40) * kF32Eps;
  EXPECT_TRUE(within_relative_l2(actual.out, expected.out, limit * std::sqrt(c.dims.dk) + out_eps));
  EXPECT_TRUE(within_relative_l2(actual.slots.recurrent, expected.slots.recurrent, limit));
  EXPECT_TRUE(same_bits(actual.slots.conv, expected.slots.conv));
}

// Calls f(case) for every length, decay and shape.
template <class F>
void for_each_case(F f) {
  for (const Dims& dims : kDims)
    for (float decay : {1.0f, 1e-7f, 100.0f})
      for (int64_t tokens : {1, 2, 3, 4, 63, 64, 65, 200}) {
        SCOPED_TRACE(testing::Message()
                     << dims.key_heads << "/" << dims.value_heads << " heads of " << dims.dk << " x "
                     << dims.dv << ", " << tokens << " tokens, decay " << decay);
        f(DeltaCase(dims, tokens, decay));
      }
  for (int width : {1, 2, 3, 8}) f(DeltaCase({1, 2, 24, 40}, 10, 1, width));
}

TEST(RefGatedDelta, ByHand) {
  // dk = dv = 1, two taps. q and k are normalised to 1; beta = sigmoid(0) and exp(g) = exp(-ln 2) are 1/2.
  // v is silu(2), then silu(1 + 2). S: v1 / 2, then S / 4 ... = v1 / 8 + v2 / 2. With eps 3 and these o,
  // out = o / sqrt(o^2 + 3) * weight 2 * silu(z).
  ThreadPool pool(1);
  const float qkv[] = {50, 50, 2, 50, 50, 1}, z[] = {1, -1}, zero[] = {0, 0};
  const float weight[] = {0, 1, 0, 1, 1, 1}, decay = -1, dt_bias = 0, norm_weight = 2;
  float state = kNaN, conv[3] = {kNaN, kNaN, kNaN}, out[2];
  const SequenceRows rows[] = {{.num_rows = 2}};
  ref_dense_ops().gated_delta({.qkv = qkv,
                               .z = z,
                               .b = zero,
                               .a = zero,
                               .qkv_stride = 3,
                               .z_stride = 1,
                               .ba_stride = 1,
                               .conv_weight = weight,
                               .decay = &decay,
                               .dt_bias = &dt_bias,
                               .norm_weight = &norm_weight,
                               .eps = 3,
                               .num_key_heads = 1,
                               .num_value_heads = 1,
                               .key_head_dim = 1,
                               .value_head_dim = 1,
                               .conv_width = 2,
                               .slots = {&state, conv, 1},
                               .sequences = rows,
                               .out = {out, DType::kF32, 2, 1}},
                              pool);
  const double v1 = 1.76159416, v2 = 2.85772238;  // silu(2), silu(3)
  const double o1 = v1 / 2, o2 = v1 / 8 + v2 / 2;
  EXPECT_NEAR(state, o2, 1e-6);
  EXPECT_NEAR(out[0], o1 / std::sqrt(o1 * o1 + 3) * 2 * 0.731058579, 1e-6);
  EXPECT_NEAR(out[1], o2 / std::sqrt(o2 * o2 + 3) * 2 * -0.268941421, 1e-6);
  EXPECT_EQ(conv[0], 50);
  EXPECT_EQ(conv[2], 1);
}

TEST(RefGatedDelta, EqualsTheChunkedForm) {
  for_each_case([](const DeltaCase& c) {
    expect_close(run_pieces(c, ref_dense_ops(), {c.tokens}), run_in_chunks(c), c);
  });
}

class GatedDelta : public testing::TestWithParam<const DenseOps*> {};

TEST_P(GatedDelta, IsWithinBudgetOfRef) {
  for_each_case([](const DeltaCase& c) {
    const DeltaResult expected = run_pieces(c, ref_dense_ops(), {c.tokens});
    expect_close(run_pieces(c, *GetParam(), {c.tokens}), expected, c);
    expect_close(run_pieces(c, *GetParam(), {c.tokens}, DType::kBF16), expected, c, kBf16Eps);
  });
  const DeltaCase large({1, 2, 128, 128}, 70);
  expect_close(run_pieces(large, *GetParam(), {70}), run_pieces(large, ref_dense_ops(), {70}), large);
}

TEST_P(GatedDelta, EveryCutKeepsTheBits) {
  for (const Dims& dims : {Dims{1, 2, 24, 40}, Dims{1, 1, 7, 81}})
    for (int64_t tokens : {2, 3, 4, 33, 65}) {
      const DeltaCase c(dims, tokens);
      const DeltaResult whole = run_pieces(c, *GetParam(), {tokens});
      for (int64_t cut = 1; cut < tokens; ++cut)
        EXPECT_TRUE(run_pieces(c, *GetParam(), {cut, tokens - cut}) == whole) << cut << " of " << tokens;
    }
}

TEST_P(GatedDelta, SmallPiecesKeepTheBits) {
  const DeltaCase c({2, 4, 40, 24}, 200);
  const DeltaResult whole = run_pieces(c, *GetParam(), {200});
  for (int64_t step : {1, 2, 3, 16, 17, 63, 64}) {
    std::vector<int64_t> pieces;
    for (int64_t at = 0; at < 200; at += step) pieces.push_back(std::min<int64_t>(step, 200 - at));
    EXPECT_TRUE(run_pieces(c, *GetParam(), pieces) == whole) << step;
  }
}

// A step of a sequence with drafts: rows `first` and after. The first `num_right` drafts have the case's
// inputs, the others those of another case.
DeltaCase step_with_drafts(const DeltaCase& c, int64_t first, int64_t num_drafts, int64_t num_right) {
  DeltaCase step(c.dims, 1 + num_drafts, 1, static_cast<int>(c.width));
  step.conv_weight = c.conv_weight, step.decay = c.decay;
  step.dt_bias = c.dt_bias, step.norm_weight = c.norm_weight;
  for (float& x : step.qkv) x = 3 - x;
  for (int64_t row = 0; row <= num_right; ++row) {
    const auto copy = [&](const std::vector<float>& from, std::vector<float>& to, int64_t stride) {
      std::copy_n(from.begin() + (first + row) * stride, stride, to.begin() + row * stride);
    };
    copy(c.qkv, step.qkv, c.qkv_stride());
    copy(c.z, step.z, c.columns() + 5);
    copy(c.ba, step.ba, c.ba_stride());
  }
  return step;
}

// Runs the whole case with drafts after a prompt, in slot 0 of 1; `num_right(step)` of them are right.
template <class NumRight>
DeltaResult run_with_drafts(const DeltaCase& c, const DenseOps& ops, int64_t prompt, int64_t num_drafts,
                            const NumRight& num_right) {
  ThreadPool pool(2);
  DeltaResult r{{}, c.slots(1, num_drafts)};
  ActBuffer out(DType::kF32, prompt, c.columns());
  if (prompt > 0) c.run(ops, {{.num_rows = prompt}}, r.slots, out, pool);
  if (prompt > 0) r.out = out.values();
  int64_t replayed = 0;
  for (int64_t at = prompt, count = 0; at < c.tokens; ++count) {
    const int64_t drafts = std::min(num_drafts, c.tokens - 1 - at),
                  right = std::min(num_right(count), drafts);
    const DeltaCase step = step_with_drafts(c, at, drafts, right);
    ActBuffer rows(DType::kF32, step.tokens, c.columns());
    step.run(ops,
             {{.num_rows = 1 + drafts,
               .first_position = at,
               .num_replayed = static_cast<int32_t>(replayed),
               .num_tentative = static_cast<int32_t>(drafts)}},
             r.slots, rows, pool);
    const std::vector<float> values = rows.values();
    r.out.insert(r.out.end(), values.begin(), values.begin() + (1 + right) * c.columns());
    at += 1 + right;
    replayed = right;
  }
  return r;
}

TEST_P(GatedDelta, DraftsKeepTheBits) {
  for (const Dims& dims : {Dims{1, 2, 24, 40}, Dims{2, 2, 7, 81}})
    for (int width : {1, 4})
      for (int64_t prompt : {0, 1, 2, 5, 17})
        for (int64_t num_drafts : {1, 2, 3, 15, kMaxReplayRows})
          for (int64_t right : {int64_t{0}, int64_t{1}, num_drafts, int64_t{-1}}) {
            const DeltaCase c(dims, prompt + 20, 1, width);
            const auto num_right = [&](int64_t step) { return right >= 0 ? right : step % (num_drafts + 1); };
            const DeltaResult whole = run_pieces(c, *GetParam(), {c.tokens});
            const DeltaResult drafted = run_with_drafts(c, *GetParam(), prompt, num_drafts, num_right);
            EXPECT_TRUE(same_bits(drafted.out, whole.out))
                << width << " taps, " << prompt << " tokens, " << right << " of " << num_drafts;
            // The last row was no draft, so that the state is complete.
            if (right == 0) {
              EXPECT_TRUE(same_bits(drafted.slots.recurrent, whole.slots.recurrent));
              EXPECT_TRUE(same_bits(drafted.slots.conv, whole.slots.conv));
            }
          }
}

TEST_P(GatedDelta, SequencesThreadsAndOtherSlotsAreIndependent) {
  const DeltaCase c({2, 4, 24, 40}, 40);
  ThreadPool one(1), five(5);
  // Sequence 4 is empty. Rows 0-9 and 17-36 start; slot 0 is used, slot 2 by no sequence with rows.
  const std::vector<SequenceRows> start = {
      {0, 10, 0, {}, {}, 3}, {17, 20, 0, {}, {}, 1}, {39, 1, 0, {}, {}, 0}};
  const std::vector<SequenceRows> next = {
      {10, 7, 10, {}, {}, 3}, {17, 0, 5, {}, {}, 2}, {37, 2, 20, {}, {}, 1}, {39, 0, 0, {}, {}, 4}};
  Slots alone = c.slots(5), batch = alone;
  ActBuffer alone_out(DType::kF32, 40, c.columns()), batch_out = alone_out;
  for (const auto& sequences : {start, next}) {
    c.run(*GetParam(), sequences, batch, batch_out, five);
    for (const SequenceRows& s : sequences) c.run(*GetParam(), {s}, alone, alone_out, one);
  }
  EXPECT_TRUE(same_bits(alone_out.values(), batch_out.values()));
  EXPECT_TRUE(same_bits(alone.recurrent, batch.recurrent));
  EXPECT_TRUE(same_bits(alone.conv, batch.conv));
  for (int64_t slot = 0; slot < 5; ++slot)
    for (int64_t i = 0; i < c.state_size(); ++i)
      ASSERT_EQ(std::isnan(batch.recurrent[slot * c.state_size() + i]), slot == 2 || slot == 4);
  c.run(*GetParam(), {}, batch, batch_out, five);
  EXPECT_TRUE(same_bits(alone.recurrent, batch.recurrent));
}

INSTANTIATE_TEST_SUITE_P(Tables, GatedDelta, testing::ValuesIn(all_tables()), table_name);

class MulSigmoid : public testing::TestWithParam<const DenseOps*> {};

TEST_P(MulSigmoid, MultipliesEachHeadByItsOwnGates) {
  for (DType dtype : {DType::kF32, DType::kBF16})
    for (int head_dim : {1, 15, 16, 17, 40, 256})
      for (int64_t tokens : {0, 1, 9}) {
        const int heads = 3;
        const int64_t gate_head = 2 * head_dim, gate_stride = heads * gate_head + 3;
        Random random(static_cast<uint64_t>(head_dim));
        const std::vector<float> gate = random.normal(tokens * gate_stride + 1, 3);
        ActBuffer x(dtype, tokens, heads * head_dim, random.normal(tokens * heads * head_dim));
        std::vector<float> expected = x.values(), budget;
        const double eps = dtype == DType::kBF16 ? kBf16Eps : kF32Eps;
        for (int64_t i = 0; i < static_cast<int64_t>(expected.size()); ++i) {
          const int64_t t = i / (heads * head_dim), h = i / head_dim % heads;
          const double z = gate[t * gate_stride + h * gate_head + i % head_dim];
          expected[i] = static_cast<float>(expected[i] / (1 + std::exp(-z)));
          // exp has a relative error of 2.5e-7; the sum and the quotient round, then the result.
          budget.push_back(static_cast<float>(std::abs(expected[i]) * (2.5e-7 + 3 * kF32Eps + 1.01 * eps)));
        }
        ThreadPool pool(2);
        GetParam()->mul_sigmoid({x.view(), gate.data(), gate_stride, gate_head, heads, head_dim}, pool);
        EXPECT_TRUE(within_budget(x.values(), expected, budget)) << tokens << " x " << head_dim;
      }
}

INSTANTIATE_TEST_SUITE_P(Tables, MulSigmoid, testing::ValuesIn(all_tables()), table_name);

}  // namespace
}  // namespace fp4moe
