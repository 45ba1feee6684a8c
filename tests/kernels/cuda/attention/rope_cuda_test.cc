// Compares the GPU's rope, with what else its launches do, with the oracle.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <tuple>

#include "formats/e4m3.h"
#include "kernels/cuda/dense_ops_on_gpu.h"
#include "kernels/cuda/device_array.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

// A batch with queries, keys and values in one row, the pages of two sequences, and one padding row.
struct AttentionInputs {
  int64_t tokens = 6, stride;
  int num_q, num_kv, head_dim, rotary;
  DType dtype;
  std::vector<float> rows, inv_freq, pages;
  std::vector<int64_t> positions = {3, 4, 5, 70000, 70001, 0};
  std::vector<int32_t> sequence = {0, 0, 0, 1, 1, -1}, page_table;

  static constexpr int64_t kPages = 9, kPageSize = 4, kMaxPages = 17502;
  AttentionInputs(int q, int kv, int dim, int rotary_dim, DType page_type)
      : stride((q + 2 * kv) * dim + 2),
        num_q(q),
        num_kv(kv),
        head_dim(dim),
        rotary(rotary_dim),
        dtype(page_type) {
    Random random(10);
    rows = random.normal(tokens * stride);
    for (int i = 0; i < rotary / 2; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / rotary));
    pages = filled(kPages * kv * kPageSize * dim, 42);
    page_table.assign(2 * kMaxPages, 0);
    page_table[0] = 7, page_table[1] = 2;
    page_table[kMaxPages + 70000 / kPageSize] = 5;
  }
  RopeKvArgs args(float* x, const int64_t* at, const float* freq, void* k, void* v) const {
    const RopeArgs q{x, at, freq, 1.25f, tokens, stride, num_q, head_dim, rotary};
    RopeArgs key = q;
    key.x = x + num_q * head_dim, key.num_heads = num_kv;
    const bool is_fp8 = dtype == DType::kF8E4M3;
    const KvPages k_pages{k, dtype, num_kv, kPageSize, head_dim, 0, is_fp8 ? 0.02f : 1},
        v_pages{v, dtype, num_kv, kPageSize, head_dim, 0, is_fp8 ? 1.7f : 1};
    return {q, key, {key.x, key.x + num_kv * head_dim, stride, k_pages, v_pages, {}, nullptr}};
  }
};

class RopeCuda : public DenseOpsCuda, public testing::WithParamInterface<bool> {
 protected:
  template <class Page>
  void compare(const AttentionInputs& in, const std::vector<Page>& pages) {
    const bool is_fused = GetParam();
    std::vector<float> x = in.rows;
    std::vector<Page> k = pages, v = pages;
    RopeKvArgs args = in.args(x.data(), in.positions.data(), in.inv_freq.data(), k.data(), v.data());
    const std::span<const int32_t> table(in.page_table);
    const SequenceRows sequences[] = {{0, 3, 3, table},
                                      {3, 2, 70000, table.subspan(AttentionInputs::kMaxPages)}};
    args.kv.sequences = sequences;
    ref_.rope(args.q, pool_);
    ref_.rope(args.k, pool_);
    ref_.kv_write(args.kv, pool_);

    const DeviceArray<float> device_x(in.rows), freq(in.inv_freq);
    const DeviceArray<int64_t> positions(in.positions);
    const DeviceArray<int32_t> sequence(in.sequence), page_table(in.page_table);
    const DeviceArray<Page> device_k(pages), device_v(pages);
    const DeviceBatch batch{.num_rows = in.tokens,
                            .num_sequences = 2,
                            .max_pages = AttentionInputs::kMaxPages,
                            .positions = positions.data(),
                            .row_sequence = sequence.data(),
                            .page_table = page_table.data()};
    RopeKvArgs device =
        in.args(device_x.data(), positions.data(), freq.data(), device_k.data(), device_v.data());
    device.kv.device_batch = &batch;
    if (is_fused) {
      cuda::rope_kv(device, pool_);
    } else {
      ops_.rope(device.q, pool_);
      ops_.rope(device.k, pool_);
      ops_.kv_write(device.kv, pool_);
    }
    wait();
    const auto widen = [](const std::vector<Page>& values) {
      if constexpr (std::is_same_v<Page, bf16>) return to_float(values);
      if constexpr (std::is_same_v<Page, float>) return values;
      if constexpr (std::is_same_v<Page, uint8_t>) {
        std::vector<float> decoded;
        for (const uint8_t code : values) decoded.push_back(e4m3_decode(code));
        return decoded;
      }
    };
    const std::vector<float> expected_k = widen(k);
    std::vector<float> page_budget;
    for (const float value : expected_k)
      page_budget.push_back(in.dtype == DType::kBF16     ? 8 * 2 * static_cast<float>(kBf16Eps)
                            : in.dtype == DType::kF8E4M3 ? std::fabs(value) / 8 + 0x1p-9f  // the next code
                                                         : 1e-5f);
    EXPECT_TRUE(within_budget(widen(device_k.values()), expected_k, page_budget));
    EXPECT_TRUE(same_bits(widen(device_v.values()), widen(v)));
    std::vector<float> budget(x.size(), 1e-5f), got = device_x.values();
    if (is_fused)  // rope_kv() leaves the key columns of x unspecified
      for (int64_t t = 0; t < in.tokens; ++t)
        for (int i = 0; i < in.num_kv * in.head_dim; ++i) {
          const auto at = static_cast<size_t>(t * in.stride + in.num_q * in.head_dim + i);
          got[at] = x[at];
        }
    EXPECT_TRUE(within_budget(got, x, budget));
  }
};

