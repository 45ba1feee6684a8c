// Compares w4a8 on the GPU with double sums over the same FP8 tokens and folded weights (tight bounds), and
// the whole layer with unquantised activations (bounds the error of FP8 tokens).
#include <algorithm>
#include <cmath>
#include <ostream>

#include "device/graph.h"
#include "formats/e4m3.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/host_tiles.h"
#include "kernels/cuda/moe_device_case.h"
#include "kernels/device_act_quant.h"
#include "kernels/device_moe_fp8.h"
#include "kernels/expert_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Case {
  Fp4Format format;
  ActivationKind activation;
  int64_t tokens, topk, experts, hidden, intermediate;
  Spread spread = Spread::kEven;
  bool bias = true;
  int64_t masked_capacity = 0;  // if above 0, tokens and topk are not used
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << fp4_format_name(c.format) << " activation " << static_cast<int>(c.activation) << " T "
             << c.tokens << " topk " << c.topk << " L " << c.experts << " H " << c.hidden << " I "
             << c.intermediate << " spread " << static_cast<int>(c.spread) << " capacity "
             << c.masked_capacity;
}

// One expert's matrices.
struct Expert {
  Fp4Matrix gate, up, down;
};

double activated(const Activation& a, double gate, double up) {
  if (a.kind == ActivationKind::kRelu2) return up > 0 ? up * up : 0 * up;
  if (a.kind == ActivationKind::kSilu) return gate / (1 + std::exp(-gate)) * up;
  const double g = gate > a.limit ? a.limit : gate, u = up > a.limit    ? a.limit
                                                        : up < -a.limit ? -a.limit
                                                                        : up;
  return g / (1 + std::exp(-a.alpha * g)) * (u + a.beta);
}

// A case on the host and on the device, with the workspace of one layer.
class Layer {
 public:
  explicit Layer(const Case& c)
      : c_(c),
        random_(static_cast<uint64_t>(c.tokens * 31 + c.hidden)),
        sorted_(std::max<int64_t>(c.tokens, 1), c.topk, c.experts, c.spread, random_),
        gated_(is_gated(c.activation)),
        gate_up_bytes_(fp8_tiled_bytes(c.format, (gated_ ? 2 : 1) * c.intermediate, c.hidden)),
        down_bytes_(fp8_tiled_bytes(c.format, c.hidden, c.intermediate)) {
    pack();
    if (c.masked_capacity > 0) {
      for (int64_t e = 0; e < c.experts; ++e)
        counts_.push_back(static_cast<int32_t>(e == 1 ? 0 : random_.integer(1, c.masked_capacity)));
      device_.counts.emplace(counts_);
    }
    x_ = to_bf16(random_.normal(x_rows() * c.hidden));
    allocate();
  }

  int64_t rows() const {
    return c_.masked_capacity > 0 ? c_.experts * c_.masked_capacity
                                  : (c_.tokens == 0 ? 0 : sorted_.max_rows());
  }
  int64_t x_rows() const { return c_.masked_capacity > 0 ? rows() : c_.tokens; }
  // Row r of the batch: its expert (-1: none), its row in x, and its row in the slabs.
  struct Row {
    int64_t expert = -1, source = 0, slab = 0;
  };
  Row row(int64_t r) const {
    if (c_.masked_capacity > 0) {
      const int64_t e = r / c_.masked_capacity, i = r % c_.masked_capacity;
      if (i >= counts_[static_cast<size_t>(e)]) return {};
      return {e, r, slab_first_row(e, 0, c_.masked_capacity) + i};
    }
    if (r >= sorted_.offsets.back()) return {};
    const int64_t e = sorted_.expert_of(r), start = sorted_.offsets[static_cast<size_t>(e)];
    return {e, sorted_.slot_of_row[static_cast<size_t>(r)] / c_.topk,
            slab_first_row(e, start, 0) + r - start};
  }

  void run() const {
    cuda_quantize_act(quant(x_view(), device_.x_slabs, device_.x_scales, c_.masked_capacity == 0));
    const DeviceExpertArgs a = args();
    sm90_fp8_gate_up(a);
    cuda_quantize_act(quant(a.intermediate, device_.h_slabs, device_.h_scales, false));
    sm90_fp8_down(a);
  }
  void set_x(int64_t token, int64_t col, float v) {
    x_[static_cast<size_t>(token * c_.hidden + col)] = float_to_bf16(v);
    allocate();
  }

