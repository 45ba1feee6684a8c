#include "engine/output/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "engine/output/logit_edits.h"
#include "kernels/token_random.h"

namespace fp4moe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Maximum {
  float value = -kInfinity;
  bool has_bad = false;  // the row contains NaN or +infinity
};

// Independent lanes allow the loop to be vectorised.
Maximum find_maximum(std::span<const float> x) {
  constexpr size_t kLanes = 16;
  float lane[kLanes];
  int32_t bad[kLanes] = {};
  std::fill(lane, lane + kLanes, -kInfinity);
  const size_t whole = x.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) {
      const float v = x[i + j];
      lane[j] = v > lane[j] ? v : lane[j];
      bad[j] |= !(v < kInfinity);
    }
  for (size_t i = whole; i < x.size(); ++i) {
    lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    bad[0] |= !(x[i] < kInfinity);
  }
  Maximum maximum;
  for (size_t j = 0; j < kLanes; ++j) {
    maximum.value = std::max(maximum.value, lane[j]);
    maximum.has_bad |= bad[j] != 0;
  }
  return maximum;
}

int32_t first_index_of(std::span<const float> x, float value) {
  return static_cast<int32_t>(std::find(x.begin(), x.end(), value) - x.begin());
}

// Sets logits without a bit in `allowed` to -infinity; an empty `allowed` allows everything.
void keep_allowed(std::span<float> logits, std::span<const uint32_t> allowed) {
  constexpr auto kBits = [] {
    std::array<uint32_t, 32> bits{};
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = 1u << i;
    return bits;
  }();
  const size_t whole = std::min(allowed.size(), logits.size() / 32);
  for (size_t word = 0; word < whole; ++word)
    for (size_t i = 0; i < 32; ++i) {  // vectorises, unlike shifts of the word
      float& logit = logits[32 * word + i];
      logit = (allowed[word] & kBits[i]) == 0 ? -kInfinity : logit;
    }
  for (size_t id = 32 * whole; id < std::min(logits.size(), 32 * allowed.size()); ++id)
    if ((allowed[whole] & kBits[id % 32]) == 0) logits[id] = -kInfinity;
}

// Unnormalised probability of logit x: exp((x - maximum) / temperature), in double.
struct Softmax {
  double maximum, temperature;
  double operator()(float x) const { return std::exp((x - maximum) / temperature); }
};

double sum_of(std::span<const float> logits, Softmax softmax) {
  double sum = 0;
  for (const float x : logits) sum += softmax(x);
  return sum;
}

// Yields ids in rank order (largest logit first, equal ones by lower id). Orders only the ids that are
// popped.
class Ranking {
 public:
  // Ranks only ids with a logit of at least `floor`, and never -infinity.
  explicit Ranking(std::span<const float> logits, double floor = kLowest) : ranks_after_{logits} {
    for (size_t i = 0; i < logits.size(); ++i)
      if (logits[i] >= std::max(floor, kLowest)) heap_.push_back(static_cast<int32_t>(i));
    std::make_heap(heap_.begin(), heap_.end(), ranks_after_);
  }
  // The next id, or -1 after the last.
  int32_t pop() {
    if (heap_.empty()) return -1;
    std::pop_heap(heap_.begin(), heap_.end(), ranks_after_);
    const int32_t id = heap_.back();
    heap_.pop_back();
    return id;
  }

 private:
  static constexpr double kLowest = std::numeric_limits<float>::lowest();
  struct RanksAfter {
    std::span<const float> logits;
    bool operator()(int32_t a, int32_t b) const {
      const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
      return x != y ? x < y : a > b;
    }
  };
  RanksAfter ranks_after_;
  std::vector<int32_t> heap_;
};

std::vector<int32_t> first_ranked(std::span<const float> logits, int32_t count) {
  Ranking ranking(logits);
  std::vector<int32_t> ids;
  for (int32_t id; count-- > 0 && (id = ranking.pop()) >= 0;) ids.push_back(id);
  return ids;
}

// Returns the shortest run of ids from next() (-1 at its end) whose weights sum to at least `wanted`; at
// least one id.
template <class Next, class WeightOf>
std::vector<int32_t> shortest_run(Next next, WeightOf weight_of, double wanted) {
  std::vector<int32_t> ids;
  double sum = 0;
  for (int32_t id; (ids.empty() || sum < wanted) && (id = next()) >= 0;) {
    ids.push_back(id);
    sum += weight_of(id);
  }
  return ids;
}

// Returns the ids that top_k and top_p keep, ranked; ids below min_p may already be missing.
template <class WeightOf>
std::vector<int32_t> ranked_ids(std::span<const float> logits, const Softmax& softmax,
                                const SamplingParams& params, WeightOf weight_of) {
  const double top_p = params.top_p;
  if (params.top_k > 0) {
    std::vector<int32_t> ids = first_ranked(logits, params.top_k);
    if (top_p >= 1) return ids;
    double total = 0;
    for (const int32_t id : ids) total += weight_of(id);
    auto next = [it = ids.begin(), end = ids.end()]() mutable { return it == end ? -1 : *it++; };
    return shortest_run(next, weight_of, top_p * total);
  }
  // Ids whose weight is less than 1/V of the weight that top_p drops cannot matter even together, so they are
  // not ranked. Ids below min_p are not ranked either. The slack covers the rounding of exp and log.
  const double total = sum_of(logits, softmax);
  const double dispensable =
      std::max((1 - top_p) * total / static_cast<double>(logits.size()), double{params.min_p});
  const double floor = softmax.maximum + softmax.temperature * (std::log(dispensable) - 1e-6);
  Ranking ranking(logits, floor);
  return shortest_run([&] { return ranking.pop(); }, weight_of, top_p * total);
}