TEST_P(RopeCuda, TurnsAndStores) {
  constexpr int kSizes[][4] = {{64, 8, 64, 64}, {3, 1, 20, 12},  {4, 2, 128, 128}, {5, 1, 37, 34},
                               {3, 2, 256, 64}, {2, 1, 320, 64}, {2, 1, 256, 256}};
  for (const auto& [q, kv, dim, rotary] : kSizes) {
    const AttentionInputs rounded(q, kv, dim, rotary, DType::kBF16), exact(q, kv, dim, rotary, DType::kF32),
        codes(q, kv, dim, rotary, DType::kF8E4M3);
    compare<bf16>(rounded, to_bf16(rounded.pages));
    compare<float>(exact, exact.pages);
    compare<uint8_t>(codes, std::vector<uint8_t>(codes.pages.size(), 0x2a));
  }
}
INSTANTIATE_TEST_SUITE_P(, RopeCuda, testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "Fused" : "OneByOne"); });

// Many rows at once have a kernel of their own: the same bits as a hundred rows at a time.
class ManyRowsCuda : public DenseOpsCuda {
 protected:
  static constexpr int kPageSize = 16, kMaxPages = 40;

  struct Result {
    std::vector<float> rows;
    std::vector<uint8_t> k, v;
    bool operator==(const Result&) const = default;
  };
  Result turn(int head_dim, DType dtype, int64_t rows_at_once) {
    constexpr int64_t kRows = 611;
    constexpr int kQueries = 5, kKeys = 2, kHeads = kQueries + 2 * kKeys;
    const int64_t stride = kHeads * head_dim;
    Random random(12);
    const DeviceArray<float> x(random.normal(kRows * stride));
    std::vector<float> freq;
    for (int i = 0; i < head_dim / 2; ++i) freq.push_back(std::pow(10000.0f, -2.0f * i / head_dim));
    std::vector<int64_t> positions;
    std::vector<int32_t> sequence, page_table;
    for (int64_t t = 0; t < kRows; ++t)
      positions.push_back(t % 500), sequence.push_back(t % 100 == 99 ? -1 : t < 500 ? 0 : 1);
    for (int i = 0; i < 2 * kMaxPages; ++i) page_table.push_back((7 * i + 3) % (2 * kMaxPages));
    const DeviceArray<float> device_freq(freq);
    const DeviceArray<int64_t> device_positions(positions);
    const DeviceArray<int32_t> device_sequence(sequence), device_table(page_table);
    const std::vector<uint8_t> empty(static_cast<size_t>(2 * kMaxPages * kKeys * kPageSize * head_dim) * 4,
                                     0x11);
    const DeviceArray<uint8_t> k(empty), v(empty);
    for (int64_t first = 0; first < kRows; first += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, kRows - first);
      const DeviceBatch batch{.num_rows = rows,
                              .num_sequences = 2,
                              .max_pages = kMaxPages,
                              .positions = device_positions.data() + first,
                              .row_sequence = device_sequence.data() + first,
                              .page_table = device_table.data()};
      float* const at = x.data() + first * stride;
      const RopeArgs q{at,     batch.positions, device_freq.data(), 1.25f,   rows,
                       stride, kQueries,        head_dim,           head_dim};
      RopeArgs key = q;
      key.x = at + kQueries * head_dim, key.num_heads = kKeys;
      const KvPages k_pages{
          k.data(), dtype, kKeys, kPageSize, head_dim, 0, dtype == DType::kF8E4M3 ? 0.02f : 1};
      KvPages v_pages = k_pages;
      v_pages.data = v.data();
      cuda::rope_kv({q, key, {key.x, key.x + kKeys * head_dim, stride, k_pages, v_pages, {}, &batch}}, pool_);
      ops_.rope(q, pool_);
    }
    wait();
    return {x.values(), k.values(), v.values()};
  }
};

