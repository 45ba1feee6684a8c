#include "moe/a2a_case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "formats/e4m3.h"
#include "formats/nvfp4.h"
#include "support/compare.h"

namespace fp4moe::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float rounded(float x, DType dtype) { return dtype == DType::kBF16 ? round_to_bf16(x) : x; }

// Writes a row to `out` as the experts see it; returns the factor by which its elements must still be
// multiplied.
float payload_row(const A2aCase& c, const float* x, std::vector<float>& out) {
  const auto H = static_cast<size_t>(c.H);
  out.assign(x, x + H);
  const bool exchanged = c.protocol != "none" || c.layout.dp > 1;
  if (c.payload == Payload::kAct || !exchanged) return 1;
  if (c.payload == Payload::kFp8) {
    for (size_t first = 0; first < H; first += 128) {
      const size_t last = std::min(H, first + 128);
      float amax = 0;
      for (size_t h = first; h < last; ++h) amax = std::max(amax, std::abs(x[h]));
      for (size_t h = first; h < last; ++h)
        out[h] = rounded(e4m3_decode(e4m3_encode(x[h] / (amax / 448.0f))) * (amax / 448.0f), c.dtype);
    }
    return 1;
  }
  std::vector<uint8_t> codes(H / 2), scales(H / 16);
  DecodeScale scale = to_decode(EncodeScale{c.nvfp4_scale});
  if (c.per_token)
    scale = nvfp4_quantize_row_per_token(x, c.H, codes.data(), scales.data());
  else
    nvfp4_quantize_row(x, c.H, EncodeScale{c.nvfp4_scale}, codes.data(), scales.data());
  nvfp4_dequantize_row(codes.data(), scales.data(), c.H, DecodeScale{1}, out.data());
  return scale.value;
}

float on_wire(const A2aCase& c, float y) {
  if (c.protocol == "none") return y;
  if (c.combine == CombinePayload::kFp8) return e4m3_decode(e4m3_encode(y));
  return rounded(y, c.dtype);
}

bool is_expert(const A2aCase& c, int32_t id) { return id >= 0 && id < c.E; }

// Sums one token's slots as the protocol specifies.
struct TokenSum {
  const A2aCase& c;
  const float* row;
  float scale;
  const int32_t* ids;
  const float* weights;

  float y(int64_t k, int64_t h, int rank) const { return expert_value(c, ids[k], row[h] * scale, h, rank); }
  float by_slot(int64_t h) const {
    float sum = 0;
    for (int64_t k = 0; k < c.K; ++k)
      if (is_expert(c, ids[k]))
        sum += weights[k] * on_wire(c, y(k, h, static_cast<int>(ids[k] * c.layout.ep / c.E)));
    return sum;
  }
  float of_rank(int64_t h, int rank) const {
    float sum = 0;
    for (int64_t k = 0; k < c.K; ++k)
      if (is_expert(c, ids[k]) && (c.layout.ep == 1 || ids[k] * c.layout.ep / c.E == rank))
        sum += weights[k] * y(k, h, rank);
    return sum;
  }
};

float token_output(const A2aCase& c, const TokenSum& token, int64_t h, float addend) {
  const int R = c.layout.tp;
  const bool whole = c.layout.ep == R;
  if (c.protocol == "deepep" || (c.deterministic && whole && c.protocol == "flashinfer"))
    return addend + token.by_slot(h);
  if (c.protocol == "none" && c.layout.dp == 1) {
    // Every rank adds its sums to its part of the addend (all of it on rank 0); the ranks are then summed in
    // order.
    if (c.deterministic && whole && R > 1) return addend + token.by_slot(h);
    float sum = addend + token.of_rank(h, 0);
    for (int r = 1; r < R; ++r) sum += token.of_rank(h, r);
    return sum;
  }
  if (c.deterministic && whole) return addend + token.by_slot(h);
  float sum = 0;
  for (int r = 0; r < R; ++r) sum += on_wire(c, token.of_rank(h, r));
  return addend + sum;
}

}  // namespace

