#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "formats/nearest_value.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Heads {
  int num_heads, num_kv_heads, k_dim, v_dim;
};

// Complete sequences with their queries, keys and values; run_batch() runs any parts of them.
struct AttentionCase {
  Heads heads;
  DType dtype;                   // of the pages
  DType out_dtype;               // kF32 if the pages are kF32, else kBF16
  std::vector<int64_t> lengths;  // of the sequences
  int page_size = 16;
  int64_t window = 0;
  bool with_sinks = false;
  float k_scale = 1, v_scale = 1;           // of E4M3 codes
  std::vector<std::vector<float>> q, k, v;  // per sequence [length, heads * dim]
  std::vector<float> sinks;

  AttentionCase(Heads h, DType d, std::vector<int64_t> l)
      : heads(h), dtype(d), out_dtype(d == DType::kF32 ? d : DType::kBF16), lengths(std::move(l)) {
    if (d == DType::kF8E4M3) k_scale = 0.0173f, v_scale = 1.7f;
    Random random(3);
    for (int64_t n : lengths) {
      q.push_back(random.normal(n * h.num_heads * h.k_dim, 2));
      k.push_back(random.normal(n * h.num_kv_heads * h.k_dim));
      v.push_back(random.normal(n * h.num_kv_heads * h.v_dim));
    }
    sinks = random.normal(h.num_heads);
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(heads.k_dim)); }
  int64_t out_cols() const { return int64_t{heads.num_heads} * heads.v_dim; }
};

// The pages of a case: NaN until written. The pages of the sequences are interleaved, and each sequence's
// page ids descend. No sequence owns page 0.
class Cache {
 public:
  explicit Cache(const AttentionCase& c) : case_(c), tables_(c.lengths.size()) {
    int64_t most_pages = 0;
    for (int64_t n : c.lengths) most_pages = std::max(most_pages, (n + c.page_size - 1) / c.page_size);
    int32_t next = static_cast<int32_t>(1 + most_pages * static_cast<int64_t>(c.lengths.size()));
    const int64_t rows = next * int64_t{c.page_size} * c.heads.num_kv_heads;
    // 0xff is a NaN of every type.
    k_.assign(static_cast<size_t>(rows * c.heads.k_dim * dtype_bits(c.dtype) / 8), 0xff);
    v_.assign(static_cast<size_t>(rows * c.heads.v_dim * dtype_bits(c.dtype) / 8), 0xff);
    for (int64_t page = 0; page < most_pages; ++page)
      for (auto& table : tables_) table.push_back(--next);
  }
  KvPages k() { return pages(k_, case_.heads.k_dim, case_.k_scale); }
  KvPages v() { return pages(v_, case_.heads.v_dim, case_.v_scale); }
  // The sequence's page table for rows from position `begin` on: pages before their windows are page 0.
  std::vector<int32_t> table(size_t sequence, int64_t begin) const {
    std::vector<int32_t> table = tables_[sequence];
    if (case_.window > 0)
      std::fill_n(table.begin(), std::max<int64_t>(0, begin - case_.window + 1) / case_.page_size, 0);
    return table;
  }

 private:
  KvPages pages(std::vector<uint8_t>& bytes, int dim, float scale) const {
    return {bytes.data(), case_.dtype, case_.heads.num_kv_heads, case_.page_size, dim, 0, scale};
  }
  const AttentionCase& case_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<uint8_t> k_, v_;
};

// New tokens [begin, end) of one sequence.
struct Part {
  size_t sequence;
  int64_t begin, end;
};