TEST_F(ManyRowsCuda, SameBits) {
  for (const int head_dim : {16, 64, 128, 256})
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF8E4M3})
      EXPECT_TRUE(turn(head_dim, dtype, 611) == turn(head_dim, dtype, 100))
          << head_dim << " elements per head, pages of " << dtype_name(dtype);
}

// MLA's rows before attention: keys of a latent and a rotary part, queries of a part that stays and a rotary
// part. The last row is padding and is not stored.
struct LatentCase {
  static constexpr int kPageSize = 4, kPages = 6, kMaxPages = 16, kMostStored = 20;
  int latent, rotary, heads, nope;
  int64_t tokens;
  DType dtype;
  bool has_copy;  // the rotated queries go elsewhere
  std::vector<float> keys, queries, weight, inv_freq;
  std::vector<int64_t> positions;
  std::vector<int32_t> sequence, page_table;
  std::vector<uint8_t> pages;

  int64_t key() const { return latent + rotary; }
  int64_t query() const { return nope + rotary; }
  int64_t stored() const { return std::min<int64_t>(kMostStored, tokens - 1); }
  int64_t element_bytes() const { return dtype == DType::kBF16 ? 2 : 1; }
  std::vector<float> empty_copy() const { return filled(tokens * heads * key(), 7); }

  void draw() {
    Random random(11);
    keys = random.normal(tokens * key()), queries = random.normal(tokens * heads * query());
    weight = random.normal(latent);
    for (int i = 0; i < rotary / 2; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / rotary));
    for (int64_t i = 0; i < tokens; ++i)
      positions.push_back(i % kMostStored), sequence.push_back(i < stored() ? 0 : -1);
    page_table.assign(kMaxPages, 0);
    for (int i = 0; i * kPageSize < kMostStored; ++i)
      page_table[static_cast<size_t>(i)] = (5 * i + 1) % kPages;
    pages.assign(static_cast<size_t>(kPages * kPageSize * key() * element_bytes()), 0x11);
  }
  // Where one side, the GPU or the oracle, has the data.
  struct Data {
    float *keys, *queries, *copy;
    const float *weight, *inv_freq;
    const int64_t* positions;
    void* pages;
  };
  LatentRopeArgs args(const Data& at) const {
    const RopeArgs q{
        at.queries + nope,         at.positions, at.inv_freq, 1.25f, tokens, heads * query(), heads,
        static_cast<int>(query()), rotary};
    const RopeArgs k{at.keys + latent, at.positions, at.inv_freq, 1.25f, tokens, key(), 1, rotary, rotary};
    const KvPages key_pages{
        at.pages, dtype, 1, kPageSize, static_cast<int>(key()), 0, dtype == DType::kBF16 ? 1 : 0.05f};
    LatentRopeArgs a{.q = q,
                     .latents = {at.keys, at.weight, 1e-6f, tokens, key(), 1, latent},
                     .k = k,
                     .kv = {at.keys, nullptr, key(), key_pages, {}, {}, nullptr}};
    if (has_copy) a.q_out = at.copy + latent, a.q_out_stride = heads * key(), a.q_out_head_stride = key();
    return a;
  }
  std::vector<float> widen(const std::vector<uint8_t>& bytes) const {
    std::vector<float> values;
    for (size_t i = 0; i < bytes.size(); i += static_cast<size_t>(element_bytes()))
      values.push_back(dtype == DType::kBF16
                           ? bf16_to_float(bf16{static_cast<uint16_t>(bytes[i] | bytes[i + 1] << 8)})
                           : e4m3_decode(bytes[i]));
    return values;
  }
};

