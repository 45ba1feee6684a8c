#include "eagle3_oracle.h"

#include <cmath>

namespace fp4moe {
namespace {

OracleRow normed(const OracleRow& x, const OracleRow& weight, double eps) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
  OracleRow y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * factor * weight.at(i);
  return y;
}

// The matrix has as many columns as x has elements.
OracleRow times(const OracleRow& matrix, const OracleRow& x) {
  OracleRow y(matrix.size() / x.size());
  for (size_t r = 0; r < y.size(); ++r)
    for (size_t c = 0; c < x.size(); ++c) y[r] += matrix[r * x.size() + c] * x[c];
  return y;
}

void add(OracleRow& x, const OracleRow& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y.at(i);
}

OracleRow joined(OracleRow x, const OracleRow& y) {
  x.insert(x.end(), y.begin(), y.end());
  return x;
}

// Rotates each head by its position: element i of the first half with element i of the second half.
void rotate(OracleRow& x, int64_t head_dim, int64_t position, double theta) {
  const auto d = static_cast<size_t>(head_dim), half = d / 2;
  for (size_t start = 0; start < x.size(); start += d)
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) *
                           std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      const double a = x[start + i], b = x[start + half + i];
      x[start + i] = a * std::cos(angle) - b * std::sin(angle);
      x[start + half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
}

OracleRow attend(const OracleHead& head, const OracleRow& q, const std::vector<OracleRow>& keys,
                 const std::vector<OracleRow>& values, size_t num_keys) {
  const auto d = static_cast<size_t>(head.head_dim);
  OracleRow out(q.size());
  for (size_t h = 0; h < static_cast<size_t>(head.heads); ++h) {
    const size_t kv = h / static_cast<size_t>(head.heads / head.kv_heads) * d;
    std::vector<double> weights(num_keys);
    double sum = 0;
    for (size_t j = 0; j < num_keys; ++j) {
      double dot = 0;
      for (size_t i = 0; i < d; ++i) dot += q[h * d + i] * keys[j][kv + i];
      weights[j] = std::exp(dot / std::sqrt(static_cast<double>(d)));
      sum += weights[j];
    }
    for (size_t j = 0; j < num_keys; ++j)
      for (size_t i = 0; i < d; ++i) out[h * d + i] += weights[j] / sum * values[j][kv + i];
  }
  return out;
}

OracleRow hidden_of(const OracleHead& head, OracleRow features) {
  const auto part = static_cast<size_t>(head.target_hidden);
  if (head.norm_before_fc) features = normed(features, head.tensors.at("input_norm.weight"), head.eps);
  if (head.fc_norm) {
    OracleRow all;
    for (size_t i = 0; i * part < features.size(); ++i) {
      const auto first = features.begin() + static_cast<long>(i * part);
      const OracleRow feature(first, first + static_cast<long>(part));
      all =
          joined(all, normed(feature, head.tensors.at("fc_norm." + std::to_string(i) + ".weight"), head.eps));
    }
    features = all;
  }
  const auto fc = head.tensors.find("fc.weight");
  return fc == head.tensors.end() ? features : times(fc->second, features);
}

std::string prefix_of(const OracleHead& head, int64_t layer) {
  return head.layers == 1 ? std::string("midlayer.") : "layers." + std::to_string(layer) + ".";
}

// One layer, whose attention has the input x.
void run_layer(const OracleHead& head, size_t layer, const OracleRow& x, int64_t position, OracleCache& cache,
               OracleRow& residual) {
  const std::string prefix = prefix_of(head, static_cast<int64_t>(layer));
  std::vector<OracleRow>&keys = cache.keys[layer], &values = cache.values[layer];
  const auto weight = [&](const char* name) { return head.tensors.at(prefix + name + ".weight"); };
  OracleRow q = times(weight("self_attn.q_proj"), x), k = times(weight("self_attn.k_proj"), x);
  rotate(q, head.head_dim, position, head.theta);
  rotate(k, head.head_dim, position, head.theta);
  const auto p = static_cast<size_t>(position);
  if (keys.size() <= p) keys.resize(p + 1), values.resize(p + 1);
  keys[p] = k;
  values[p] = times(weight("self_attn.v_proj"), x);
  add(residual, times(weight("self_attn.o_proj"), attend(head, q, keys, values, p + 1)));
  const OracleRow y = normed(residual, weight("post_attention_layernorm"), head.eps);
  OracleRow gate = times(weight("mlp.gate_proj"), y);
  const OracleRow up = times(weight("mlp.up_proj"), y);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  add(residual, times(weight("mlp.down_proj"), gate));
}

}  // namespace

OracleOutput run_oracle(const OracleHead& head, int64_t token, int64_t position, const OracleRow& features,
                        bool is_chained, OracleCache& cache) {
  cache.keys.resize(static_cast<size_t>(head.layers));
  cache.values.resize(static_cast<size_t>(head.layers));
  const OracleRow& table = head.tensors.at("embed_tokens.weight");
  const auto row = table.begin() + static_cast<long>(token * head.hidden);
  const OracleRow embedded(row, row + static_cast<long>(head.hidden));
  const OracleRow h = is_chained ? features : hidden_of(head, features);
  OracleRow residual;
  for (int64_t layer = 0; layer < head.layers; ++layer) {
    const std::string prefix = prefix_of(head, layer);
    const OracleRow& input_norm = head.tensors.at(prefix + "input_layernorm.weight");
    OracleRow x;
    if (layer == 0) {
      const OracleRow h_normed = normed(h, head.tensors.at(prefix + "hidden_norm.weight"), head.eps);
      x = joined(normed(embedded, input_norm, head.eps), h_normed);
      residual = head.norm_before_residual ? h_normed : h;
    } else {
      x = normed(residual, input_norm, head.eps);
    }
    run_layer(head, static_cast<size_t>(layer), x, position, cache, residual);
  }
  const OracleRow last = normed(residual, head.tensors.at("norm.weight"), head.eps);
  return {times(head.tensors.at("lm_head.weight"), last), head.norm_output ? last : residual};
}

}  // namespace fp4moe