// Writes the keys and values of the parts and computes their attention as one batch. Returns the outputs per
// part.
std::vector<std::vector<float>> run_batch(const AttentionCase& c, Cache& cache, const DenseOps& ops,
                                          ThreadPool& pool, const std::vector<Part>& parts) {
  const int64_t q_cols = c.heads.num_heads * c.heads.k_dim, q_stride = q_cols + 5;  // as in a fused q k v row
  const int64_t kv_stride = int64_t{c.heads.num_kv_heads} * std::max(c.heads.k_dim, c.heads.v_dim) + 3;
  std::vector<SequenceRows> sequences;
  std::vector<float> q, k, v;
  int64_t rows = 0;
  auto append_row = [](std::vector<float>& to, const std::vector<float>& from, int64_t row, int64_t cols,
                       int64_t stride) {
    to.insert(to.end(), from.begin() + row * cols, from.begin() + (row + 1) * cols);
    to.insert(to.end(), static_cast<size_t>(stride - cols), NAN);
  };
  std::vector<std::vector<int32_t>> tables;
  for (const Part& p : parts) tables.push_back(cache.table(p.sequence, p.begin));
  for (const Part& p : parts) {
    sequences.push_back({rows, p.end - p.begin, p.begin, tables[sequences.size()]});
    for (int64_t t = p.begin; t < p.end; ++t, ++rows) {
      append_row(q, c.q[p.sequence], t, q_cols, q_stride);
      append_row(k, c.k[p.sequence], t, c.heads.num_kv_heads * c.heads.k_dim, kv_stride);
      append_row(v, c.v[p.sequence], t, c.heads.num_kv_heads * c.heads.v_dim, kv_stride);
    }
  }
  ops.kv_write({k.data(), v.data(), kv_stride, cache.k(), cache.v(), sequences}, pool);
  ActBuffer out(c.out_dtype, rows, c.out_cols());
  ops.attention({.q = q.data(),
                 .q_stride = q_stride,
                 .k_pages = cache.k(),
                 .v_pages = cache.v(),
                 .sequences = sequences,
                 .num_heads = c.heads.num_heads,
                 .scale = c.scale(),
                 .window = c.window,
                 .sinks = c.with_sinks ? c.sinks.data() : nullptr,
                 .out = out.view()},
                pool);
  const std::vector<float> values = out.values();
  std::vector<std::vector<float>> by_part;
  for (const SequenceRows& s : sequences)
    by_part.emplace_back(values.begin() + s.first_row * c.out_cols(),
                         values.begin() + (s.first_row + s.num_rows) * c.out_cols());
  return by_part;
}

// Runs all sequences from their first token in one batch.
std::vector<std::vector<float>> run_whole(const AttentionCase& c, const DenseOps& ops, ThreadPool& pool) {
  Cache cache(c);
  std::vector<Part> parts;
  for (size_t s = 0; s < c.lengths.size(); ++s) parts.push_back({s, 0, c.lengths[s]});
  return run_batch(c, cache, ops, pool, parts);
}

// An output is a mean of values with weights that sum to at most 1. A logit with |q k| scale <= L has an
// error of (k_dim + 2) eps L. The numerator and the denominator of a weight each have that error plus exp's
// 2.5e-7, and the sum over n keys adds n eps. The output is rounded once. The values and queries in these
// cases are below kLargest.
float budget(const AttentionCase& c, int64_t length) {
  constexpr double kLargest = 10;
  const double largest_logit = 2 * kLargest * kLargest * c.heads.k_dim * c.scale() / 4;
  const double weight =
      2 * ((c.heads.k_dim + 2) * kF32Eps * largest_logit + 2.5e-7) + (2.0 * length + 4) * kF32Eps;
  return static_cast<float>(kLargest / 2 * (weight + (c.out_dtype == DType::kBF16 ? 2 * kBf16Eps : 0)));
}