// One launch for the norm of latents, rope and pages, against the oracle.
class LatentRopeCuda : public DenseOpsCuda {
 protected:
  void compare(const LatentCase& c) {
    SCOPED_TRACE(testing::Message() << c.latent << " + " << c.rotary << " columns, " << c.heads << " heads, "
                                    << c.tokens << " rows, copy " << c.has_copy);
    std::vector<float> k = c.keys, q = c.queries, copy = c.empty_copy();
    std::vector<uint8_t> pages = c.pages;
    LatentRopeArgs host = c.args({k.data(), q.data(), copy.data(), c.weight.data(), c.inv_freq.data(),
                                  c.positions.data(), pages.data()});
    const SequenceRows sequences[] = {{0, c.stored(), 0, c.page_table}};
    host.kv.sequences = sequences;
    ref_.latent_rope(host, pool_);

    const DeviceArray<float> device_k(c.keys), device_q(c.queries), device_copy(c.empty_copy()),
        freq(c.inv_freq), weight(c.weight);
    const DeviceArray<int64_t> positions(c.positions);
    const DeviceArray<int32_t> sequence(c.sequence), page_table(c.page_table);
    const DeviceArray<uint8_t> device_pages(c.pages);
    const DeviceBatch batch{.num_rows = c.tokens,
                            .num_sequences = 1,
                            .max_pages = LatentCase::kMaxPages,
                            .positions = positions.data(),
                            .row_sequence = sequence.data(),
                            .page_table = page_table.data()};
    LatentRopeArgs device = c.args({device_k.data(), device_q.data(), device_copy.data(), weight.data(),
                                    freq.data(), positions.data(), device_pages.data()});
    device.kv.device_batch = &batch;
    ops_.latent_rope(device, pool_);
    wait();

    const std::vector<float> expected = c.widen(pages), rotated = c.has_copy ? copy : q;
    std::vector<float> budget;
    for (const float v : expected)  // the next bf16 or code
      budget.push_back(c.dtype == DType::kBF16 ? std::fabs(v) / 128 + 1e-6f : std::fabs(v) / 8 + 0x1p-9f);
    EXPECT_TRUE(within_budget(c.widen(device_pages.values()), expected, budget));
    EXPECT_TRUE(within_budget(c.has_copy ? device_copy.values() : device_q.values(), rotated,
                              std::vector<float>(rotated.size(), 2e-5f)));
  }
};

TEST_F(LatentRopeCuda, TurnsAndStores) {
  for (const auto& [latent, rotary, heads, nope, tokens] : {std::tuple{512, 64, 128, 128, 3},
                                                            {512, 64, 130, 128, 300},
                                                            {512, 64, 1, 128, 40},
                                                            {24, 8, 3, 12, 1},
                                                            {40, 96, 5, 0, 7}})
    for (const DType dtype : {DType::kBF16, DType::kF8E4M3})
      for (const bool has_copy : {false, true}) {
        LatentCase c{.latent = latent,
                     .rotary = rotary,
                     .heads = heads,
                     .nope = nope,
                     .tokens = tokens,
                     .dtype = dtype,
                     .has_copy = has_copy};
        c.draw();
        compare(c);
      }
}

}  // namespace
}  // namespace fp4moe
