#include "server/observe/load_report.h"

#include <algorithm>

namespace fp4moe {

namespace {

constexpr size_t kHottest = 10;

struct HotExpert {
  int64_t layer = 0, expert = 0, tokens = 0;
  double over_mean = 0;
};

std::vector<HotExpert> hottest(const ExpertLoad& load, const std::vector<LayerBalance>& balance) {
  std::vector<HotExpert> all;
  for (size_t i = 0; i < load.tokens.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / load.num_experts;
    const auto& layer = balance[static_cast<size_t>(row)];
    if (load.tokens[i] > 0)
      all.push_back({load.layers[static_cast<size_t>(row)], static_cast<int64_t>(i) % load.num_experts,
                     load.tokens[i], static_cast<double>(load.tokens[i]) / layer.mean});
  }
  const size_t n = std::min(kHottest, all.size());
  std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n), all.end(),
                    [](const HotExpert& a, const HotExpert& b) {
                      if (a.over_mean != b.over_mean) return a.over_mean > b.over_mean;
                      return a.layer != b.layer ? a.layer < b.layer : a.expert < b.expert;
                    });
  all.resize(n);
  return all;
}

json balance_json(const ExpertLoad& load, const std::vector<LayerBalance>& balance) {
  double sum = 0, worst = 0;
  int64_t busy_layers = 0, worst_layer = -1;
  for (size_t row = 0; row < balance.size(); ++row) {
    if (balance[row].tokens == 0) continue;
    ++busy_layers;
    sum += balance[row].max_over_mean;
    if (balance[row].max_over_mean <= worst) continue;
    worst = balance[row].max_over_mean;
    worst_layer = load.layers[row];
  }
  if (busy_layers == 0) return {{"mean", nullptr}, {"worst", nullptr}, {"worst_layer", nullptr}};
  return {{"mean", sum / static_cast<double>(busy_layers)}, {"worst", worst}, {"worst_layer", worst_layer}};
}

}  // namespace

std::vector<LayerBalance> layer_balance(const ExpertLoad& load) {
  std::vector<LayerBalance> balance(load.layers.size());
  for (size_t row = 0; row < balance.size(); ++row) {
    const int64_t* tokens = load.tokens.data() + static_cast<int64_t>(row) * load.num_experts;
    LayerBalance& layer = balance[row];
    int64_t most = 0;
    for (int64_t e = 0; e < load.num_experts; ++e) {
      layer.tokens += tokens[e];
      layer.idle_experts += tokens[e] == 0 ? 1 : 0;
      most = std::max(most, tokens[e]);
    }
    layer.mean = static_cast<double>(layer.tokens) / static_cast<double>(load.num_experts);
    if (layer.tokens > 0) layer.max_over_mean = static_cast<double>(most) / layer.mean;
  }
  return balance;
}

json load_json(const LoadReport& report) {
  const ExpertLoad& load = report.window.load;
  const std::vector<LayerBalance> balance = layer_balance(load);
  json layers = json::array(), hot = json::array();
  for (size_t row = 0; row < balance.size(); ++row) {
    const auto first = load.tokens.begin() + static_cast<int64_t>(row) * load.num_experts;
    layers.push_back({{"layer", load.layers[row]},
                      {"tokens", balance[row].tokens},
                      {"max_over_mean", balance[row].tokens > 0 ? json(balance[row].max_over_mean) : json()},
                      {"idle_experts", balance[row].idle_experts},
                      {"experts", std::vector<int64_t>(first, first + load.num_experts)}});
  }
  for (const HotExpert& e : hottest(load, balance))
    hot.push_back(
        {{"layer", e.layer}, {"expert", e.expert}, {"tokens", e.tokens}, {"over_mean", e.over_mean}});
  return {{"model", report.info.name},
          {"window_seconds", report.asked_seconds > 0 ? json(report.asked_seconds) : json("all")},
          {"covered_seconds", report.window.seconds},
          {"num_experts", load.num_experts},
          {"top_k", report.info.top_k},
          {"counted_ranks", load.counted_ranks},
          {"num_ranks", load.num_ranks},
          {"balance", balance_json(load, balance)},
          {"hottest", std::move(hot)},
          {"layers", std::move(layers)}};
}

}  // namespace fp4moe