TransportOptions A2aCase::options(int rank) const {
  TransportOptions o;
  o.problem.hidden_size = H;
  o.problem.intermediate_size = 64;
  o.problem.num_experts = E;
  o.problem.top_k = K;
  o.problem.act_dtype = dtype;
  o.problem.layout = layout;
  o.problem.layout.rank = rank;
  o.payload = payload;
  o.combine_payload = combine;
  o.deterministic = deterministic;
  o.checksum = checksum;
  o.memory_budget = budget;
  o.max_group_rows = max_group_rows;
  return o;
}

void fill_tokens(A2aCase& c, const TokenOptions& options) {
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  const int32_t no_experts[] = {-1, -2, static_cast<int32_t>(c.E), std::numeric_limits<int32_t>::min(),
                                std::numeric_limits<int32_t>::max()};
  c.groups.clear();
  for (const int64_t T : options.tokens) {
    GroupTokens g;
    g.T = T;
    for (int64_t i = 0; i < T * c.H; ++i) {
      g.x.push_back(rounded(normal(random), c.dtype));
      g.addend.push_back(normal(random));
    }
    for (int64_t i = 0; i < T * c.K; ++i) {
      const bool dropped = uniform(random) < options.dropped, hot = uniform(random) < options.hot;
      g.ids.push_back(dropped ? no_experts[random() % 5]
                      : hot   ? static_cast<int32_t>(c.E / 2)
                              : static_cast<int32_t>(random() % static_cast<uint64_t>(c.E)));
      g.weights.push_back(static_cast<float>(uniform(random)));
    }
    c.groups.push_back(std::move(g));
  }
}

A2aCase random_case(int ranks, int dp, Draw& draw) {
  A2aCase c;
  c.protocol = draw.of({"deepep", "deepep", "flashinfer", "flashinfer", "none"});
  c.layout = {ranks, ranks, dp, 0};
  if (c.protocol == "none" && draw.one_in(2)) c.layout.ep = 1;
  c.E = ranks * (1 + draw.below(6));
  c.K = 1 + draw.below(std::min<int64_t>(c.E, 8));
  c.H = 16 * (1 + draw.below(12));
  c.dtype = draw.one_in(4) ? DType::kF32 : DType::kBF16;
  c.payload = draw.of({Payload::kAct, Payload::kFp8, Payload::kNvfp4});
  c.combine = draw.one_in(4) ? CombinePayload::kFp8 : CombinePayload::kAct;
  c.per_token = draw.one_in(2);
  c.deterministic = draw.one_in(4);
  c.checksum = draw.one_in(2);
  c.max_group_rows = 96;
  c.layer = static_cast<int>(draw.below(60));
  TokenOptions tokens;
  tokens.seed = static_cast<uint64_t>(draw.below(int64_t{1} << 40));
  for (int g = 0; g < dp; ++g)
    tokens.tokens.push_back(draw.one_in(4) ? 0 : draw.one_in(3) ? draw.below(97) : draw.below(12));
  tokens.dropped = draw.of({0.0, 0.1, 0.9});
  tokens.hot = draw.of({0.0, 0.0, 0.5, 1.0});
  fill_tokens(c, tokens);
  c.budget = draw.of<int64_t>({48 << 10, 128 << 10, 1 << 20});
  while (!a2a_bytes(c.protocol.c_str(), c.options(0)).ok()) c.budget *= 2;
  return c;
}

float expert_value(const A2aCase& c, int64_t expert, float x, int64_t h, int rank) {
  const float factor = 0.125f * static_cast<float>(1 + expert % 13);
  const float bias = 0.01f * static_cast<float>(expert) + 0.001f * static_cast<float>(h % 7);
  if (c.layout.ep == c.layout.tp) return x * factor + bias;
  return x * (factor / static_cast<float>(c.layout.tp)) + (rank == 0 ? bias : 0.0f);
}

std::vector<std::vector<float>> expected_output(const A2aCase& c) {
  std::vector<std::vector<float>> out;
  std::vector<float> row;
  for (const GroupTokens& g : c.groups) {
    std::vector<float> y(g.x.size());
    for (int64_t t = 0; t < g.T; ++t) {
      const float scale = payload_row(c, g.x.data() + t * c.H, row);
      const TokenSum token{c, row.data(), scale, g.ids.data() + t * c.K, g.weights.data() + t * c.K};
      for (int64_t h = 0; h < c.H; ++h) {
        const auto i = static_cast<size_t>(t * c.H + h);
        y[i] = token_output(c, token, h, g.addend[i]);
      }
    }
    out.push_back(std::move(y));
  }
  return out;
}

