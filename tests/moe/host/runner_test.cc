// Forces every runner row x format x numerics x batch layout and compares it with an oracle of plain loops.
#include <gtest/gtest.h>

#include <ranges>

#include <tuple>

#include "kernels/act_quant.h"
#include "moe/layer_case.h"
#include "moe/moe_oracle.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

constexpr auto kScalar = ActScaleChoice::kScalar, kPerExpert = ActScaleChoice::kPerExpert,
               kPerToken = ActScaleChoice::kPerToken;
constexpr auto kDirect = IntermediateRounding::kDirect, kBf16First = IntermediateRounding::kBf16First;

struct NamedNumerics {
  const char* name;
  Numerics numerics;
};
constexpr NamedNumerics kNumerics[] = {
    {"w4a16", {}},
    {"w4a8", {Scheme::kW4A8}},
    {"w4a8_fp8", {.scheme = Scheme::kW4A8, .act8 = Act8::kFp8Token}},
    {"w4a4_direct", {Scheme::kW4A4, kScalar, kScalar, kDirect}},
    {"w4a4_bf16_first", {Scheme::kW4A4, kScalar, kScalar, kBf16First}},
    {"w4a4_masked", {Scheme::kW4A4, kScalar, kPerExpert, kBf16First}},
    {"w4a4_per_expert", {Scheme::kW4A4, kPerExpert, kPerExpert, kDirect}},
    {"w4a4_per_token", {Scheme::kW4A4, kPerToken, kPerToken, kDirect}},
};

// Tokens with their experts. Some ids are not experts, and a token can name an expert twice.
struct Routed {
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed routed_tokens(ExpertsCase& c, int64_t tokens) {
  Routed r{c.tokens(tokens), {}, {}};
  for (int64_t slot = 0; slot < tokens * c.problem.top_k; ++slot) {
    r.ids.push_back(static_cast<int32_t>(c.random.integer(-1, c.problem.num_experts)));
    r.weights.push_back(0.1f * static_cast<float>(c.random.integer(1, 9)));
  }
  return r;
}

// A batch in either layout with its memory; elements that must not be read are NaN.
class OwnedBatch {
 public:
  OwnedBatch(const MoeProblem& p, const Routed& r, BatchLayout layout) {
    const auto slots = static_cast<int64_t>(r.ids.size());
    const Shard local = p.local_experts();
    offsets_.resize(static_cast<size_t>(local.count + 1));
    slot_of_row_.resize(r.ids.size());
    row_of_slot_.resize(r.ids.size());
    moe_sort({r.ids.data(), slots, local.first, local.count, offsets_.data(), slot_of_row_.data(),
              row_of_slot_.data()});
    const bool packed = layout == BatchLayout::kPacked;
    int64_t capacity = 3;
    for (int64_t e = 0; e < local.count; ++e) {
      counts_.push_back(offsets_[static_cast<size_t>(e) + 1] - offsets_[static_cast<size_t>(e)]);
      capacity = std::max(capacity, counts_.back() + 1);
    }
    const int64_t rows = packed ? offsets_.back() : local.count * capacity, h = p.hidden_size;
    std::vector<float> x(static_cast<size_t>(rows * h), NAN);
    for (int64_t e = 0, from = 0; e < local.count; ++e)
      for (int64_t i = 0; i < counts_[static_cast<size_t>(e)]; ++i, ++from) {
        const int64_t slot = slot_of_row_[static_cast<size_t>(from)], row = packed ? from : e * capacity + i;
        slots_.push_back({slot, row});
        std::copy_n(r.x.begin() + slot / p.top_k * h, h, x.begin() + row * h);
      }
    x_ = std::make_unique<ActBuffer>(p.act_dtype, rows, h, x);
    y_.assign(x.size(), -1.0f);
    batch = {.layout = layout,
             .num_experts = local.count,
             .offsets = packed ? offsets_.data() : nullptr,
             .counts = packed ? nullptr : counts_.data(),
             .capacity = packed ? 0 : capacity,
             .x = x_->view(),
             .slot_of_row = slot_of_row_.data(),
             .row_of_slot = row_of_slot_.data(),
             .y = y_.data()};
  }