class KvAttention : public testing::TestWithParam<std::tuple<const DenseOps*, DType>> {
 protected:
  const DenseOps& ops() const { return *std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  ThreadPool pool_{2};

  void expect_matches_ref(const AttentionCase& c) {
    const auto actual = run_whole(c, ops(), pool_), expected = run_whole(c, ref_dense_ops(), pool_);
    for (size_t s = 0; s < c.lengths.size(); ++s) {
      const float limit[] = {budget(c, c.lengths[s])};
      ASSERT_TRUE(within_budget(actual[s], expected[s], limit))
          << "sequence of " << c.lengths[s] << ", window " << c.window << ", page_size " << c.page_size;
      // The budget is a worst case; the average error of f32 arithmetic must be far smaller.
      const double l2 = dtype() == DType::kF32 ? 3e-6 : kBf16Eps;
      ASSERT_TRUE(within_relative_l2(actual[s], expected[s], l2));
    }
  }
};

TEST_P(KvAttention, EveryShortLength) {
  AttentionCase c({4, 2, 16, 16}, dtype(), {1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 32, 33});
  expect_matches_ref(c);
}

TEST_P(KvAttention, BlockAndTileEdges) {
  expect_matches_ref({{2, 1, 32, 32}, dtype(), {63, 64, 65, 127, 128, 129, 200}});
}

TEST_P(KvAttention, HeadShapes) {
  for (Heads h : {Heads{1, 1, 64, 64}, Heads{8, 1, 64, 64}, Heads{6, 2, 80, 80}, Heads{40, 1, 24, 24},
                  Heads{3, 3, 192, 128}, Heads{5, 1, 7, 9}, Heads{2, 1, 576, 512}})
    expect_matches_ref({h, dtype(), {1, 9, 70}});
}

TEST_P(KvAttention, PageSizes) {
  for (int page_size : {1, 2, 3, 16, 64, 100}) {
    AttentionCase c({4, 2, 16, 16}, dtype(), {5, 70});
    c.page_size = page_size;
    expect_matches_ref(c);
  }
}

TEST_P(KvAttention, WindowsAndSinks) {
  for (int64_t window : {1, 2, 63, 64, 65, 99, 100, 101, 1000})
    for (bool sinks : {false, true}) {
      AttentionCase c({4, 2, 16, 16}, dtype(), {100});
      c.window = window;
      c.with_sinks = sinks;
      expect_matches_ref(c);
    }
}

TEST_P(KvAttention, NothingToDo) {
  AttentionCase c({4, 2, 16, 16}, dtype(), {3});
  Cache cache(c);
  EXPECT_TRUE(run_batch(c, cache, ops(), pool_, {}).empty());
  EXPECT_TRUE(run_batch(c, cache, ops(), pool_, {{0, 0, 0}})[0].empty());
}

// The bits do not depend on the chunking of the prompt, the other sequences in the batch or the number of
// threads.
TEST_P(KvAttention, IsBatchInvariant) {
  for (int64_t window : {0, 30}) {
    AttentionCase c({8, 2, 64, 64}, dtype(), {150, 40, 97});
    c.window = window;
    c.with_sinks = true;
    const auto whole = run_whole(c, ops(), pool_);
    const std::vector<std::vector<Part>> steps = {{{2, 0, 1}, {0, 0, 64}},
                                                  {{0, 64, 67}, {1, 0, 39}, {2, 1, 2}},
                                                  {{1, 39, 40}, {2, 2, 3}, {0, 67, 68}},
                                                  {{0, 68, 150}, {2, 3, 97}}};
    for (int threads : {1, 2, 3, 7}) {
      ThreadPool pool(threads);
      EXPECT_EQ(whole, run_whole(c, ops(), pool));
      Cache cache(c);
      for (const auto& parts : steps) {
        const auto outs = run_batch(c, cache, ops(), pool, parts);
        for (size_t i = 0; i < parts.size(); ++i) {
          const Part& p = parts[i];
          const std::vector<float> expected(whole[p.sequence].begin() + p.begin * c.out_cols(),
                                            whole[p.sequence].begin() + p.end * c.out_cols());
          ASSERT_EQ(outs[i], expected) << "sequence " << p.sequence << " tokens " << p.begin << " to "
                                       << p.end << ", window " << window << ", threads " << threads;
        }
      }
    }
  }
}

TEST_P(KvAttention, PageSizeDoesNotChangeBits) {
  AttentionCase c({4, 2, 16, 16}, dtype(), {130});
  const auto expected = run_whole(c, ops(), pool_);
  c.page_size = 7;
  EXPECT_EQ(expected, run_whole(c, ops(), pool_));
}

// NaN keys and values outside a row's window or at later positions do not affect the row.
TEST_P(KvAttention, ForeignNanStaysOutside) {
  AttentionCase c({1, 1, 16, 16}, dtype(), {100});
  c.window = 10;
  const auto expected = run_whole(c, ops(), pool_);
  for (int d = 0; d < 16; ++d) c.k[0][50 * 16 + d] = c.v[0][50 * 16 + d] = NAN;
  const auto actual = run_whole(c, ops(), pool_);
  for (int64_t t = 0; t < 100; ++t)
    for (int d = 0; d < 16; ++d) {
      const float x = actual[0][t * 16 + d];
      if (t < 50 || t >= 60)
        ASSERT_EQ(x, expected[0][t * 16 + d]) << "token " << t;
      else
        ASSERT_TRUE(std::isnan(x)) << "token " << t;
    }
}

std::vector<const DenseOps*> all_tables() {
  std::vector<const DenseOps*> tables = cpu_tables();
  tables.push_back(&ref_dense_ops());
  return tables;
}

INSTANTIATE_TEST_SUITE_P(Tables, KvAttention,
                         testing::Combine(testing::ValuesIn(all_tables()),
                                          testing::Values(DType::kBF16, DType::kF32, DType::kF8E4M3)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param)->name) + "_" +
                                  dtype_name(std::get<1>(p.param));
                         });

class CodePages : public testing::TestWithParam<const DenseOps*> {
 protected:
  // The codes of the first token's first head.
  static uint8_t* first_row(const KvPages& pages, const std::vector<int32_t>& table) {
    return static_cast<uint8_t*>(pages.data) + pages.offset(table.data(), 0, 0);
  }
  ThreadPool pool_{2};
};

