// Compares one fused call of rope, page write and attention, for decode and other batches, with the separate
// ops of kernels/ref, for pages of bf16 and of E4M3 codes. Pages hold NaN where no token was written.
#include <cmath>
#include <string>
#include <utility>

#include "device/stream.h"
#include "formats/e4m3.h"
#include "kernels/cuda/device_array.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr int kPageSize = 8;

struct Case {
  int num_q, num_kv, head_dim, rotary_dim;
  std::vector<int64_t> contexts;  // per sequence: tokens before the new ones
  int64_t new_tokens = 1;
  int64_t window = 0;
  bool sinks = false;
  int64_t padding = 0;
  DType kv = DType::kBF16;
  bool shares_pages = false;  // the new tokens are presented as sequences of one row with the same pages
  bool norms = false, gate = false;

  int64_t rows() const { return std::ssize(contexts) * new_tokens; }
  int64_t gate_column() const { return (num_q + 2 * num_kv) * head_dim; }
  int64_t stride() const { return gate_column() + (gate ? num_q * head_dim : 0) + 2; }
  int64_t max_pages() const {
    int64_t most = 0;
    for (int64_t context : contexts) most = std::max(most, context);
    return (most + new_tokens + kPageSize - 1) / kPageSize;
  }
};

struct Data {
  std::vector<float> qkv, inv_freq, sinks, norms;  // norms: of q, then of k
  std::vector<uint8_t> k, v;                       // pages
  std::vector<int64_t> positions;
  std::vector<int32_t> page_table, row_sequence, first_row, first_position;