  // Returns y of every slot [T * K, H]; zeros if the slot's expert is not local.
  std::vector<float> slot_rows(int64_t hidden) const {
    std::vector<float> out(row_of_slot_.size() * static_cast<size_t>(hidden));
    for (const auto& [slot, row] : slots_)
      std::copy_n(y_.begin() + row * hidden, hidden, out.begin() + slot * hidden);
    return out;
  }
  // Returns whether rows without a token are unchanged.
  bool padding_untouched(int64_t hidden) const {
    std::vector<bool> used(y_.size() / static_cast<size_t>(hidden));
    for (const auto& [slot, row] : slots_) used[static_cast<size_t>(row)] = true;
    for (size_t i = 0; i < y_.size(); ++i)
      if (!used[i / static_cast<size_t>(hidden)] && y_[i] != -1.0f) return false;
    return true;
  }

  ExpertBatch batch;

 private:
  std::vector<int64_t> offsets_, counts_;
  std::vector<int32_t> slot_of_row_, row_of_slot_;
  std::vector<std::pair<int64_t, int64_t>> slots_;  // slot, row
  std::unique_ptr<ActBuffer> x_;
  std::vector<float> y_;
};

PackedExperts pack(const RunnerRow& row, const MoeProblem& p, const Numerics& n, const MoeWeightsView& w,
                   ThreadPool& pool) {
  auto packed = row.pack(row, p, n, w, pool);
  EXPECT_TRUE(packed.ok()) << packed.status().to_string();
  return std::move(*packed);
}

void run(const RunnerRow& row, const MoeProblem& p, const PackedExperts& experts, const ExpertBatch& batch,
         ThreadPool& pool) {
  const int64_t bytes = row.scratch_bytes(p, experts.numerics, batch.x.rows);
  Arena scratch = std::move(*Arena::make(bytes));
  row.run(row, {p, experts, batch}, scratch, pool);
  EXPECT_LE(scratch.used_bytes(), bytes);
}

// Returns y of every slot [T * K, H].
std::vector<float> run_slots(const RunnerRow& row, const Numerics& n, const ExpertsCase& c, const Routed& r,
                             BatchLayout layout = BatchLayout::kPacked, int threads = 2) {
  const MoeProblem& p = c.problem;
  ThreadPool pool(threads);
  OwnedBatch owned(p, r, layout);
  run(row, p, pack(row, p, n, c.weights, pool), owned.batch, pool);
  EXPECT_TRUE(owned.padding_untouched(p.hidden_size));
  return owned.slot_rows(p.hidden_size);
}

std::vector<float> combine(const MoeProblem& p, const Routed& r, const std::vector<float>& slots) {
  std::vector<float> out(r.x.size());
  const auto h = static_cast<size_t>(p.hidden_size), k = static_cast<size_t>(p.top_k);
  for (size_t s = 0; s < r.ids.size(); ++s)
    for (size_t i = 0; i < h; ++i) out[s / k * h + i] += r.weights[s] * slots[s * h + i];
  return out;
}

std::vector<float> to_floats(const std::vector<double>& v) { return {v.begin(), v.end()}; }

OracleLayer oracle_of(const ExpertsCase& c, const Numerics& n, DType dtype) {
  return {&c.weights, c.problem.activation, n, dtype};
}

std::vector<float> oracle(const OracleLayer& layer, const Routed& r) {
  return to_floats(oracle_moe(layer, r.x, r.ids, r.weights));
}

bool runs(const RunnerRow& row, const Numerics& n) {
  return row.schemes.has(n.scheme) && (n.scheme != Scheme::kW4A8 || row.act8 == n.act8);
}

class RunnerTest : public testing::TestWithParam<std::tuple<const RunnerRow*, Fp4Format, NamedNumerics>> {
 protected:
  const RunnerRow& row() const { return *std::get<0>(GetParam()); }
  Fp4Format format() const { return std::get<1>(GetParam()); }
  const Numerics& numerics() const { return std::get<2>(GetParam()).numerics; }
  bool scheme_is(Scheme s) const { return numerics().scheme == s; }
  void SetUp() override {
    if (!isa_available(row().isa)) GTEST_SKIP() << "this CPU does not run " << row().name;
    ASSERT_TRUE(runs(row(), numerics()));
  }
  ExpertsCase small_case() const { return {{64, 96, 5, 2}, format(), ActivationKind::kSwigluOai}; }
};

// device_layer_test.cc tests the GPU rows.
auto cpu_rows() {
  return runner_rows() |
         std::views::filter([](const RunnerRow& row) { return row.device == DeviceKind::kCpu; });
}

std::vector<std::tuple<const RunnerRow*, Fp4Format, NamedNumerics>> all_params() {
  std::vector<std::tuple<const RunnerRow*, Fp4Format, NamedNumerics>> params;
  for (const RunnerRow& row : cpu_rows())
    for (Fp4Format format : kExpertFormats)
      for (const NamedNumerics& n : kNumerics)
        if (row.formats.has(format) && runs(row, n.numerics) &&
            (format == Fp4Format::kNvfp4 || n.numerics.scheme != Scheme::kW4A4))
          params.push_back({&row, format, n});
  return params;
}

INSTANTIATE_TEST_SUITE_P(Table, RunnerTest, testing::ValuesIn(all_params()), [](const auto& made) {
  return std::string(std::get<0>(made.param)->name) + "_" + fp4_format_name(std::get<1>(made.param)) + "_" +
         std::get<2>(made.param).name;
});

// Sums differ from the oracle's in the last bits of f32, which occasionally changes a rounding or a code.
TEST_P(RunnerTest, AgreesWithTheOracle) {
  for (const LayerSize& size : {LayerSize{32, 32, 1, 1}, {96, 64, 5, 2}, {64, 160, 8, 4}})
    for (ActivationKind kind : {ActivationKind::kSwigluOai, ActivationKind::kSilu, ActivationKind::kRelu2})
      for (BatchLayout layout : {BatchLayout::kPacked, BatchLayout::kMasked})
        for (DType dtype : {DType::kBF16, DType::kF32}) {
          if (!row().act_dtypes.has(dtype) || !row().layouts.has(layout)) continue;
          ExpertsCase c(size, format(), kind);
          c.problem.act_dtype = dtype;
          const Routed r = routed_tokens(c, 11);
          const std::vector<float> y = combine(c.problem, r, run_slots(row(), numerics(), c, r, layout));
          EXPECT_TRUE(within_relative_l2(y, oracle(oracle_of(c, numerics(), dtype), r), 1e-3))
              << "H=" << size.hidden << " activation " << int(kind) << " layout " << int(layout) << " "
              << dtype_name(dtype);
        }
}

TEST_P(RunnerTest, MaskedBatchesGiveTheBitsOfPackedOnes) {
  ExpertsCase c = small_case();
  const Routed r = routed_tokens(c, 23);
  EXPECT_EQ(run_slots(row(), numerics(), c, r, BatchLayout::kMasked),
            run_slots(row(), numerics(), c, r, BatchLayout::kPacked));
}

TEST_P(RunnerTest, SameBitsAloneInABatchAndOnAnyNumberOfThreads) {
  ExpertsCase c = small_case();
  const Routed r = routed_tokens(c, 19);
  const std::vector<float> batch = run_slots(row(), numerics(), c, r, BatchLayout::kPacked, 1);
  EXPECT_EQ(run_slots(row(), numerics(), c, r, BatchLayout::kPacked, 5), batch);
  for (int64_t t = 0; t < 19; t += 6) {
    const Routed alone = {{r.x.begin() + t * 64, r.x.begin() + (t + 1) * 64},
                          {r.ids.begin() + 2 * t, r.ids.begin() + 2 * t + 2},
                          {0, 0}};
    EXPECT_EQ(run_slots(row(), numerics(), c, alone),
              std::vector<float>(batch.begin() + 2 * t * 64, batch.begin() + (2 * t + 2) * 64));
  }
}

TEST_P(RunnerTest, NoRows) {
  ExpertsCase c = small_case();
  EXPECT_TRUE(run_slots(row(), numerics(), c, {}).empty());
  const Routed nobodys = {c.tokens(2), {-1, 5, 99, -7}, {1, 1, 1, 1}};
  EXPECT_EQ(run_slots(row(), numerics(), c, nobodys, BatchLayout::kMasked), std::vector<float>(4 * 64, 0.0f));
}

// Whole experts give the same bits on any rank. Scalar scales are computed over all E experts on every rank.
TEST_P(RunnerTest, ExpertShardsGiveTheBitsOfTheWhole) {
  ExpertsCase c({64, 64, 6, 2}, format(), ActivationKind::kSilu);
  const Routed r = routed_tokens(c, 17);
  const std::vector<float> whole = run_slots(row(), numerics(), c, r);
  std::vector<float> gathered(whole.size());
  for (int rank = 0; rank < 3; ++rank) {
    c.problem.layout = {3, 3, 1, rank};
    const std::vector<float> part = run_slots(row(), numerics(), c, r);
    for (size_t i = 0; i < part.size(); ++i) gathered[i] += part[i];
  }
  EXPECT_EQ(gathered, whole);
}

// I = 7 blocks over 4 ranks: 2, 2, 2, 1. The down bias counts once. A per-token scale of the intermediate is
// computed over the shard's columns, so each shard is also compared as a separate expert.
TEST_P(RunnerTest, TensorShardsAddUpToTheWhole) {
  const int64_t block = fp4_block(format());
  ExpertsCase c({64, 7 * block, 4, 2}, format(), ActivationKind::kSwigluOai);
  const Routed r = routed_tokens(c, 9);
  std::vector<float> sum(r.x.size());
  std::vector<float> expected(r.x.size());
  for (int rank = 0; rank < 4; ++rank) {
    c.problem.layout = {4, 1, 1, rank};
    const std::vector<float> part = combine(c.problem, r, run_slots(row(), numerics(), c, r));
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];

    const Shard shard = c.problem.local_intermediate();
    EXPECT_EQ(shard.count, rank == 3 ? block : 2 * block);
    MoeWeightsView mine = c.weights;
    for (ExpertWeightsView& w : mine.experts) {
      w.gate = row_slice(w.gate, shard.first, shard.count);
      w.up = row_slice(w.up, shard.first, shard.count);
      w.down = column_slice(w.down, shard.first, shard.count);
      w.gate_bias += 2 * shard.first;
      w.up_bias += 2 * shard.first;
      if (rank != 0) w.down_bias = nullptr;
    }
    OracleLayer layer = oracle_of(c, numerics(), DType::kBF16);
    layer.weights = &mine;
    const std::vector<float> own = oracle(layer, r);
    EXPECT_TRUE(within_relative_l2(part, own, 3e-3)) << "rank " << rank;
    for (size_t i = 0; i < own.size(); ++i) expected[i] += own[i];
  }
  EXPECT_TRUE(within_relative_l2(sum, expected, 3e-3));
  if (numerics().a2 != kPerToken && !numerics().is_fp8()) {
    EXPECT_TRUE(within_relative_l2(sum, oracle(oracle_of(c, numerics(), DType::kBF16), r), 3e-3));
  }
}

