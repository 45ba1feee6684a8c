// Compares attention on a GPU with kernels/ref on the same bf16 queries and the same pages of bf16 or of E4M3
// codes with scales. Page slots that no sequence owns hold NaN, as does the page that replaces those before a
// window; page tables end in invalid ids, and outputs start as NaN between canaries.
#include "kernels/cuda/attention/attention.h"

#include <cmath>
#include <limits>
#include <ostream>
#include <thread>

#include "device/graph.h"
#include "formats/e4m3.h"
#include "kernels/cuda/device_array.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Heads {
  int num_heads, num_kv_heads, k_dim;
  int v_dim = 0;  // 0: k_dim; otherwise values are the first columns of the keys (MLA)
};

// New rows of one sequence after `context` tokens.
struct Rows {
  int64_t context, rows;
};

struct Case {
  Heads heads;
  std::vector<Rows> sequences;
  int page_size = 16;
  int64_t window = 0;
  bool sinks = false;
  DType out = DType::kBF16;
  int64_t padding_rows = 0;  // also the number of padding sequences
  int nan_sequence = -1;     // sequence with NaN as its newest key and value; -1: none
  int64_t extra_pages = 0;   // page table columns past those of the longest sequence
  DType kv = DType::kBF16;
  float query_size = 2;  // standard deviation

  int v_dim() const { return heads.v_dim == 0 ? heads.k_dim : heads.v_dim; }
  bool mla() const { return heads.v_dim != 0; }
  int64_t out_cols() const { return int64_t{heads.num_heads} * v_dim(); }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << dtype_name(c.kv) << " pages, " << c.heads.num_heads << "/" << c.heads.num_kv_heads << " heads of "
      << c.heads.k_dim << "/" << c.v_dim() << ", page_size " << c.page_size << ", window " << c.window
      << (c.sinks ? ", sinks" : "") << ", sequences";
  for (const Rows& s : c.sequences) out << " " << s.context << "+" << s.rows;
  return out;
}

struct HostCase {
  const Case& c;
  int64_t rows = 0, q_stride = 0, max_pages = 0;
  int row_stride = 0;
  std::vector<float> q, sinks;
  std::vector<uint8_t> k, v;  // pages
  std::vector<int32_t> page_table, row_sequence, first_row, first_position;
  std::vector<int64_t> positions;

  explicit HostCase(const Case& of) : c(of) {
    Random random(17);
    q_stride = int64_t{c.heads.num_heads} * c.heads.k_dim + 6;
    row_stride = c.mla() ? c.heads.k_dim + 8 : c.heads.k_dim;
    make_batch();
    q = random.normal(positions.size() * q_stride, c.query_size);
    for (float& x : q) x = bf16_to_float(float_to_bf16(x));
    sinks = random.normal(c.heads.num_heads);
    fill_pages(random);
  }