std::string difference(const A2aCase& c, const std::vector<RankOutcome>& outcomes) {
  const auto expected = expected_output(c);
  for (size_t r = 0; r < outcomes.size(); ++r) {
    const RankOutcome& o = outcomes[r];
    if (!o.here) continue;
    const std::string rank = "rank " + std::to_string(r) + " of " + std::to_string(c.layout.tp) + ": ";
    if (!o.status.ok()) return rank + o.status.to_string();
    const auto& e = expected[r / static_cast<size_t>(c.layout.attention_tp())];
    if (!same_bits(o.out, e)) return rank + c.protocol + " differs from the plain loops";
  }
  return {};
}

// A rank's communicators, which live as long as the job.
struct A2aWorld::Rank {
  std::unique_ptr<FaultyEndpoint> faulty;
  std::unique_ptr<Communicator> world, attention;
  std::unique_ptr<ThreadPool> pool = std::make_unique<ThreadPool>(1);
  int64_t region_offset = 0;
};

A2aWorld::A2aWorld(const Options& options) : options_(options) {
  const int R = options.ranks, group = R / options.dp;
  constexpr int64_t kStaging = 4096;
  const int64_t world_bytes = Communicator::heap_bytes(R, options.record_bytes, kStaging);
  const int64_t group_bytes = Communicator::heap_bytes(group, 64, kStaging);
  JobOptions job;
  job.fabric = options.fabric;
  job.num_ranks = R;
  job.heap_bytes = world_bytes + group_bytes + options.heap_bytes + 256;
  job.first_signal = options.first_signal;
  auto opened = Job::open(job);
  EXPECT_TRUE(opened.ok()) << opened.status().to_string();
  job_ = std::move(*opened);
  CommOptions comm;
  comm.timeout = std::chrono::nanoseconds(static_cast<int64_t>(options.timeout_seconds * 1e9));
  comm.first_epoch = options.first_signal + 1;
  ranks_.resize(static_cast<size_t>(R));
  for (int r = job_->first_rank(); r < job_->first_rank() + job_->num_local_ranks(); ++r) {
    auto rank = std::make_unique<Rank>();
    Endpoint* endpoint = &job_->endpoint(r);
    if (!options.faults.empty()) {
      rank->faulty = std::make_unique<FaultyEndpoint>(*endpoint, options.faults[static_cast<size_t>(r)]);
      endpoint = rank->faulty.get();
    }
    const auto up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    rank->world = std::make_unique<Communicator>(*endpoint, 0, R,
                                                 CommRegion{0, options.record_bytes, kStaging, 8}, comm);
    rank->attention = std::make_unique<Communicator>(*endpoint, r / group * group, group,
                                                     CommRegion{up(world_bytes), 64, kStaging, 4}, comm);
    rank->region_offset = up(world_bytes) + up(group_bytes);
    ranks_[static_cast<size_t>(r)] = std::move(rank);
  }
}
A2aWorld::~A2aWorld() = default;

Endpoint& A2aWorld::endpoint(int rank) { return job_->endpoint(rank); }