// Fills the page of a row with all codes; a window of one key then returns each value of the row unchanged.
TEST_P(CodePages, EveryCodeIsItsValueTimesTheScale) {
  AttentionCase c({1, 1, 256, 256}, DType::kF8E4M3, {1});
  c.out_dtype = DType::kF32;
  c.window = 1;
  Cache cache(c);
  const std::vector<int32_t> table = cache.table(0, 0);
  uint8_t* codes = first_row(cache.v(), table);
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  std::fill_n(first_row(cache.k(), table), 256, uint8_t{0});
  const SequenceRows sequence{0, 1, 0, table};
  ActBuffer out(DType::kF32, 1, 256);
  AttentionArgs args{.q = c.q[0].data(), .q_stride = 256, .k_pages = cache.k(), .v_pages = cache.v()};
  args.sequences = {&sequence, 1}, args.num_heads = 1, args.scale = 1, args.window = 1, args.out = out.view();
  GetParam()->attention(args, pool_);
  const std::vector<float> values = out.values();
  const std::vector<double> magnitudes = oracle::e4m3_magnitudes();
  for (size_t i = 0; i < 256; ++i) {
    if (i % 128 == 127) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
      continue;
    }
    const auto value = static_cast<float>(i < 128 ? magnitudes[i] : -magnitudes[i - 128]);
    EXPECT_EQ(values[i], value * c.v_scale) << i;
  }
}

// A stored code is the nearest one to x * (1 / scale); values beyond the largest code saturate.
TEST_P(CodePages, CodesAreTheNearest) {
  AttentionCase c({1, 1, 512, 1}, DType::kF8E4M3, {1});
  std::vector<float>& x = c.k[0];
  for (size_t i = 0; i < 200; ++i) x[i] *= std::ldexp(1.0f, static_cast<int>(i % 24) - 14);
  const float inf = std::numeric_limits<float>::infinity();
  x[0] = inf, x[1] = -inf, x[2] = NAN, x[3] = -NAN, x[4] = 0, x[5] = -0.0f, x[6] = 447 * c.k_scale,
  x[7] = 1e30f;
  Cache cache(c);
  run_batch(c, cache, *GetParam(), pool_, {{0, 0, 1}});
  const uint8_t* codes = first_row(cache.k(), cache.table(0, 0));
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(codes[i], std::isnan(x[i]) ? 0x7f : oracle::e4m3(x[i] * (1 / c.k_scale))) << i << ": " << x[i];
}

INSTANTIATE_TEST_SUITE_P(Tables, CodePages, testing::ValuesIn(all_tables()),
                         [](const auto& p) { return std::string(p.param->name); });

// Cases small enough to check by hand: one head of dimension 1, hence scale 1.
class HandAttention : public testing::TestWithParam<const DenseOps*> {
 protected:
  // Runs two tokens and returns the output of the second.
  static std::vector<float> last_output(std::vector<float> q, std::vector<float> k, std::vector<float> v,
                                        int64_t window, const float* sink) {
    ThreadPool pool(1);
    AttentionCase c({1, 1, 1, 1}, DType::kF32, {2});
    c.q[0] = std::move(q), c.k[0] = std::move(k), c.v[0] = std::move(v);
    c.window = window;
    c.with_sinks = sink != nullptr;
    if (sink != nullptr) c.sinks = {*sink};
    const std::vector<float> out = run_whole(c, *GetParam(), pool)[0];
    return {out[1]};
  }
};

TEST_P(HandAttention, EqualLogitsGiveTheMean) {
  EXPECT_FLOAT_EQ(last_output({0, 0}, {5, 7}, {2, 4}, 0, nullptr)[0], 3);
}
TEST_P(HandAttention, LogitsWeighByTheirExponential) {  // logits 0 and ln 3: weights 1/4 and 3/4
  EXPECT_FLOAT_EQ(last_output({0, 1}, {0, std::log(3.0f)}, {4, 8}, 0, nullptr)[0], 7);
}
TEST_P(HandAttention, WindowOfOneSeesItself) {
  EXPECT_FLOAT_EQ(last_output({1, 1}, {9, 1}, {2, 4}, 1, nullptr)[0], 4);
}
TEST_P(HandAttention, SinkTakesItsShare) {  // logits 0, 0, sink ln 2: weights 1/4, 1/4, 1/2
  const float sink = std::log(2.0f);
  EXPECT_FLOAT_EQ(last_output({0, 0}, {5, 7}, {4, 8}, 0, &sink)[0], 3);
}
TEST_P(HandAttention, HugeLogitsDoNotOverflow) {
  EXPECT_FLOAT_EQ(last_output({1, 100}, {-500, 500}, {2, 4}, 0, nullptr)[0], 4);
}

INSTANTIATE_TEST_SUITE_P(Tables, HandAttention, testing::ValuesIn(all_tables()),
                         [](const auto& p) { return std::string(p.param->name); });

}  // namespace
}  // namespace fp4moe