  std::vector<float> intermediate() const { return to_float(device_.intermediate->values()); }
  std::vector<float> y() const { return to_float(device_.y->values()); }
  // Decodes slab row `row`.
  static std::vector<double> slab_row(const DeviceArray<uint8_t>& slabs, const DeviceArray<float>& scales,
                                      int64_t slab_rows, int64_t row, int64_t cols) {
    const std::vector<uint8_t> bytes = slabs.values();
    const float scale = scales.values()[static_cast<size_t>(row)];
    std::vector<double> values;
    for (int64_t k = 0; k < cols; ++k)
      values.push_back(
          static_cast<double>(e4m3_decode(bytes[static_cast<size_t>(fp8_slab_offset(slab_rows, row, k))])) *
          scale);
    return values;
  }
  std::vector<double> x_of(int64_t slab) const {
    return slab_row(*device_.x_slabs, *device_.x_scales, slab_rows(), slab, c_.hidden);
  }
  std::vector<double> h_of(int64_t slab) const {
    return slab_row(*device_.h_slabs, *device_.h_scales, slab_rows(), slab, c_.intermediate);
  }
  double exact_x(int64_t row, int64_t k) const {
    return bf16_to_float(x_[static_cast<size_t>(row * c_.hidden + k)]);
  }

  // Sums over the folded weights in the tiles if `folded`, otherwise over the checkpoint's weights.
  std::vector<double> gate_up(int64_t e, const std::vector<double>& x, bool folded) const;
  std::vector<double> down(int64_t e, const std::vector<double>& h, bool folded) const;

 private:
  void pack();
  void allocate();
  int64_t slab_rows() const { return num_slab_rows(rows(), c_.masked_capacity, c_.experts); }
  ActRows x_view() const { return {device_.x->data(), DType::kBF16, x_rows(), c_.hidden}; }
  DeviceRows device_rows() const {
    DeviceRows rows = sorted_.device_rows();
    rows.max_rows = this->rows();
    if (c_.masked_capacity > 0) {
      rows = {};
      rows.max_rows = this->rows();
      rows.capacity = c_.masked_capacity;
      rows.counts = device_.counts->data();
    }
    return rows;
  }
  DeviceActQuantArgs quant(const ActRows& x, const std::optional<DeviceArray<uint8_t>>& slabs,
                           const std::optional<DeviceArray<float>>& scales, bool gather) const {
    DeviceActQuantArgs a;
    a.kind = DeviceActQuantKind::kFp8PerToken;
    a.x = x;
    a.rows = device_rows();
    a.num_experts = c_.experts;
    a.gather = gather;
    a.topk = c_.topk;
    a.out = {slabs->data(), DType::kF8E4M3, slab_rows(), x.cols};
    a.row_scales = scales->data();
    return a;
  }
  DeviceExpertArgs args() const {
    DeviceExpertArgs a;
    a.experts = {c_.format, c_.experts, c_.hidden, c_.intermediate, activation()};
    a.experts.gate_up = device_.gate_up->data();
    a.experts.down = device_.down->data();
    if (c_.bias) a.experts.gate_up_bias = device_.bias1->data(), a.experts.down_bias = device_.bias2->data();
    a.experts.scales = device_.scales->data();
    a.rows = device_rows();
    a.num_tokens = c_.tokens, a.topk = c_.topk;
    a.gather = false;
    a.x = {device_.x_slabs->data(), DType::kF8E4M3, slab_rows(), c_.hidden};
    a.x_row_scales = device_.x_scales->data();
    a.intermediate = {device_.intermediate->data(), DType::kBF16, rows(), c_.intermediate};
    a.h = {device_.h_slabs->data(), DType::kF8E4M3, slab_rows(), c_.intermediate};
    a.h_row_scales = device_.h_scales->data();
    a.y_bf16 = device_.y->data();
    return a;
  }
  Activation activation() const { return {c_.activation, 1.702f, 1.0f, 2.0f}; }
  // The tiles of one expert's matrix, [n, k].
  struct Tiles {
    const uint8_t* data;
    int64_t n, k;
  };
  std::vector<double> sums(const Tiles& tiles, const Fp4Matrix& w, const double* x, bool folded,
                           int64_t (*tile_row)(int64_t)) const;