  std::vector<float> reference() {
    std::vector<SequenceRows> sequences;
    for (size_t s = 0; s < c.sequences.size(); ++s)
      sequences.push_back({first_row[s], c.sequences[s].rows, c.sequences[s].context,
                           std::span(page_table).subspan(s * max_pages, max_pages)});
    std::vector<float> out(positions.size() * c.out_cols(), 0.0f);
    ThreadPool pool(std::max(2, static_cast<int>(std::thread::hardware_concurrency())));
    ref_dense_ops().attention(
        {.q = q.data(),
         .q_stride = q_stride,
         .k_pages = k_pages(k.data()),
         .v_pages = v_pages(k.data(), v.data()),
         .sequences = sequences,
         .num_heads = c.heads.num_heads,
         .scale = scale(),
         .window = c.window,
         .sinks = c.sinks ? sinks.data() : nullptr,
         .out = {out.data(), DType::kF32, static_cast<int64_t>(positions.size()), c.out_cols()}},
        pool);
    return out;
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(c.heads.k_dim)); }
  KvPages k_pages(void* keys) const { return pages(keys, c.heads.k_dim, kKeyScale); }
  KvPages v_pages(void* keys, void* values) const {
    return pages(c.mla() ? keys : values, c.v_dim(), c.mla() ? kKeyScale : kValueScale);
  }

 private:
  static constexpr float kKeyScale = 0.02f, kValueScale = 1.7f;  // of codes

  KvPages pages(void* data, int dim, float scale) const {
    return {
        data, c.kv, c.heads.num_kv_heads, c.page_size, dim, row_stride, c.kv == DType::kF8E4M3 ? scale : 1};
  }
  void make_batch() {
    int32_t s = 0;
    for (const Rows& r : c.sequences) {
      first_row.push_back(static_cast<int32_t>(rows));
      first_position.push_back(static_cast<int32_t>(r.context));
      for (int64_t i = 0; i < r.rows; ++i) positions.push_back(r.context + i), row_sequence.push_back(s);
      rows += r.rows, ++s;
      max_pages = std::max(max_pages, (r.context + r.rows + c.page_size - 1) / c.page_size);
    }
    max_pages += c.extra_pages;
    for (int64_t i = 0; i < c.padding_rows; ++i) {
      positions.push_back(0), row_sequence.push_back(-1);
      first_row.push_back(static_cast<int32_t>(rows)), first_position.push_back(0);
    }
    first_row.push_back(static_cast<int32_t>(rows));
  }

  void fill_pages(Random& random) {
    const size_t columns = first_position.size();
    page_table.assign(columns * max_pages, std::numeric_limits<int32_t>::max());
    int32_t next = 1;  // no sequence owns page 0
    for (int64_t i = 0; i < max_pages; ++i)
      for (size_t s = 0; s < c.sequences.size(); ++s)
        if (i * c.page_size < c.sequences[s].context + c.sequences[s].rows)
          page_table[s * max_pages + i] = next++;
    const size_t bytes =
        size_t(next) * c.heads.num_kv_heads * c.page_size * row_stride * dtype_bits(c.kv) / 8;
    k.assign(bytes, 0xff), v.assign(c.mla() ? 0 : bytes, 0xff);  // NaN of either type
    for (size_t s = 0; s < c.sequences.size(); ++s)
      for (int64_t position = 0; position < c.sequences[s].context + c.sequences[s].rows; ++position)
        for (int head = 0; head < c.heads.num_kv_heads; ++head) fill_row(random, s, position, head);
    if (c.window > 0) release_pages();
  }
  // Replaces the pages before each sequence's window by page 0, as the scheduler does.
  void release_pages() {
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const int64_t first = std::max<int64_t>(0, c.sequences[s].context - c.window + 1) / c.page_size;
      std::fill_n(page_table.begin() + static_cast<int64_t>(s) * max_pages, first, 0);
    }
  }
  void fill_row(Random& random, size_t s, int64_t position, int head) {
    const bool newest = position + 1 == c.sequences[s].context + c.sequences[s].rows;
    const int64_t at = k_pages(k.data()).offset(&page_table[s * max_pages], head, position);
    for (auto* to : {&k, &v}) {
      if (to->empty()) continue;
      const float inverse = 1 / (to == &k ? kKeyScale : kValueScale);
      const auto row = random.normal(c.heads.k_dim);
      for (size_t d = 0; d < row.size(); ++d) {
        const float x = newest && static_cast<int>(s) == c.nan_sequence ? NAN : row[d];
        if (c.kv == DType::kF8E4M3)
          (*to)[at + d] = e4m3_encode(x * inverse);
        else
          reinterpret_cast<bf16*>(to->data())[at + d] = float_to_bf16(x);
      }
    }
  }
};