// Rows that arrive as NVFP4 are not quantised again: they give the same bits as rows quantised locally.
TEST_P(RunnerTest, RowsThatAreNvfp4AlreadyGiveTheSameBits) {
  if (!scheme_is(Scheme::kW4A4) || numerics().a1 == kPerExpert)
    GTEST_SKIP() << "no transport quantises rows for these numerics";
  ExpertsCase c = small_case();
  const Routed r = routed_tokens(c, 13);
  ThreadPool pool(2);
  const PackedExperts experts = pack(row(), c.problem, numerics(), c.weights, pool);
  OwnedBatch owned(c.problem, r, BatchLayout::kPacked);
  const EncodeScale a1 = experts.scales.front().a1;
  std::vector<float> row_scales(static_cast<size_t>(owned.batch.x.rows), to_decode(a1).value);
  quantize_act(
      {.kind = numerics().a1 == kPerToken ? ActQuantKind::kNvfp4PerToken : ActQuantKind::kNvfp4Static,
       .x = owned.batch.x,
       .scale = a1,
       .out = owned.batch.x,
       .row_scales = numerics().a1 == kPerToken ? row_scales.data() : nullptr});
  owned.batch.x_is_nvfp4 = true;
  owned.batch.x_row_scales = row_scales.data();
  run(row(), c.problem, experts, owned.batch, pool);
  EXPECT_EQ(owned.slot_rows(64), run_slots(row(), numerics(), c, r));
}