  Case c_;
  Random random_;
  SortedRows sorted_;
  bool gated_;
  int64_t gate_up_bytes_, down_bytes_;
  std::vector<int32_t> counts_;
  std::vector<Expert> experts_;
  std::vector<uint8_t> gate_up_tiles_, down_tiles_;
  std::vector<float> bias1_, bias2_, scales_;
  std::vector<bf16> x_;
  struct DeviceBuffers {
    std::optional<DeviceArray<int32_t>> counts;
    std::optional<DeviceArray<uint8_t>> gate_up, down, x_slabs, h_slabs;
    std::optional<DeviceArray<float>> bias1, bias2, scales, x_scales, h_scales;
    std::optional<DeviceArray<bf16>> x, intermediate, y;
  };
  DeviceBuffers device_;
};

void Layer::pack() {
  gate_up_tiles_.resize(static_cast<size_t>(gate_up_bytes_ * c_.experts));
  down_tiles_.resize(static_cast<size_t>(down_bytes_ * c_.experts));
  for (int64_t e = 0; e < c_.experts; ++e) {
    experts_.push_back({Fp4Matrix(c_.format, c_.intermediate, c_.hidden, random_),
                        Fp4Matrix(c_.format, c_.intermediate, c_.hidden, random_),
                        Fp4Matrix(c_.format, c_.hidden, c_.intermediate, random_)});
    const Expert& w = experts_.back();
    uint8_t* gate_up = gate_up_tiles_.data() + gate_up_bytes_ * e;
    ASSERT_TRUE((gated_ ? pack_fp8_gate_up_tiles(w.gate.view(), w.up.view(), gate_up)
                        : pack_fp8_tiles(w.up.view(), gate_up))
                    .ok());
    ASSERT_TRUE(pack_fp8_tiles(w.down.view(), down_tiles_.data() + down_bytes_ * e).ok());
    for (const Fp4Matrix* m : {&w.gate, &w.up, &w.down}) scales_.push_back(m->view().tensor_scale);
  }
  bias1_ = random_.normal(c_.experts * (gated_ ? 2 : 1) * c_.intermediate, 0.2f);
  bias2_ = random_.normal(c_.experts * c_.hidden, 0.2f);
  device_.gate_up.emplace(gate_up_tiles_), device_.down.emplace(down_tiles_);
  device_.bias1.emplace(bias1_), device_.bias2.emplace(bias2_), device_.scales.emplace(scales_);
}

void Layer::allocate() {
  device_.x.emplace(x_);
  device_.x_slabs.emplace(slabs_bytes(slab_rows(), c_.hidden)), device_.x_scales.emplace(slab_rows());
  device_.h_slabs.emplace(slabs_bytes(slab_rows(), c_.intermediate)), device_.h_scales.emplace(slab_rows());
  device_.intermediate.emplace(rows() * c_.intermediate), device_.y.emplace(rows() * c_.hidden);
}

std::vector<double> Layer::sums(const Tiles& tiles, const Fp4Matrix& w, const double* x, bool folded,
                                int64_t (*tile_row)(int64_t)) const {
  const Fp4MatrixView view = w.view();
  std::vector<double> out;
  for (int64_t r = 0; r < view.rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < tiles.k; ++i)
      sum += x[i] * (folded ? static_cast<double>(
                                  fp8_tiled_at(c_.format, tiles.data, tiles.n, tiles.k, tile_row(r), i)) *
                                  view.tensor_scale
                            : static_cast<double>(fp4_at(view, r, i)));
    out.push_back(sum);
  }
  return out;
}