std::vector<RankOutcome> A2aWorld::run(const A2aCase& c, int repeats, const Edit& edit) {
  std::vector<RankOutcome> outcomes(static_cast<size_t>(options_.ranks));
  std::vector<A2aCase> cases(outcomes.size(), c);
  std::vector<std::thread> threads;
  for (int r = 0; r < options_.ranks; ++r) {
    const auto i = static_cast<size_t>(r);
    outcomes[i].here = ranks_[i] != nullptr;
    if (!outcomes[i].here) continue;
    if (edit) edit(r, cases[i]);
    threads.emplace_back([&, r, i] { run_rank(r, cases[i], repeats, outcomes[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

namespace {

// Applies the experts' functions to a batch; the other rows of y become NaN.
void run_experts(const A2aCase& c, int rank, const ExpertBatch& batch) {
  std::fill(batch.y, batch.y + batch.x.rows * c.H, kNaN);
  const int64_t L = batch.num_experts, first = c.layout.ep == 1 ? 0 : rank * L;
  for (int64_t e = 0; e < L; ++e)
    for (int64_t r = batch.first_row(e); r < batch.first_row(e) + batch.num_rows(e); ++r)
      for (int64_t h = 0; h < c.H; ++h) {
        const int64_t i = r * c.H + h;
        const float x = c.dtype == DType::kBF16 ? bf16_to_float(static_cast<const bf16*>(batch.x.data)[i])
                                                : static_cast<const float*>(batch.x.data)[i];
        const float scale = batch.x_row_scales == nullptr ? 1.0f : batch.x_row_scales[r];
        batch.y[i] = expert_value(c, first + e, x * scale, h, rank);
      }
}

// This rank's rows in the form that the transport takes.
struct OwnRows {
  OwnRows(const A2aCase& c, const GroupTokens& g, Shard own) {
    const auto first = g.x.begin() + own.first * c.H;
    f32.assign(first, first + own.count * c.H);
    for (const float x : f32) b16.push_back(float_to_bf16(x));
    input.group_rows = g.T;
    input.layer = c.layer;
    input.x = {c.dtype == DType::kBF16 ? static_cast<void*>(b16.data()) : f32.data(), c.dtype, own.count,
               c.H};
    input.ids = g.ids.data() + own.first * c.K;
    input.weights = g.weights.data() + own.first * c.K;
    input.nvfp4_per_token = c.per_token;
    input.nvfp4_scale = {c.nvfp4_scale};
  }
  std::vector<float> f32;
  std::vector<bf16> b16;
  TransportInput input;
};

// The state that all exchanges of a rank use.
struct RankRun {
  const A2aCase& c;
  int rank;
  Arena& scratch;
  ThreadPool& pool;
};

Status exchange(const RankRun& run, Transport& transport, const TransportInput& input, RankOutcome& outcome) {
  Arena& scratch = run.scratch;
  ThreadPool& pool = run.pool;
  scratch.reset();
  outcome.rounds = 0;
  if (Status s = transport.begin(input, scratch, pool); !s.ok()) return s;
  const int64_t used = scratch.used_bytes();
  for (;;) {
    ExpertBatch batch;
    const Result<bool> more = transport.next(batch, scratch, pool);
    if (!more.ok()) return more.status();
    if (!*more) break;
    ++outcome.rounds;
    outcome.batch_rows = std::max(outcome.batch_rows, batch.x.rows);
    outcome.expected_m = batch.expected_m;
    run_experts(run.c, run.rank, batch);
    if (Status s = transport.combine(batch, scratch, pool); !s.ok()) return s;
    outcome.arena_used = std::max(outcome.arena_used, scratch.used_bytes());
    scratch.rewind(used);
  }
  return transport.finish(outcome.out.data(), pool);
}

}  // namespace

void A2aWorld::run_rank(int rank, const A2aCase& c, int repeats, RankOutcome& outcome) {
  Rank& self = *ranks_[static_cast<size_t>(rank)];
  const GroupTokens& g = c.groups[static_cast<size_t>(rank / c.layout.attention_tp())];
  TransportOptions options = c.options(rank);
  options.region_offset = self.region_offset;
  const auto make = c.protocol == "deepep"       ? make_deepep
                    : c.protocol == "flashinfer" ? make_flashinfer
                                                 : make_none;
  auto transport = make(options, self.world.get(), self.attention.get());
  if (!transport.ok()) {
    outcome.status = transport.status();
    return;
  }
  outcome.arena_promised = (*transport)->scratch_bytes();
  auto scratch = Arena::make(outcome.arena_promised);
  const Shard own = (*transport)->own_rows(g.T);
  const OwnRows rows(c, g, own);
  // With a2a none and one group, the ranks' partial sums are added, so rank 0 contributes the whole addend.
  const bool mine = c.protocol != "none" || c.layout.dp > 1 || rank == 0;
  for (int i = 0; i < repeats; ++i) {
    outcome.out.assign(g.addend.size(), kNaN);
    for (int64_t at = own.first * c.H; at < (own.first + own.count) * c.H; ++at)
      outcome.out[static_cast<size_t>(at)] = mine ? g.addend[static_cast<size_t>(at)] : 0.0f;
    outcome.status = exchange({c, rank, *scratch, *self.pool}, **transport, rows.input, outcome);
    if (!outcome.status.ok()) return;
  }
}

}  // namespace fp4moe::test