// In schemes other than w4a4, a row of NVFP4 values stands for its product with the row's scale.
TEST_P(RunnerTest, RowScalesMultiplyThrough) {
  if (scheme_is(Scheme::kW4A4)) GTEST_SKIP() << "w4a4 uses row scales differently";
  ExpertsCase c = small_case();
  Routed r = routed_tokens(c, 13);
  ThreadPool pool(2);
  OwnedBatch owned(c.problem, r, BatchLayout::kPacked);
  for (float& v : r.x) v *= 0.25f;  // exact
  std::vector<float> row_scales(static_cast<size_t>(owned.batch.x.rows), 0.25f);
  owned.batch.x_is_nvfp4 = true;
  owned.batch.x_row_scales = row_scales.data();
  run(row(), c.problem, pack(row(), c.problem, numerics(), c.weights, pool), owned.batch, pool);
  EXPECT_TRUE(within_relative_l2(combine(c.problem, r, owned.slot_rows(64)),
                                 oracle(oracle_of(c, numerics(), DType::kBF16), r), 3e-3));
}

// ---- errors that must be detected -----------------------------------------------------------------

TEST_P(RunnerTest, WrongOrderOfGateAndUpFails) {
  ExpertsCase c = small_case();
  const Routed r = routed_tokens(c, 8);
  const std::vector<float> expected = oracle(oracle_of(c, numerics(), DType::kBF16), r);
  for (ExpertWeightsView& w : c.weights.experts) {
    std::swap(w.gate, w.up);
    std::swap(w.gate_bias, w.up_bias);
  }
  for (Bf16ExpertView& w : c.weights.bf16_experts) {
    std::swap(w.gate, w.up);
    std::swap(w.gate_bias, w.up_bias);
  }
  const std::vector<float> y = combine(c.problem, r, run_slots(row(), numerics(), c, r));
  EXPECT_GT(relative_l2(y, expected), 0.1);
}