std::vector<double> Layer::gate_up(int64_t e, const std::vector<double>& x, bool folded) const {
  const Expert& w = experts_[static_cast<size_t>(e)];
  const int64_t n = (gated_ ? 2 : 1) * c_.intermediate;
  const Tiles tiles{gate_up_tiles_.data() + gate_up_bytes_ * e, n, c_.hidden};
  const auto gate_row = [](int64_t i) { return i / 32 * 64 + i % 32 / 8 * 16 + i % 8; };
  const auto up_row = [](int64_t i) { return i / 32 * 64 + i % 32 / 8 * 16 + i % 8 + 8; };
  const auto plain = [](int64_t i) { return i; };
  std::vector<double> gate(static_cast<size_t>(c_.intermediate));
  if (gated_) gate = sums(tiles, w.gate, x.data(), folded, gate_row);
  std::vector<double> up = sums(tiles, w.up, x.data(), folded, gated_ ? +up_row : +plain);
  const float* bias = bias1_.data() + e * n;
  for (int64_t i = 0; i < c_.intermediate; ++i) {
    double& u = up[static_cast<size_t>(i)];
    const double g = gate[static_cast<size_t>(i)] + (c_.bias && gated_ ? bias[i] : 0);
    if (c_.bias) u += bias[gated_ ? c_.intermediate + i : i];
    u = activated(activation(), g, u);
  }
  return up;
}

std::vector<double> Layer::down(int64_t e, const std::vector<double>& h, bool folded) const {
  const Tiles tiles{down_tiles_.data() + down_bytes_ * e, c_.hidden, c_.intermediate};
  std::vector<double> out =
      sums(tiles, experts_[static_cast<size_t>(e)].down, h.data(), folded, [](int64_t i) { return i; });
  if (c_.bias)
    for (int64_t i = 0; i < c_.hidden; ++i)
      out[static_cast<size_t>(i)] += bias2_[static_cast<size_t>(e * c_.hidden + i)];
  return out;
}

// Samples the rows of a case (the first, the last and some in between) so that the double loops take seconds.
std::vector<int64_t> sampled_rows(const Layer& layer) {
  std::vector<int64_t> live;
  for (int64_t r = 0; r < layer.rows(); ++r)
    if (layer.row(r).expert >= 0) live.push_back(r);
  std::vector<int64_t> rows;
  const size_t step = std::max<size_t>(1, live.size() / 12);
  for (size_t i = 0; i < live.size(); i += step) rows.push_back(live[i]);
  if (!live.empty()) rows.push_back(live.back());
  return rows;
}

void append(std::vector<float>& to, const std::vector<float>& all, int64_t row, int64_t cols) {
  to.insert(to.end(), all.begin() + row * cols, all.begin() + (row + 1) * cols);
}
void append(std::vector<float>& to, const std::vector<double>& values) {
  for (const double v : values) to.push_back(static_cast<float>(v));
}

class ExpertGemmFp8 : public testing::TestWithParam<Case> {
 protected:
  ExpertGemmFp8() : stream_(*Stream::make()), scope_(stream_) {}
  void synchronize() {
    const Status status = stream_.synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
  }
  Stream stream_;
  StreamScope scope_;
};

TEST_P(ExpertGemmFp8, IsWithinItsBudgets) {
  const Case& c = GetParam();
  const Layer layer(c);
  layer.run();
  synchronize();
  const std::vector<float> h = layer.intermediate(), y = layer.y();
  std::vector<float> h_actual, h_expected, y_actual, y_expected, y_exact;
  for (const int64_t r : sampled_rows(layer)) {
    const Layer::Row row = layer.row(r);
    append(h_actual, h, r, c.intermediate);
    append(h_expected, layer.gate_up(row.expert, layer.x_of(row.slab), true));
    append(y_actual, y, r, c.hidden);
    append(y_expected, layer.down(row.expert, layer.h_of(row.slab), true));
    std::vector<double> x;
    for (int64_t k = 0; k < c.hidden; ++k) x.push_back(layer.exact_x(row.source, k));
    append(y_exact, layer.down(row.expert, layer.gate_up(row.expert, x, false), false));
  }
  // The matrix unit adds with about 14 bits; h and y are rounded to bf16 as well.
  const double sums = 4e-5 * std::sqrt(static_cast<double>(std::max(c.hidden, c.intermediate)));
  EXPECT_TRUE(within_relative_l2(y_actual, y_expected, std::hypot(sums, kBf16Eps / 2)));
  EXPECT_TRUE(within_relative_l2(h_actual, h_expected, std::hypot(2 * sums, kBf16Eps / 2)));
  EXPECT_TRUE(within_relative_l2(y_actual, y_exact, 0.08));
  for (int64_t r = 0; r < layer.rows(); ++r) {
    const bool live = layer.row(r).expert >= 0;
    for (int64_t i = 0; i < c.hidden; ++i)
      ASSERT_EQ(std::isnan(y[static_cast<size_t>(r * c.hidden + i)]), !live) << r << ", " << i;
    for (int64_t i = 0; i < c.intermediate; ++i)
      ASSERT_EQ(std::isnan(h[static_cast<size_t>(r * c.intermediate + i)]), !live) << r << ", " << i;
  }
}