class CudaAttention : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    auto stream = Stream::make();
    if (!stream.ok()) GTEST_SKIP() << "no GPU: " << stream.status().message();
    stream_ = std::move(*stream);
  }

  // Returns the output of `times` eager launches or graph replays as float; all must give the same bits.
  std::vector<float> run(const HostCase& h, int times = 1, bool graph = false) {
    const Case& c = h.c;
    const int64_t rows = static_cast<int64_t>(h.positions.size()), count = rows * c.out_cols();
    const DeviceArray<float> q(h.q), sinks(h.sinks);
    const DeviceArray<uint8_t> k(h.k), v(h.v);
    const DeviceArray<int64_t> positions(h.positions);
    const DeviceArray<int32_t> table(h.page_table), row_sequence(h.row_sequence), first_row(h.first_row),
        first_position(h.first_position);
    DeviceBatch batch;
    batch.num_rows = rows, batch.num_sequences = static_cast<int64_t>(h.first_position.size());
    batch.max_pages = h.max_pages;
    for (const Rows& r : c.sequences) batch.max_rows = std::max(batch.max_rows, r.rows);
    batch.positions = positions.data(), batch.row_sequence = row_sequence.data();
    batch.first_row = first_row.data(), batch.first_position = first_position.data();
    batch.page_table = table.data();
    const int64_t elem = c.out == DType::kF32 ? 4 : 2;
    std::vector<uint8_t> first;
    for (int i = 0; i < times; ++i) {
      const DeviceArray<uint8_t> out(count * elem);
      const AttentionArgs args = {.q = q.data(),
                                  .q_stride = h.q_stride,
                                  .k_pages = h.k_pages(k.data()),
                                  .v_pages = h.v_pages(k.data(), v.data()),
                                  .num_heads = c.heads.num_heads,
                                  .scale = h.scale(),
                                  .window = c.window,
                                  .sinks = c.sinks ? sinks.data() : nullptr,
                                  .out = {out.data(), c.out, rows, c.out_cols()},
                                  .device_batch = &batch};
      launch(args, graph);
      const std::vector<uint8_t> bytes = out.values();
      if (i == 0) first = bytes;
      EXPECT_EQ(first, bytes) << "launch " << i;
    }
    return to_floats(first.data(), count, c.out);
  }

  // The case with this test's type of pages.
  static Case with_pages(Case c) {
    c.kv = GetParam();
    return c;
  }

  void expect_matches_ref(const Case& of) {
    const Case c = with_pages(of);
    HostCase h(c);
    const auto actual = run(h), expected = h.reference();
    ASSERT_TRUE(within_relative_l2(actual, expected, 3e-3)) << c;
    // A weight has an error of half a bf16 ulp plus the f32 error of its logit; the output adds another half
    // ulp.
    constexpr double kLargest = 5;
    const double logit = c.query_size * kLargest * kLargest * c.heads.k_dim * h.scale() / 2;
    const double limit = kLargest * (2 * kBf16Eps + 2 * (c.heads.k_dim + 2) * kF32Eps * logit);
    const float limits[] = {static_cast<float>(limit)};
    ASSERT_TRUE(within_budget(actual, expected, limits)) << c;
    for (size_t i = h.rows * c.out_cols(); i < actual.size(); ++i) ASSERT_EQ(actual[i], 0) << c;
  }

  // Runs rows [first, first + rows) of the case's only sequence as a separate batch.
  std::vector<float> run_chunk(const HostCase& whole, int64_t first, int64_t rows) {
    Case c = whole.c;
    c.sequences = {{first, rows}};
    HostCase h(c);
    h.k = whole.k, h.v = whole.v, h.sinks = whole.sinks;
    h.page_table = whole.page_table, h.max_pages = whole.max_pages;
    const auto begin = whole.q.begin() + first * whole.q_stride;
    h.q.assign(begin, begin + rows * whole.q_stride);
    return run(h);
  }

  Stream stream_;
  void (*attention_)(const AttentionArgs&, ThreadPool&) = cuda::attention;

 private:
  void launch(const AttentionArgs& args, bool graph) {
    ThreadPool pool(1);
    StreamScope scope(stream_);
    if (graph) {
      auto recorded = Graph::capture(stream_, [&] { return attention_(args, pool), Status(); });
      ASSERT_TRUE(recorded.ok()) << recorded.status().message();
      recorded->launch(stream_);
      ASSERT_TRUE(stream_.synchronize().ok());
    } else {
      attention_(args, pool);
      const Status status = stream_.synchronize();
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
  static std::vector<float> to_floats(const uint8_t* bytes, int64_t count, DType dtype) {
    if (dtype == DType::kF32)
      return {reinterpret_cast<const float*>(bytes), reinterpret_cast<const float*>(bytes) + count};
    const bf16* values = reinterpret_cast<const bf16*>(bytes);
    return to_float({values, values + count});
  }
};

constexpr Heads kGptOss = {16, 2, 64}, kQwen = {8, 1, 128};

TEST_P(CudaAttention, DecodeEveryShortContext) {
  Case c{kGptOss, {}};
  for (int64_t n = 0; n < 70; ++n) c.sequences.push_back({n, 1});
  for (int padding : {0, 3}) {
    c.padding_rows = padding;
    expect_matches_ref(c);
  }
}

TEST_P(CudaAttention, DecodeHeadShapes) {
  for (int dim : {16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256})
    for (int group : {1, 2, 3, 5, 8, 12, 16})
      expect_matches_ref({{2 * group, 2, dim}, {{0, 1}, {20, 1}, {133, 1}}});
}

TEST_P(CudaAttention, DecodeWindowsAndSinks) {
  for (int64_t window : {0, 1, 2, 15, 16, 17, 100, 128, 1000})
    for (bool sinks : {false, true})
      expect_matches_ref({kGptOss, {{0, 1}, {127, 1}, {128, 1}, {500, 1}}, 16, window, sinks});
}

TEST_P(CudaAttention, DecodePageSizes) {
  for (int page_size : {1, 2, 4, 8, 16, 32, 64, 128})
    for (const Heads& heads : {kGptOss, kQwen})
      expect_matches_ref({heads, {{5, 1}, {200, 1}, {127, 1}}, page_size});
}

TEST_P(CudaAttention, DecodeLongContexts) {
  Case c{kGptOss, {{8191, 1}}};
  c.sinks = true;
  expect_matches_ref(c);
  c.sequences = {{3000, 1}, {1, 1}, {700, 1}, {4095, 1}};
  c.extra_pages = 4096;
  expect_matches_ref(c);
  c.heads = kQwen;
  expect_matches_ref(c);
}

TEST_P(CudaAttention, DecodeOfLargeBatches) {
  Case c{kGptOss, {}};
  for (int64_t n = 0; n < 200; ++n) c.sequences.push_back({n * 7 % 300, 1});
  c.padding_rows = 56;
  expect_matches_ref(c);
  c.heads = kQwen;
  expect_matches_ref(c);
}

TEST_P(CudaAttention, PrefillEveryShortLength) {
  for (int64_t n = 1; n < 40; ++n) expect_matches_ref({kGptOss, {{0, n}}});
}

TEST_P(CudaAttention, PrefillHeadShapes) {
  for (int dim : {16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256})
    for (int group : {1, 2, 3, 5, 8, 12, 16}) expect_matches_ref({{group, 1, dim}, {{0, 150}, {70, 9}}});
}

TEST_P(CudaAttention, PrefillWindowsAndSinks) {
  for (int64_t window : {0, 1, 2, 31, 63, 64, 65, 127, 128, 129, 1000})
    for (bool sinks : {false, true})
      for (const Heads& heads : {kGptOss, kQwen})
        expect_matches_ref({heads, {{0, 300}, {290, 70}}, 16, window, sinks});
}

TEST_P(CudaAttention, PrefillPageSizes) {
  for (int page_size : {1, 2, 4, 8, 16, 32, 64, 128})
    for (const Heads& heads : {kGptOss, kQwen}) expect_matches_ref({heads, {{5, 40}, {200, 100}}, page_size});
}

TEST_P(CudaAttention, RaggedAndMixedBatches) {
  Case c{kGptOss, {{0, 7}, {513, 1}, {0, 0}, {64, 300}, {31, 1}, {0, 1}, {1000, 25}}};
  for (int i = 0; i < 40; ++i) c.sequences.push_back({i * 13, 1 + i % 3});
  for (int64_t padding : {0, 5, 100}) {
    c.padding_rows = padding;
    expect_matches_ref(c);
  }
  c.heads = {4, 4, 32};
  expect_matches_ref(c);
}

TEST_P(CudaAttention, PrefillOfLongPrompts) {
  expect_matches_ref({{8, 1, 64}, {{0, 1500}}, 16, 0, true});
  expect_matches_ref({{2, 1, 128}, {{4000, 500}}});
  expect_matches_ref({{8, 1, 64}, {{3000, 600}}, 16, 128, true});
}

// Tiles of 80 keys; with large queries the base of a row's weights moves often.
TEST_P(CudaAttention, PrefillOfWideHeads) {
  constexpr Heads kWide = {16, 2, 256};
  for (const float query_size : {0.1f, 2.0f, 20.0f}) {
    Case c{kWide, {{0, 79}, {0, 80}, {0, 81}, {150, 20}, {700, 333}}};
    c.query_size = query_size;
    expect_matches_ref(c);
  }
  for (int64_t window : {1, 2, 79, 80, 81, 159, 160, 161, 1000})
    for (bool sinks : {false, true}) expect_matches_ref({kWide, {{0, 300}, {290, 70}}, 16, window, sinks});
  for (int page_size : {1, 4, 64, 128}) expect_matches_ref({kWide, {{5, 40}, {200, 100}}, page_size});
  expect_matches_ref({{8, 1, 256}, {{0, 1500}}, 16, 0, true});
}

TEST_P(CudaAttention, NothingToDo) {
  Case c = with_pages({kGptOss, {}});
  EXPECT_TRUE(run(HostCase(c)).empty());
  c.padding_rows = 4;
  expect_matches_ref(c);
  c.sequences = {{5, 0}};
  expect_matches_ref(c);
}

TEST_P(CudaAttention, NanStaysInItsSequence) {
  for (int64_t rows : {1, 20}) {
    Case c = with_pages({kGptOss, {{40, rows}, {50, rows}, {0, rows}}});
    const auto clean = run(HostCase(c));
    c.nan_sequence = 1;
    const auto actual = run(HostCase(c));
    const size_t part = rows * c.out_cols();
    EXPECT_TRUE(std::equal(clean.begin(), clean.begin() + part, actual.begin()));
    EXPECT_TRUE(std::equal(clean.begin() + 2 * part, clean.end(), actual.begin() + 2 * part));
    for (size_t i = 2 * part - c.out_cols(); i < 2 * part; ++i) ASSERT_TRUE(std::isnan(actual[i])) << i;
  }
}

constexpr Heads kDeepSeek = {128, 1, 576, 512}, kSmallMla = {4, 1, 96, 64};

TEST_P(CudaAttention, MlaDecode) {
  for (int64_t context : {0, 1, 15, 63, 64, 65, 700})
    expect_matches_ref({kDeepSeek, {{context, 1}}, 16, 0, false, DType::kF32});
  Case c{kSmallMla, {}};
  c.out = DType::kF32;
  for (int64_t n = 0; n < 70; ++n) c.sequences.push_back({n * 3, 1});
  c.padding_rows = 3;
  expect_matches_ref(c);
}

TEST_P(CudaAttention, MlaPrefill) {
  for (DType out : {DType::kF32, DType::kBF16}) {
    expect_matches_ref({{16, 1, 576, 512}, {{0, 40}, {100, 3}}, 16, 0, false, out});
    expect_matches_ref({kSmallMla, {{0, 300}, {130, 17}, {5, 1}}, 16, 0, false, out, 5});
  }
}

TEST_P(CudaAttention, MlaHeadShapes) {
  for (const Heads& heads : {Heads{5, 1, 48, 32},
                             {1, 1, 32, 16},
                             {40, 1, 80, 64},
                             {64, 1, 320, 256},
                             {3, 1, 288, 272},
                             {2, 1, 576, 512},
                             {7, 1, 144, 128}})
    for (int page_size : {1, 16, 128})
      expect_matches_ref({heads, {{0, 30}, {77, 2}}, page_size, 0, false, DType::kF32});
}

TEST_P(CudaAttention, MlaWindowsAndSinks) {
  for (int64_t window : {0, 1, 63, 64, 65, 100})
    for (int64_t rows : {1, 20})
      expect_matches_ref({kSmallMla, {{0, rows}, {200, rows}}, 16, window, true, DType::kF32});
}

// The bits do not depend on how a sequence is split into steps.
TEST_P(CudaAttention, TheOneForAnyBatchGivesARowTheSameBits) {
  attention_ = cuda::invariant_attention;
  for (const Heads& heads : {kGptOss, kQwen, Heads{4, 2, 256}, kSmallMla, kDeepSeek})
    for (const int64_t window : {0, 100}) {
      const Case c = with_pages({heads, {{0, 333}}, 16, window, true, DType::kF32});
      HostCase h(c);
      const std::vector<float> whole = run(h);
      ASSERT_TRUE(within_relative_l2(whole, h.reference(), 3e-3)) << c;
      for (const Rows& chunk : {Rows{0, 1}, {5, 1}, {63, 1}, {64, 2}, {130, 70}, {200, 133}, {332, 1}}) {
        const auto from = whole.begin() + chunk.context * c.out_cols();
        const std::vector<float> expected(from, from + chunk.rows * c.out_cols());
        ASSERT_EQ(run_chunk(h, chunk.context, chunk.rows), expected)
            << c << ", rows " << chunk.context << "+" << chunk.rows;
      }
    }
}

TEST_P(CudaAttention, RepeatsAndReplaysTheSameBits) {
  for (const Heads& heads : {kGptOss, kQwen, kSmallMla, kDeepSeek})
    for (int64_t rows : {1, 30}) {
      const Case c = with_pages({heads, {{400, rows}, {0, rows}, {90, rows}}, 16, 0, true});
      const HostCase h(c);
      EXPECT_EQ(run(h, 20), run(h, 3, /*graph=*/true)) << c;
    }
}

INSTANTIATE_TEST_SUITE_P(Pages, CudaAttention, testing::Values(DType::kBF16, DType::kF8E4M3),
                         [](const auto& p) { return std::string(dtype_name(p.param)); });

}  // namespace
}  // namespace fp4moe
