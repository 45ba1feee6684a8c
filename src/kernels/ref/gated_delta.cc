#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/run_ranges.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe::ref {
namespace {

constexpr int64_t kChannelsPerChunk = 1024;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// The convolution's input `row` rows after the sequence's first new row; negative rows are in the slot.
float conv_input(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row, int64_t channel) {
  if (row >= 0) return a.qkv[(s.first_row + row) * a.qkv_stride + channel];
  if (s.first_position == 0) return 0;
  return a.conv(s.slot)[(channel + 1) * (a.conv_width - 1) + row];
}

std::vector<double> convolve(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row, int64_t channel,
                             int count) {
  std::vector<double> out;
  for (int64_t c = channel; c < channel + count; ++c) {
    double sum = 0;
    for (int i = 0; i < a.conv_width; ++i)
      sum += double{a.conv_weight[c * a.conv_width + i]} * conv_input(a, s, row - a.conv_width + 1 + i, c);
    out.push_back(sum * sigmoid(sum));
  }
  return out;
}

void scale_to_norm(std::vector<double>& x, double norm) {
  double squares = 0;
  for (double e : x) squares += e * e;
  for (double& e : x) e *= norm / std::sqrt(squares + kDeltaNormEps);
}

// Updates the f32 state S [dk, dv] with one token, and returns its o [dv].
std::vector<double> step(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row, int head, float* S) {
  const int dk = a.key_head_dim, dv = a.value_head_dim;
  const int64_t key_head = head / (a.num_value_heads / a.num_key_heads), keys = int64_t{a.num_key_heads} * dk;
  std::vector<double> q = convolve(a, s, row, key_head * dk, dk);
  std::vector<double> k = convolve(a, s, row, keys + key_head * dk, dk);
  const std::vector<double> v = convolve(a, s, row, 2 * keys + int64_t{head} * dv, dv);
  scale_to_norm(q, 1 / std::sqrt(static_cast<double>(dk)));
  scale_to_norm(k, 1);
  const int64_t gate = (s.first_row + row) * a.ba_stride + head;
  const double beta = sigmoid(a.b[gate]);
  const double shrink = std::exp(a.decay[head] * softplus(double{a.a[gate]} + a.dt_bias[head]));
  std::vector<double> o(static_cast<size_t>(dv));
  for (int j = 0; j < dv; ++j) {
    double predicted = 0;
    for (int i = 0; i < dk; ++i) predicted += k[i] * shrink * S[i * dv + j];
    const double d = beta * (v[j] - predicted);
    for (int i = 0; i < dk; ++i) {
      const double updated = shrink * S[i * dv + j] + k[i] * d;
      o[j] += q[i] * updated;
      S[i * dv + j] = static_cast<float>(updated);
    }
  }
  return o;
}

void norm_and_gate(const GatedDeltaArgs& a, int64_t t, int head, const std::vector<double>& o) {
  double squares = 0;
  for (double e : o) squares += e * e;
  const double inverse = 1 / std::sqrt(squares / a.value_head_dim + a.eps);
  for (int j = 0; j < a.value_head_dim; ++j) {
    const int64_t column = int64_t{head} * a.value_head_dim + j;
    const double z = a.z[t * a.z_stride + column];
    store_elem(a.out.data, a.out.dtype, t * a.out.cols + column,
               static_cast<float>(o[j] * inverse * a.norm_weight[j] * z * sigmoid(z)));
  }
}

}  // namespace

void check_gated_delta(const GatedDeltaArgs& a) {
  FP4MOE_CHECK(std::max(a.key_head_dim, a.value_head_dim) <= kMaxDeltaHeadDim,
               "head dim " + std::to_string(std::max(a.key_head_dim, a.value_head_dim)) + " > " +
                   std::to_string(kMaxDeltaHeadDim));
  FP4MOE_CHECK(
      a.conv_width >= 1 && a.conv_width <= kMaxConvWidth,
      "conv width " + std::to_string(a.conv_width) + " is not in 1 .. " + std::to_string(kMaxConvWidth));
}

void store_conv_inputs(const GatedDeltaArgs& a, ThreadPool& pool) {
  const int64_t ranges = (a.conv_channels() + kChannelsPerChunk - 1) / kChannelsPerChunk;
  const int kept = a.conv_width - 1;
  pool.run(ranges * static_cast<int64_t>(a.sequences.size()), [&](int64_t chunk, int) {
    const SequenceRows& s = a.sequences[static_cast<size_t>(chunk / ranges)];
    if (s.num_rows == 0) return;
    const int64_t begin = chunk % ranges * kChannelsPerChunk;
    for (int64_t c = begin; c < std::min(a.conv_channels(), begin + kChannelsPerChunk); ++c)
      for (int i = 0; i < kept; ++i)  // oldest first, so that a slot's entry is read before it is replaced
        a.conv(s.slot)[c * kept + i] = conv_input(a, s, s.num_rows - kept + i, c);
  });
}

void gated_delta(const GatedDeltaArgs& a, ThreadPool& pool) {
  check_gated_delta(a);
  const int64_t heads = a.num_value_heads;
  pool.run(heads * static_cast<int64_t>(a.sequences.size()), [&](int64_t chunk, int) {
    const SequenceRows& s = a.sequences[static_cast<size_t>(chunk / heads)];
    const int head = static_cast<int>(chunk % heads);
    float* state = a.recurrent(s.slot, head);
    if (s.num_rows > 0 && s.first_position == 0)
      std::fill_n(state, int64_t{a.key_head_dim} * a.value_head_dim, 0.0f);
    for (int64_t row = 0; row < s.num_rows; ++row)
      norm_and_gate(a, s.first_row + row, head, step(a, s, row, head, state));
  });
  store_conv_inputs(a, pool);
}

}  // namespace fp4moe::ref