// Returns the ids that top_k, top_p and min_p keep, ranked; at least one. The best id has weight 1.
template <class WeightOf>
std::vector<int32_t> kept_ids(std::span<const float> logits, const Softmax& softmax,
                              const SamplingParams& params, WeightOf weight_of) {
  std::vector<int32_t> ids = ranked_ids(logits, softmax, params, weight_of);
  while (ids.size() > 1 && weight_of(ids.back()) < double{params.min_p}) ids.pop_back();
  return ids;
}

// Returns the first of `num` ids at which the running sum of weights exceeds `random` times their total.
template <class IdAt, class WeightOf>
int32_t pick(size_t num, IdAt id_at, WeightOf weight_of, double random) {
  double total = 0;
  for (size_t i = 0; i < num; ++i) total += weight_of(id_at(i));
  int32_t last = id_at(0);
  double sum = 0;
  for (size_t i = 0; i < num; ++i) {
    const double weight = weight_of(id_at(i));
    if (weight <= 0) continue;
    last = id_at(i);
    sum += weight;
    if (sum > random * total) break;
  }
  return last;
}

int32_t draw(std::span<const float> logits, float maximum, const SamplingParams& params, double random) {
  const Softmax softmax{maximum, params.temperature};
  const auto weight_of = [&](int32_t id) { return softmax(logits[static_cast<size_t>(id)]); };
  if (params.top_k < 0 && params.top_p >= 1 && params.min_p <= 0)
    return pick(
        logits.size(), [](size_t i) { return static_cast<int32_t>(i); }, weight_of, random);
  const std::vector<int32_t> ids = kept_ids(logits, softmax, params, weight_of);
  return pick(
      ids.size(), [&](size_t i) { return ids[i]; }, weight_of, random);
}

}  // namespace

double token_random(uint64_t seed, int64_t position) { return random_number(random_state(seed, position)); }

uint64_t derived_seed(uint64_t random_seed, uint64_t n) {
  return split_mix(random_state(random_seed, static_cast<int64_t>(n)));
}

Status bad_logits() { return internal_error("the model's logits hold NaN or infinity"); }
Status no_token() { return internal_error("all tokens that may be sampled have logit -infinity"); }

Sampler::Sampler(int64_t vocab_size, std::vector<int32_t> masked_ids)
    : vocab_size_(vocab_size), masked_ids_(std::move(masked_ids)) {}

void Sampler::read(std::span<float> logits, float maximum, const SamplingParams& params,
                   SampledToken& sampled, double& log_total) const {
  const auto list = [&](std::vector<TokenLogprob>& out, int32_t id) {
    out.push_back({id, static_cast<float>(logits[static_cast<size_t>(id)] - log_total), {}});
  };
  // The normaliser is computed before masking, because log-probabilities are those of the unmodified model.
  if (params.top_logprobs >= 0) {
    log_total = maximum + std::log(sum_of(logits, Softmax{maximum, 1}));
    for (const int32_t id : params.token_ids_logprob) list(sampled.ids, id);
  }
  for (const int32_t id : masked_ids_) logits[static_cast<size_t>(id)] = -kInfinity;
  if (params.top_logprobs <= 0) return;
  for (const int32_t id : first_ranked(logits, params.top_logprobs)) list(sampled.top, id);
}

Result<SampledToken> Sampler::sample(std::span<float> logits, const SamplingParams& params, double random,
                                     std::span<const LogitEdit> edits,
                                     std::span<const uint32_t> allowed) const {
  FP4MOE_CHECK(static_cast<int64_t>(logits.size()) == vocab_size_,
               std::to_string(logits.size()) + " logits for vocab_size=" + std::to_string(vocab_size_));
  const Maximum unmasked = find_maximum(logits);
  if (unmasked.has_bad || unmasked.value == -kInfinity) return bad_logits();
  SampledToken sampled;
  double log_total = 0;
  read(logits, unmasked.value, params, sampled, log_total);

  std::vector<float> own;  // logits of the edited ids before the edits
  for (const LogitEdit& edit : edits) {
    float& logit = logits[static_cast<size_t>(edit.token_id)];
    own.push_back(logit);
    logit = edited(logit, edit);
  }
  keep_allowed(logits, allowed);
  const bool is_whole = masked_ids_.empty() && edits.empty() && allowed.empty();
  const float maximum = is_whole ? unmasked.value : find_maximum(logits).value;
  if (maximum == -kInfinity) return no_token();
  sampled.token_id =
      params.temperature == 0 ? first_index_of(logits, maximum) : draw(logits, maximum, params, random);
  for (size_t i = 0; i < edits.size(); ++i) logits[static_cast<size_t>(edits[i].token_id)] = own[i];
  if (params.top_logprobs >= 0)
    sampled.logprob = static_cast<float>(logits[static_cast<size_t>(sampled.token_id)] - log_total);
  return sampled;
}

Result<SampledToken> Sampler::score(std::span<float> logits, int32_t token_id,
                                    const SamplingParams& params) const {
  const Maximum maximum = find_maximum(logits);
  if (maximum.has_bad || maximum.value == -kInfinity) return bad_logits();
  const float logit = logits[static_cast<size_t>(token_id)];  // read before masking: masked ids have
                                                              // log-probabilities too
  SampledToken scored{.token_id = token_id};
  double log_total = 0;
  read(logits, maximum.value, params, scored, log_total);
  scored.logprob = static_cast<float>(logit - log_total);
  return scored;
}

}  // namespace fp4moe