  explicit Data(const Case& c) {
    Random random(3);
    const int64_t padded = c.rows() + c.padding, columns = std::ssize(c.contexts) + c.padding;
    qkv = random.normal(padded * c.stride());
    sinks = random.normal(c.num_q);
    norms = random.normal(2 * c.head_dim);
    for (int i = 0; i < c.rotary_dim / 2; ++i)
      inv_freq.push_back(
          std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(c.rotary_dim)));
    page_table.assign(static_cast<size_t>(columns * c.max_pages()), 0);
    int32_t next = 1;  // no sequence owns page 0
    for (int32_t& page : page_table) page = next++;
    const int64_t row = int64_t{c.num_kv} * c.head_dim;
    k.assign(static_cast<size_t>(next * kPageSize * row * dtype_bits(c.kv) / 8), 0xff);  // NaN
    v = k;
    for (int32_t s = 0; s < std::ssize(c.contexts); ++s) add_sequence(c, s, random);
    first_row.resize(static_cast<size_t>(columns + 1), static_cast<int32_t>(c.rows()));
    first_position.resize(static_cast<size_t>(columns));
    positions.resize(static_cast<size_t>(padded));
    row_sequence.resize(static_cast<size_t>(padded), -1);
  }

  // Presents every row as a sequence with a copy of its page table.
  void split_sequences(const Case& c) {
    const std::vector<int32_t> tables = std::exchange(page_table, {});
    for (int32_t t = 0; t < c.rows() + c.padding; ++t) {
      const auto row = static_cast<size_t>(t);
      const int64_t s = t < c.rows() ? row_sequence[row] : std::ssize(c.contexts);
      const auto table = tables.begin() + std::min(s * c.max_pages(), std::ssize(tables) - c.max_pages());
      page_table.insert(page_table.end(), table, table + c.max_pages());
      if (t < c.rows()) row_sequence[row] = t;
    }
    first_row.clear();
    for (int64_t t = 0; t <= c.rows() + c.padding; ++t)
      first_row.push_back(static_cast<int32_t>(std::min(t, c.rows())));
    first_position.assign(positions.begin(), positions.end());
  }

  static constexpr float kKeyScale = 0.02f, kValueScale = 1.7f;  // of codes
  KvPages pages(const Case& c, void* data, float scale) const {
    return {data, c.kv, c.num_kv, kPageSize, c.head_dim, 0, c.kv == DType::kF8E4M3 ? scale : 1};
  }
  // The values of pages.
  static std::vector<float> values(const Case& c, const std::vector<uint8_t>& bytes) {
    std::vector<float> to;
    const auto* rounded = reinterpret_cast<const bf16*>(bytes.data());
    for (size_t i = 0; i < bytes.size() * 8 / static_cast<size_t>(dtype_bits(c.kv)); ++i)
      to.push_back(c.kv == DType::kF8E4M3 ? e4m3_decode(bytes[i]) : bf16_to_float(rounded[i]));
    return to;
  }
  struct Operands {
    float* x;
    const int64_t* at;
    const float* freq;
    void *keys, *values, *out;
    DType dtype;  // of out
    int64_t rows;
    const float *sink, *norms;
  };
  RopeAttentionArgs args(const Case& c, const Operands& operands) const {
    const auto [x, at, freq, keys, values, out, dtype, rows, sink, norm_weights] = operands;
    const RopeArgs q{x, at, freq, 1.25f, rows, c.stride(), c.num_q, c.head_dim, c.rotary_dim};
    RopeArgs key = q;
    key.x = x + c.num_q * c.head_dim, key.num_heads = c.num_kv;
    RopeAttentionArgs args{{q,
                            key,
                            {key.x,
                             key.x + c.num_kv * c.head_dim,
                             c.stride(),
                             pages(c, keys, kKeyScale),
                             pages(c, values, kValueScale),
                             {},
                             nullptr}},
                           {}};
    args.attention.q = x, args.attention.q_stride = c.stride(), args.attention.num_heads = c.num_q;
    args.attention.k_pages = args.rope.kv.k_pages, args.attention.v_pages = args.rope.kv.v_pages;
    args.attention.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
    args.attention.window = c.window, args.attention.sinks = sink;
    args.attention.out = {out, dtype, rows, int64_t{c.num_q} * c.head_dim};
    if (c.norms) args.rope.norm = {norm_weights, norm_weights + c.head_dim, 1e-5f};
    if (c.gate) args.gate = x + c.gate_column(), args.gate_stride = c.stride();
    return args;
  }

 private:
  void add_sequence(const Case& c, int32_t s, Random& random) {
    const int64_t context = c.contexts[static_cast<size_t>(s)];
    first_row.push_back(static_cast<int32_t>(positions.size()));
    first_position.push_back(static_cast<int32_t>(context));
    for (int64_t i = 0; i < c.new_tokens; ++i) positions.push_back(context + i), row_sequence.push_back(s);
    for (int64_t position = 0; position < context; ++position)
      for (int head = 0; head < c.num_kv; ++head)
        for (auto* to : {&k, &v}) {
          const int64_t at = pages(c, nullptr, 1)
                                 .offset(&page_table[static_cast<size_t>(s * c.max_pages())], head, position);
          const std::vector<float> row = random.normal(c.head_dim);
          for (size_t d = 0; d < row.size(); ++d) {
            if (c.kv == DType::kF8E4M3)
              (*to)[static_cast<size_t>(at) + d] = e4m3_encode(row[d] / (to == &k ? kKeyScale : kValueScale));
            else
              reinterpret_cast<bf16*>(to->data())[static_cast<size_t>(at) + d] = float_to_bf16(row[d]);
          }
        }
  }
};

