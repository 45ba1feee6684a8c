#include "bench/moe_shapes.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

namespace fp4moe {
namespace {

constexpr Activation kOai{ActivationKind::kSwigluOai, 1.702f, 1.0f, 7.0f};
constexpr Activation kSilu{ActivationKind::kSilu, 0, 0, 0};
constexpr Activation kClampedSilu{ActivationKind::kSwigluOai, 1.0f, 0.0f, 10.0f};

// Samples experts by popularity. zipf: the expert at index r of a random order has weight 1 / (r + 1);
// otherwise all have weight 1.
class ExpertSampler {
 public:
  ExpertSampler(int64_t num_experts, bool zipf, std::mt19937_64& random)
      : experts_(static_cast<size_t>(num_experts)), cumulative_(experts_.size()) {
    std::iota(experts_.begin(), experts_.end(), 0);
    std::shuffle(experts_.begin(), experts_.end(), random);
    double sum = 0;
    for (size_t r = 0; r < cumulative_.size(); ++r)
      cumulative_[r] = sum += zipf ? 1.0 / static_cast<double>(r + 1) : 1.0;
  }

  int32_t draw(std::mt19937_64& random) const {
    const double at = std::uniform_real_distribution<double>(0, cumulative_.back())(random);
    const auto rank = std::upper_bound(cumulative_.begin(), cumulative_.end(), at) - cumulative_.begin();
    return experts_[std::min(static_cast<size_t>(rank), experts_.size() - 1)];
  }