TEST_P(ExpertGemmFp8, SameBitsEagerReplayedAndRepeated) {
  const Layer layer(GetParam());
  layer.run();
  synchronize();
  const std::vector<float> first = layer.y();
  auto graph = Graph::capture(stream_, [&] {
    layer.run();
    return Status();
  });
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  for (int i = 0; i < 10; ++i) graph->launch(stream_);
  synchronize();
  EXPECT_TRUE(same_bits(layer.y(), first));
}

TEST_P(ExpertGemmFp8, NanStaysInItsToken) {
  const Case& c = GetParam();
  Layer layer(c);
  const int64_t token = layer.row(sampled_rows(layer).back()).source;
  layer.set_x(token, c.hidden - 1, NAN);
  layer.run();
  synchronize();
  const std::vector<float> y = layer.y();
  for (int64_t r = 0; r < layer.rows(); ++r) {
    const Layer::Row row = layer.row(r);
    if (row.expert < 0) continue;
    for (int64_t i = 0; i < c.hidden; ++i)
      ASSERT_EQ(std::isnan(y[static_cast<size_t>(r * c.hidden + i)]), row.source == token) << r << ", " << i;
  }
}

constexpr auto kMx = Fp4Format::kMxfp4, kNv = Fp4Format::kNvfp4;
constexpr auto kOai = ActivationKind::kSwigluOai, kSilu = ActivationKind::kSilu,
               kRelu2 = ActivationKind::kRelu2;
INSTANTIATE_TEST_SUITE_P(Cases, ExpertGemmFp8,
                         testing::Values(Case{kMx, kSilu, 1, 1, 1, 32, 32},
                                         Case{kMx, kSilu, 5, 2, 4, 128, 32, Spread::kEven, false},
                                         Case{kMx, kOai, 40, 2, 3, 256, 160, Spread::kSkewed},
                                         Case{kMx, kOai, 300, 1, 2, 288, 96, Spread::kOneExpert},
                                         Case{kMx, kRelu2, 150, 2, 4, 192, 64},
                                         Case{kMx, kOai, 130, 2, 4, 1440, 160},
                                         Case{kMx, kSilu, 2200, 1, 2, 160, 288, Spread::kOneExpert},
                                         Case{kMx, kOai, 90, 4, 300, 128, 64, Spread::kIdleExperts},
                                         Case{kMx, kOai, 400, 1, 8, 160, 288, Spread::kOneExpert},
                                         Case{kNv, kSilu, 5, 2, 4, 128, 32},
                                         Case{kNv, kOai, 40, 2, 3, 256, 160, Spread::kSkewed},
                                         Case{kNv, kSilu, 300, 1, 2, 288, 96, Spread::kOneExpert},
                                         Case{kNv, kSilu, 400, 1, 8, 288, 96, Spread::kOneExpert},
                                         Case{kNv, kRelu2, 150, 2, 4, 192, 64},
                                         Case{kNv, kSilu, 130, 2, 4, 1440, 160, Spread::kEven, false},
                                         Case{kMx, kSilu, 1, 1, 6, 192, 96, Spread::kEven, true, 70},
                                         Case{kNv, kSilu, 1, 1, 6, 192, 96, Spread::kEven, true, 13}));

TEST(ExpertGemmFp8NoTokens, IsLegal) {
  Stream stream = *Stream::make();
  const StreamScope scope(stream);
  sm90_fp8_gate_up({});
  sm90_fp8_down({});
  EXPECT_TRUE(stream.synchronize().ok());
}

}  // namespace
}  // namespace fp4moe