TEST_P(RunnerTest, MissingActivationQuantisationFails) {
  if (scheme_is(Scheme::kW4A16)) GTEST_SKIP() << "activations are not quantised";
  ExpertsCase c = small_case();
  const Routed r = routed_tokens(c, 8);
  const std::vector<float> y = combine(c.problem, r, run_slots(row(), numerics(), c, r));
  OracleLayer layer = oracle_of(c, numerics(), DType::kBF16);
  layer.skip_input_quantisation = true;
  EXPECT_GT(relative_l2(y, oracle(layer, r)), 3e-3);
  layer = oracle_of(c, numerics(), DType::kBF16);
  layer.skip_intermediate_quantisation = true;
  EXPECT_GT(relative_l2(y, oracle(layer, r)), 3e-3);
}

TEST_P(RunnerTest, WrongScaleDirectionFails) {
  if (format() != Fp4Format::kNvfp4) GTEST_SKIP() << "no tensor scales";
  ExpertsCase c = small_case();
  const Routed r = routed_tokens(c, 8);
  const std::vector<float> expected = oracle(oracle_of(c, numerics(), DType::kBF16), r);
  const bool has_input_scales = scheme_is(Scheme::kW4A4) && numerics().a1 != kPerToken;
  for (ExpertWeightsView& w : c.weights.experts) {
    if (has_input_scales) {
      for (float* s : {&w.gate_input_scale, &w.up_input_scale, &w.down_input_scale}) *s = 1 / *s;
    } else {
      w.down.tensor_scale = 1 / w.down.tensor_scale;
    }
  }
  const std::vector<float> y = combine(c.problem, r, run_slots(row(), numerics(), c, r));
  EXPECT_GT(relative_l2(y, expected), 0.1);
}