 private:
  std::vector<int32_t> experts_;
  std::vector<double> cumulative_;
};

// Draws topk distinct experts into ids; duplicates are drawn again.
void draw_token(const ExpertSampler& sampler, int64_t topk, std::mt19937_64& random, int32_t* ids) {
  for (int64_t k = 0; k < topk; ++k) {
    do {
      ids[k] = sampler.draw(random);
    } while (std::find(ids, ids + k, ids[k]) != ids + k);
  }
}

void draw_weights(int64_t topk, std::mt19937_64& random, float* weights) {
  float sum = 0;
  for (int64_t k = 0; k < topk; ++k)
    sum += weights[k] = std::uniform_real_distribution<float>(0.1f, 1.0f)(random);
  for (int64_t k = 0; k < topk; ++k) weights[k] /= sum;
}

}  // namespace

const std::vector<MoeShape>& moe_shapes() {
  static const std::vector<MoeShape> kShapes = {
      {"gptoss120b", 128, 0, 128, 4, 2880, 2880, kOai},
      {"gptoss20b", 32, 0, 32, 4, 2880, 2880, kOai},
      {"dsv3_ep8", 256, 96, 32, 8, 7168, 2048, kSilu},
      {"dsv3_e32", 32, 0, 32, 8, 7168, 2048, kSilu},
      {"dsv3_full", 256, 0, 256, 8, 7168, 2048, kSilu},
      {"qwen3_30b", 128, 0, 128, 8, 2048, 768, kSilu},
      {"seedbench", 256, 0, 256, 6, 4096, 2048, kSilu},
      {"dsv4_flash", 256, 0, 256, 6, 4096, 2048, kClampedSilu},
  };
  return kShapes;
}

Result<std::vector<MoeShape>> moe_shapes_of(const std::vector<std::string>& names) {
  std::vector<MoeShape> chosen;
  for (const std::string& name : names) {
    if (name == "all") return moe_shapes();
    const auto found = std::find_if(moe_shapes().begin(), moe_shapes().end(),
                                    [&](const MoeShape& shape) { return name == shape.name; });
    if (found == moe_shapes().end()) {
      std::string known = "all";
      for (const MoeShape& shape : moe_shapes()) known += std::string(", ") + shape.name;
      return invalid_argument("unknown shape '" + name + "'; use one of: " + known);
    }
    chosen.push_back(*found);
  }
  return chosen;
}

Result<MoeRouting> moe_routing_of(const std::string& name) {
  if (name == "uniform") return MoeRouting::kUniform;
  if (name == "zipf") return MoeRouting::kZipf;
  if (name == "onehot") return MoeRouting::kOneHot;
  return invalid_argument("unknown routing '" + name + "'; use uniform, zipf or onehot");
}

RoutingDraw draw_routing(const MoeShape& shape, MoeRouting routing, int64_t num_tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  const bool one_hot = routing == MoeRouting::kOneHot;
  const ExpertSampler sampler(one_hot ? shape.num_local : shape.num_experts, routing == MoeRouting::kZipf,
                              random);
  RoutingDraw draw;
  draw.ids.resize(static_cast<size_t>(num_tokens * shape.topk));
  draw.weights.resize(draw.ids.size());
  std::vector<bool> active(static_cast<size_t>(shape.num_local), false);
  for (int64_t t = 0; t < num_tokens; ++t) {
    int32_t* const ids = draw.ids.data() + t * shape.topk;
    if (one_hot && t > 0) {
      std::copy_n(draw.ids.data(), shape.topk, ids);
    } else {
      draw_token(sampler, shape.topk, random, ids);
      for (int64_t k = 0; one_hot && k < shape.topk; ++k) ids[k] += static_cast<int32_t>(shape.first_expert);
    }
    draw_weights(shape.topk, random, draw.weights.data() + t * shape.topk);
    for (int64_t k = 0; k < shape.topk; ++k) {
      const int64_t local = ids[k] - shape.first_expert;
      if (local < 0 || local >= shape.num_local) continue;
      active[static_cast<size_t>(local)] = true;
      ++draw.local_pairs;
    }
  }
  draw.active_experts = std::count(active.begin(), active.end(), true);
  return draw;
}

void rename_experts(const MoeShape& shape, int64_t first_local, RoutingDraw& draw) {
  constexpr int32_t kInactive = -1, kActive = 0;
  std::vector<int32_t> names(static_cast<size_t>(shape.num_local), kInactive);
  const auto name_of = [&](int32_t id) -> int32_t* {
    const int64_t local = id - shape.first_expert;
    return local < 0 || local >= shape.num_local ? nullptr : &names[static_cast<size_t>(local)];
  };
  for (const int32_t id : draw.ids) {
    if (int32_t* const name = name_of(id); name != nullptr) *name = kActive;
  }
  int64_t next = first_local;
  for (int32_t& name : names) {
    if (name != kInactive) name = static_cast<int32_t>(shape.first_expert + next++ % shape.num_local);
  }
  for (int32_t& id : draw.ids) {
    if (const int32_t* const name = name_of(id); name != nullptr) id = *name;
  }
}

double moe_weight_bytes(const MoeShape& shape, Fp4Format format, double active_experts) {
  const double bytes_per_weight = 0.5 + 1.0 / fp4_block(format);
  return active_experts * 3 * static_cast<double>(shape.hidden_size * shape.intermediate_size) *
         bytes_per_weight;
}

double moe_flops(const MoeShape& shape, double local_pairs) {
  return 6 * local_pairs * static_cast<double>(shape.hidden_size * shape.intermediate_size);
}

Result<MoePeers> MoePeers::read(const std::string& path) {
  std::ifstream file(path);
  if (!file) return not_found("cannot read " + path);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object() || !json.contains("shapes") || !json["shapes"].is_object())
    return data_loss(path + ": expected a JSON object with \"shapes\", as in bench/peers_h200.json");
  MoePeers peers;
  try {
    for (const auto& [shape, rows] : json["shapes"].items()) {
      for (const auto& row : rows) {
        const std::string best = row.at("best");
        peers.rows_.push_back({shape, row.at("tokens"), {best, row.at("us").at(best), row.at("multiple")}});
      }
    }
  } catch (const nlohmann::json::exception& error) {
    return data_loss(path + ": " + error.what());
  }
  return peers;
}

const MoePeer* MoePeers::find(const std::string& shape, int64_t num_tokens) const {
  const std::string name = shape == "dsv4_flash" ? "seedbench" : shape;
  for (const Row& row : rows_) {
    if (row.shape == name && row.num_tokens == num_tokens) return &row.peer;
  }
  return nullptr;
}

}  // namespace fp4moe
