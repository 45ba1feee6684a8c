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

// The convolution's input in a row; rows before the replayed ones are in the slot.
float conv_input(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row, int64_t channel) {
  if (row >= -s.num_replayed) return a.qkv_of(s, row)[channel];
  if (s.first_position == 0) return 0;
  return a.conv(s.slot)[(channel + 1) * (a.conv_width - 1) + s.num_replayed + row];
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
  const double beta = sigmoid(a.b_of(s, row)[head]);
  const double shrink = std::exp(a.decay[head] * softplus(double{a.a_of(s, row)[head]} + a.dt_bias[head]));
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

// Runs one head's rows, the drafts on a copy of the state.
void run_head(const GatedDeltaArgs& a, const SequenceRows& s, int head) {
  float* state = a.recurrent(s.slot, head);
  const int64_t elems = int64_t{a.key_head_dim} * a.value_head_dim;
  if (s.num_rows > 0 && s.first_position == 0) std::fill_n(state, elems, 0.0f);
  std::vector<float> of_drafts;
  for (int64_t row = -s.num_replayed; row < s.num_rows; ++row) {
    if (row == s.num_rows - s.num_tentative) {
      of_drafts.assign(state, state + elems);
      state = of_drafts.data();
    }
    const std::vector<double> o = step(a, s, row, head, state);
    if (row >= 0) norm_and_gate(a, s.first_row + row, head, o);
  }
}

// Columns [begin, end) of the drafts' replay rows.
void store_replay_rows(const GatedDeltaArgs& a, const SequenceRows& s, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < s.num_tentative; ++i) {
    const int64_t row = s.num_rows - s.num_tentative + i;
    std::copy(a.qkv_of(s, row) + begin, a.qkv_of(s, row) + end, a.replay(s.slot, i) + begin);
    if (begin > 0) continue;
    float* const gates = a.replay(s.slot, i) + a.conv_channels();
    std::copy_n(a.b_of(s, row), a.num_value_heads, gates);
    std::copy_n(a.a_of(s, row), a.num_value_heads, gates + a.num_value_heads);
  }
}

void check_replay(const GatedDeltaArgs& a, const SequenceRows& s) {
  FP4MOE_CHECK(std::max(s.num_replayed, s.num_tentative) <= a.slots.num_replay_rows &&
                   a.slots.num_replay_rows <= kMaxReplayRows,
               std::to_string(s.num_replayed) + " replayed rows and " + std::to_string(s.num_tentative) +
                   " drafts; slots have " + std::to_string(a.slots.num_replay_rows) +
                   " replay rows of at most " + std::to_string(kMaxReplayRows));
  FP4MOE_CHECK(s.num_replayed < std::max<int64_t>(s.first_position, 1) &&
                   s.num_tentative < std::max<int64_t>(s.num_rows, 1),
               "a sequence without committed rows");
}

}  // namespace

void check_gated_delta(const GatedDeltaArgs& a) {
  FP4MOE_CHECK(std::max(a.key_head_dim, a.value_head_dim) <= kMaxDeltaHeadDim,
               "head dim " + std::to_string(std::max(a.key_head_dim, a.value_head_dim)) + " > " +
                   std::to_string(kMaxDeltaHeadDim));
  FP4MOE_CHECK(
      a.conv_width >= 1 && a.conv_width <= kMaxConvWidth,
      "conv width " + std::to_string(a.conv_width) + " is not in 1 .. " + std::to_string(kMaxConvWidth));
  for (const SequenceRows& s : a.sequences) check_replay(a, s);
}

void store_conv_inputs(const GatedDeltaArgs& a, ThreadPool& pool) {
  const int64_t ranges = (a.conv_channels() + kChannelsPerChunk - 1) / kChannelsPerChunk;
  const int64_t kept = a.conv_width - 1;
  pool.run(ranges * static_cast<int64_t>(a.sequences.size()), [&](int64_t chunk, int) {
    const SequenceRows& s = a.sequences[static_cast<size_t>(chunk / ranges)];
    if (s.num_rows == 0) return;
    const int64_t begin = chunk % ranges * kChannelsPerChunk;
    const int64_t end = std::min(a.conv_channels(), begin + kChannelsPerChunk);
    for (int64_t i = 0; i < kept; ++i)  // oldest first, so that a slot's entry is read before it is replaced
      for (int64_t c = begin; c < end; ++c)
        a.conv(s.slot)[c * kept + i] = conv_input(a, s, s.num_rows - s.num_tentative - kept + i, c);
    store_replay_rows(a, s, begin, end);
  });
}

void gated_delta(const GatedDeltaArgs& a, ThreadPool& pool) {
  check_gated_delta(a);
  const int64_t heads = a.num_value_heads;
  pool.run(heads * static_cast<int64_t>(a.sequences.size()), [&](int64_t chunk, int) {
    const SequenceRows& s = a.sequences[static_cast<size_t>(chunk / heads)];
    if (s.num_rows > 0) run_head(a, s, static_cast<int>(chunk % heads));
  });
  store_conv_inputs(a, pool);
}

}  // namespace fp4moe::ref