class RopeAttention : public testing::TestWithParam<DType> {
 protected:
  void expect_matches_ref(Case c) {
    c.kv = GetParam();
    SCOPED_TRACE(std::to_string(c.num_q) + "/" + std::to_string(c.num_kv) + " heads of " +
                 std::to_string(c.head_dim) + ", window " + std::to_string(c.window) +
                 (c.norms ? ", norms" : "") + (c.gate ? ", gate" : ""));
    Data in(c);
    const int64_t cols = int64_t{c.num_q} * c.head_dim, padded = c.rows() + c.padding;
    std::vector<float> x = in.qkv, expected(static_cast<size_t>(padded * cols));
    std::vector<uint8_t> k = in.k, v = in.v;
    std::vector<SequenceRows> sequences;
    for (int64_t s = 0; s < std::ssize(c.contexts); ++s)
      sequences.push_back({s * c.new_tokens, c.new_tokens, c.contexts[static_cast<size_t>(s)],
                           std::span(in.page_table).subspan(static_cast<size_t>(s * c.max_pages()))});
    RopeAttentionArgs args =
        in.args(c, {x.data(), in.positions.data(), in.inv_freq.data(), k.data(), v.data(), expected.data(),
                    DType::kF32, c.rows(), c.sinks ? in.sinks.data() : nullptr, in.norms.data()});
    args.rope.kv.sequences = args.attention.sequences = sequences;
    ref_dense_ops().rope_attention(args, pool_);
    if (c.shares_pages) in.split_sequences(c);

    const DeviceArray<float> qkv(in.qkv), freq(in.inv_freq), sinks(in.sinks), norms(in.norms);
    const DeviceArray<uint8_t> device_k(in.k), device_v(in.v);
    const DeviceArray<bf16> out(poisoned<bf16>(padded * cols));
    const DeviceArray<int64_t> positions(in.positions);
    const DeviceArray<int32_t> table(in.page_table), sequence(in.row_sequence), first_row(in.first_row),
        first_position(in.first_position);
    const DeviceBatch batch{.num_rows = padded,
                            .num_sequences = std::ssize(in.first_position),
                            .max_rows = c.shares_pages ? 1 : c.new_tokens,
                            .shares_pages = c.shares_pages,
                            .max_pages = c.max_pages(),
                            .positions = positions.data(),
                            .row_sequence = sequence.data(),
                            .first_row = first_row.data(),
                            .first_position = first_position.data(),
                            .page_table = table.data()};
    args = in.args(c, {qkv.data(), positions.data(), freq.data(), device_k.data(), device_v.data(),
                       out.data(), DType::kBF16, padded, c.sinks ? sinks.data() : nullptr, norms.data()});
    args.rope.kv.device_batch = args.attention.device_batch = &batch;
    {
      const StreamScope scope(stream_);
      cuda_dense_ops()->rope_attention(args, pool_);
    }
    const Status status = stream_.synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(within_relative_l2(to_float(out.values()), expected, 6e-3));
    expect_same_pages(Data::values(c, device_k.values()), Data::values(c, k),
                      c.kv == DType::kF8E4M3 ? 16 : 2);  // a rotated key may round to the next code
    expect_same_pages(Data::values(c, device_v.values()), Data::values(c, v), 0);
  }

  // Checks equality within `units` bf16 ulps; NaN exactly where `expected` has NaN.
  void expect_same_pages(const std::vector<float>& got, const std::vector<float>& expected, double units) {
    const double tiny = GetParam() == DType::kF8E4M3 ? 0x1p-13 : 1e-5;  // 2^-13 * 16: the least code
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(std::isnan(got[i]), std::isnan(expected[i])) << i;
      if (!std::isnan(got[i])) {
        ASSERT_LE(std::fabs(got[i] - expected[i]), units * (2 * kBf16Eps * std::fabs(expected[i]) + tiny))
            << i;
      }
    }
  }

  Stream stream_ = std::move(*Stream::make());
  ThreadPool pool_{2};
};

TEST_P(RopeAttention, DecodeOfEveryShortContext) {
  Case c{16, 2, 64, 64, {}};
  for (int64_t n = 0; n < 70; ++n) c.contexts.push_back(n);
  for (int64_t window : {0, 1, 2, 16, 17, 40})
    for (int64_t padding : {0, 3}) {
      c.window = window, c.padding = padding, c.sinks = window % 2 == 0;
      expect_matches_ref(c);
    }
}