// The aliases' numerics round differently, so each gives a different result.
TEST(RunnerNumericsTest, EveryNumericsIsItsOwn) {
  ExpertsCase c({64, 96, 5, 2}, Fp4Format::kNvfp4, ActivationKind::kSwigluOai);
  const Routed r = routed_tokens(c, 64);
  std::vector<std::vector<float>> outputs;
  for (const NamedNumerics& n : kNumerics)
    outputs.push_back(run_slots(oracle_row(n.numerics), n.numerics, c, r));
  for (size_t i = 0; i < outputs.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      EXPECT_NE(outputs[i], outputs[j]) << kNumerics[i].name << " and " << kNumerics[j].name;
}

// ---- shapes from peers' tests ---------------------------------------------------------------------

const RunnerRow& best_row(const Numerics& n) {
  for (const RunnerRow& row : cpu_rows())
    if (isa_available(row.isa) && runs(row, n)) return row;
  return oracle_row(n);
}

struct PeerShape {
  int64_t tokens;
  LayerSize size;
  Fp4Format format;
  ActivationKind kind;
};

// SGLang's cutedsl cases (packed, masked) and FlashInfer's SM90 and alignment cases, within 3e-3 instead of
// their tens of percent.
TEST(RunnerPeerShapesTest, AgreeWithTheOracleRow) {
  constexpr auto kMx = Fp4Format::kMxfp4, kNv = Fp4Format::kNvfp4;
  constexpr auto kSilu = ActivationKind::kSilu, kOai = ActivationKind::kSwigluOai,
                 kRelu2 = ActivationKind::kRelu2;
  const PeerShape shapes[] = {
      {128, {256, 512, 256, 2}, kNv, kSilu}, {128, {256, 512, 64, 8}, kNv, kRelu2},
      {2, {128, 256, 8, 1}, kNv, kSilu},     {2, {128, 256, 8, 4}, kNv, kSilu},
      {16, {128, 512, 8, 2}, kNv, kSilu},    {16, {128, 512, 8, 4}, kNv, kRelu2},
      {1, {128, 128, 2, 2}, kMx, kSilu},     {4, {128, 128, 4, 2}, kMx, kOai},
      {4, {768, 512, 8, 2}, kMx, kSilu},     {4, {2048, 1024, 8, 4}, kMx, kOai},
      {8, {192, 192, 4, 2}, kMx, kOai},      {4, {160, 128, 4, 2}, kNv, kSilu},
      {4, {288, 128, 4, 2}, kNv, kSilu},     {4, {2880, 2880, 2, 2}, kMx, kOai},
  };
  for (const PeerShape& shape : shapes)
    for (const NamedNumerics& n : kNumerics) {
      if (shape.format == kMx && n.numerics.scheme == Scheme::kW4A4) continue;
      if (n.numerics.is_fp8()) continue;  // only the oracle row supports FP8
      if (shape.size.num_experts > 8 && n.numerics != kNumerics[3].numerics) continue;  // w4a4_direct only
      ExpertsCase c(shape.size, shape.format, shape.kind);
      const Routed r = routed_tokens(c, shape.tokens);
      const BatchLayout layout = n.numerics.a2 == kPerExpert ? BatchLayout::kMasked : BatchLayout::kPacked;
      EXPECT_TRUE(within_relative_l2(run_slots(best_row(n.numerics), n.numerics, c, r, layout),
                                     run_slots(oracle_row(n.numerics), n.numerics, c, r, layout), 3e-3))
          << n.name << " H=" << shape.size.hidden << " I=" << shape.size.intermediate
          << " E=" << shape.size.num_experts;
    }
}

// ---- many rows, many times ------------------------------------------------------------------------

TEST(RunnerScaleTest, ThousandsOfRowsPerExpert) {
  for (const NamedNumerics& n : kNumerics) {
    ExpertsCase c({32, 32, 3, 1}, Fp4Format::kNvfp4, ActivationKind::kSilu);
    Routed r = routed_tokens(c, 8192 + 77);
    std::fill(r.ids.begin(), r.ids.end() - 100, 1);  // one expert gets nearly all rows
    const std::vector<float> y = run_slots(best_row(n.numerics), n.numerics, c, r);
    const std::vector<float> ref = run_slots(oracle_row(n.numerics), n.numerics, c, r);
    EXPECT_TRUE(within_relative_l2(y, ref, 3e-3)) << n.name;
  }
}

TEST(RunnerScaleTest, ThousandRepeatsGiveTheSameBits) {
  ThreadPool pool(3);
  for (const NamedNumerics& n : kNumerics) {
    ExpertsCase c({64, 96, 5, 2}, Fp4Format::kNvfp4, ActivationKind::kSwigluOai);
    const Routed r = routed_tokens(c, 9);
    const PackedExperts experts = pack(best_row(n.numerics), c.problem, n.numerics, c.weights, pool);
    OwnedBatch owned(c.problem, r, BatchLayout::kPacked);
    run(best_row(n.numerics), c.problem, experts, owned.batch, pool);
    const std::vector<float> first = owned.slot_rows(64);
    for (int i = 0; i < 1000; ++i) {
      std::fill_n(owned.batch.y, owned.batch.x.rows * 64, NAN);
      run(best_row(n.numerics), c.problem, experts, owned.batch, pool);
      ASSERT_EQ(owned.slot_rows(64), first) << n.name << " run " << i;
    }
  }
}

}  // namespace
}  // namespace fp4moe