TEST_P(RopeAttention, DecodeHeadShapes) {
  for (int dim : {16, 32, 48, 64, 80, 96, 112, 128})
    for (int group : {1, 3, 8, 16}) expect_matches_ref({2 * group, 2, dim, dim, {0, 7, 20, 133}});
  expect_matches_ref({8, 2, 64, 32, {0, 20, 70}});
  expect_matches_ref({8, 2, 64, 20, {0, 20, 70}});
  for (int rotary : {16, 32, 64, 96})
    for (int group : {1, 3, 12, 16}) expect_matches_ref({2 * group, 2, 128, rotary, {0, 7, 20, 133}});
  expect_matches_ref({4, 2, 192, 192, {0, 20}});
  for (int dim : {144, 208, 256})
    for (int group : {1, 3, 8, 16}) expect_matches_ref({2 * group, 2, dim, 64, {0, 7, 20, 133}});
  for (int rotary : {32, 128, 256}) expect_matches_ref({16, 2, 256, rotary, {0, 7, 20, 133}});
}

TEST_P(RopeAttention, DecodeOfLongContexts) {
  expect_matches_ref({8, 1, 64, 64, {1030, 2047, 2048, 5000}});
  expect_matches_ref({8, 1, 128, 128, {4095, 1}, 1, 0, true});
  expect_matches_ref({12, 1, 128, 64, {4095, 1, 2048}, 1, 0, true});
  expect_matches_ref({8, 1, 256, 64, {4095, 1, 2048}, 1, 0, true});
  expect_matches_ref({16, 2, 256, 64, {4095, 1, 2048}, 1, 1000, false, 2});
}

// So many rows that thread blocks have two warps.
TEST_P(RopeAttention, DecodeOfLargeBatches) {
  Case c{64, 8, 64, 64, {}, 1, 0, true};
  for (int64_t n = 0; n < 70; ++n) c.contexts.push_back(n * 5 % 200);
  expect_matches_ref(c);
  c.window = 40, c.padding = 10;
  expect_matches_ref(c);
  c.num_q = 32, c.num_kv = 4, c.head_dim = c.rotary_dim = 128, c.norms = c.gate = true;
  expect_matches_ref(c);
}

TEST_P(RopeAttention, NormsAndGate) {
  for (const auto& [dim, rotary] :
       {std::pair{64, 64}, {128, 128}, {128, 64}, {128, 32}, {256, 64}, {256, 256}, {96, 96}})
    for (const int group : {1, 8, 16})
      for (const int64_t new_tokens : {1, 3})
        for (const int which : {1, 2, 3}) {
          Case c{2 * group, 2, dim, rotary, {0, 7, 20, 133, 700}, new_tokens};
          c.norms = which % 2 == 1, c.gate = which >= 2, c.padding = which - 1;
          expect_matches_ref(c);
        }
}

TEST_P(RopeAttention, SeveralTokensOfASequence) {
  expect_matches_ref({16, 2, 64, 64, {0, 5, 100}, 3});
  expect_matches_ref({16, 2, 64, 64, {0, 5, 100}, 40, 32, true});
  expect_matches_ref({24, 2, 128, 64, {0, 5, 100}, 40});
}

// Drafts: rows attend to keys that other rows of the same step store. Pages hold NaN until then.
TEST_P(RopeAttention, RowsThatSharePagesAttendToEachOther) {
  for (const int dim : {64, 128, 96, 256})
    for (const int64_t window : {0, 1, 3, 40})
      for (const int64_t padding : {0, 3}) {
        Case c{16, 2, dim, dim, {0, 1, 5, 14, 100, 250}, 6, window, window != 3, padding};
        c.shares_pages = true;
        expect_matches_ref(c);
      }
  Case long_context{8, 1, 64, 64, {2047, 5000}, 4};
  long_context.shares_pages = true;
  for (int repeat = 0; repeat < 20; ++repeat) expect_matches_ref(long_context);
}

INSTANTIATE_TEST_SUITE_P(Pages, RopeAttention, testing::Values(DType::kBF16, DType::kF8E4M3),
                         [](const auto& p) { return std::string(dtype_name(p.param)); });

}  // namespace
}  // namespace fp4moe
