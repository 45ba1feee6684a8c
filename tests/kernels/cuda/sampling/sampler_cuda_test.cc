// Compares sampling on the GPU with Sampler of engine/output/sampler.h, row by row.
// tests/engine/output/sampler_test.cc compares Sampler with a naive version of its definition.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "device/stream.h"
#include "engine/output/sampler.h"
#include "kernels/cuda/device_array.h"
#include "kernels/device_sampler.h"

namespace fp4moe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RowCase {
  std::vector<float> logits;
  SamplingParams params;
  double random = 0.5;
  std::vector<LogitEdit> edits = {};
  int32_t given_id = -1;
  std::vector<uint32_t> allowed = {};
};

class SamplerCuda : public testing::Test {
 protected:
  std::vector<SampledRow> run(const std::vector<RowCase>& rows, const std::vector<int32_t>& masked = {}) {
    const size_t vocab_size = rows.empty() ? 8 : rows[0].logits.size(), stride = vocab_size + 3;
    std::vector<float> logits(rows.size() * stride, std::nanf(""));
    std::vector<SampleRowParams> params;
    std::vector<LogitEdit> edits = {{.token_id = 0, .add = 1e9f}};  // belongs to no row
    const size_t words = (vocab_size + 31) / 32;
    std::vector<uint32_t> allowed(words);  // belongs to no row
    std::vector<int32_t> ids = {0};        // belongs to no row
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy(rows[i].logits.begin(), rows[i].logits.end(), logits.begin() + static_cast<long>(i * stride));
      const SamplingParams& p = rows[i].params;
      params.push_back(
          {.random = rows[i].random,
           .temperature = p.temperature,
           .top_p = p.top_p,
           .top_k = p.top_k,
           .top_logprobs = p.top_logprobs,
           .min_p = p.min_p,
           .given_id = rows[i].given_id,
           .first_edit = static_cast<int32_t>(edits.size()),
           .num_edits = static_cast<int32_t>(rows[i].edits.size()),
           .first_logprob_id = static_cast<int32_t>(ids.size()),
           .num_logprob_ids = static_cast<int32_t>(p.token_ids_logprob.size()),
           .allowed = rows[i].allowed.empty() ? -1 : static_cast<int32_t>(allowed.size() / words)});
      allowed.insert(allowed.end(), rows[i].allowed.begin(), rows[i].allowed.end());
      edits.insert(edits.end(), rows[i].edits.begin(), rows[i].edits.end());
      ids.insert(ids.end(), p.token_ids_logprob.begin(), p.token_ids_logprob.end());
    }
    const DeviceArray<float> device_logits(logits);
    const DeviceArray<SampleRowParams> device_params(params);
    const std::vector<uint32_t> bits = bits_of(masked, vocab_size);
    const bool all_greedy = std::all_of(params.begin(), params.end(), is_plain_greedy);
    const DeviceArray<LogitEdit> device_edits(edits);
    const DeviceArray<uint32_t> device_allowed(allowed);
    const DeviceArray<uint32_t> device_masked(bits);
    const DeviceArray<int32_t> device_ids(ids);
    const DeviceArray<int32_t> device_chosen(chosen_), device_put_ids(put_ids_);
    const DeviceArray<float> id_logprobs(std::vector<float>(ids.size(), 1));
    const DeviceArray<SampledRow> out(std::vector<SampledRow>(rows.size())), copy(out.values());
    cuda_sample_rows()({.logits = device_logits.data(),
                        .num_rows = static_cast<int64_t>(rows.size()),
                        .vocab_size = static_cast<int64_t>(vocab_size),
                        .row_stride = static_cast<int64_t>(stride),
                        .masked = masked.empty() ? nullptr : device_masked.data(),
                        .params = all_greedy ? nullptr : device_params.data(),
                        .edits = device_edits.data(),
                        .chosen = {device_chosen.data() + 1, 2},
                        .allowed = device_allowed.data(),
                        .logprob_ids = device_ids.data(),
                        .id_logprobs = id_logprobs.data(),
                        .all_greedy = all_greedy,
                        .put_ids = put_ids_.empty() ? nullptr : device_put_ids.data(),
                        .out = out.data(),
                        .copy = copy.data()});
    const Status status = stream_.synchronize();
    EXPECT_TRUE(status.ok()) << status.message();
    id_logprobs_ = id_logprobs.values();
    EXPECT_EQ(id_logprobs_[0], 1);
    expect_same(out.values(), copy.values());
    return out.values();
  }

  static std::vector<uint32_t> bits_of(const std::vector<int32_t>& masked, size_t vocab_size) {
    std::vector<uint32_t> bits(masked.empty() ? 0 : vocab_size / 32 + 1);
    for (const int32_t id : masked) bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    return bits;
  }

  static void expect_same(const std::vector<SampledRow>& got, const std::vector<SampledRow>& copied) {
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].status, copied[i].status);
      EXPECT_EQ(got[i].token_id, copied[i].token_id);
    }
  }

  // Compares every field of every row with the CPU's; returns the number of rows that drew a different id.
  int compare(const std::vector<RowCase>& rows, const std::vector<int32_t>& masked = {}) {
    const std::vector<SampledRow> got = run(rows, masked);
    int num_other = 0;
    size_t first_id = 1, num_ids = 0;
    for (size_t i = 0; i < rows.size(); ++i, first_id += num_ids) {
      num_ids = rows[i].params.token_ids_logprob.size();
      const Sampler sampler(static_cast<int64_t>(rows[i].logits.size()), masked);
      std::vector<float> logits = rows[i].logits;
      const RowCase& row = rows[i];
      const Result<SampledToken> expected =
          row.given_id >= 0 ? sampler.score(logits, row.given_id, row.params)
                            : sampler.sample(logits, row.params, row.random, row.edits, row.allowed);
      EXPECT_EQ(got[i].status == SampleStatus::kOk, expected.ok()) << "row " << i;
      if (!expected.ok() || got[i].status != SampleStatus::kOk) continue;
      num_other += got[i].token_id != expected->token_id;
      if (rows[i].params.top_logprobs < 0) continue;
      if (got[i].token_id == expected->token_id) {
        EXPECT_NEAR(got[i].logprob, expected->logprob, 4e-6) << "row " << i;
      }
      EXPECT_EQ(got[i].num_top, static_cast<int32_t>(expected->top.size()));
      for (size_t j = 0; j < expected->top.size(); ++j) {
        EXPECT_EQ(got[i].top_ids[j], expected->top[j].token_id) << "row " << i << ", place " << j;
        EXPECT_NEAR(got[i].top_logprobs[j], expected->top[j].logprob, 4e-6);
      }
      for (size_t j = 0; j < num_ids; ++j)
        EXPECT_NEAR(id_logprobs_[first_id + j], expected->ids[j].logprob, 4e-6)
            << "row " << i << ", id " << j;
    }
    return num_other;
  }

  std::vector<float> id_logprobs_;         // of the last run; the first belongs to no row
  std::vector<int32_t> chosen_ = {-9, 0};  // negative id ~r of an edit: element 2r + 1
  std::vector<int32_t> put_ids_;           // SampleRowsArgs::put_ids, or empty
  Stream stream_ = std::move(Stream::make()).value();
  StreamScope scope_{stream_};
};

std::vector<float> random_logits(size_t vocab_size, unsigned seed, float scale = 2) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> logits(vocab_size);
  for (float& x : logits) x = normal(generator);
  return logits;
}

// Returns edits of distinct random ids in random order; some add a positive value, some a negative value,
// some -infinity.
std::vector<LogitEdit> random_edits(size_t vocab_size, size_t num_edits, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-3, 3);
  std::vector<int32_t> ids(vocab_size);
  for (size_t id = 0; id < vocab_size; ++id) ids[id] = static_cast<int32_t>(id);
  std::shuffle(ids.begin(), ids.end(), generator);
  std::vector<LogitEdit> edits;
  for (size_t i = 0; i < std::min(num_edits, vocab_size); ++i)
    edits.push_back({.token_id = ids[i],
                     .add = i % 5 == 4 ? -kInfinity : uniform(generator),
                     .scale = i % 2 == 0 ? 1.0f : 1.5f + uniform(generator) / 3,
                     .bias = i % 3 == 0 ? 0.0f : uniform(generator)});
  return edits;
}

TEST_F(SamplerCuda, NoRows) { EXPECT_TRUE(run({}).empty()); }

TEST_F(SamplerCuda, GreedyTakesTheLargestAndTiesGoToTheLowerId) {
  for (size_t vocab_size : {1, 2, 7, 8, 9, 40, 4097}) {
    std::vector<RowCase> rows;
    for (size_t best = 0; best < std::min<size_t>(vocab_size, 40); ++best) {
      std::vector<float> logits(vocab_size, -1);
      logits[best] = logits.back() = 3;
      rows.push_back({logits, {.temperature = 0, .top_logprobs = static_cast<int32_t>(best % 21)}});
    }
    EXPECT_EQ(compare(rows), 0);
  }
}

// The best id of a row is replaced by another one, or by none.
TEST_F(SamplerCuda, GreedyRowsPutOtherIds) {
  for (const size_t vocab_size : {1, 33, 201088}) {
    std::vector<RowCase> rows;
    std::vector<int32_t> best;
    for (unsigned i = 0; i < 40; ++i) {
      rows.push_back({random_logits(vocab_size, i), {.temperature = 0}});
      if (i == 7) rows.back().logits[vocab_size / 2] = std::nanf("");
      const auto& logits = rows.back().logits;
      best.push_back(static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin()));
    }
    put_ids_.resize(vocab_size);
    for (size_t id = 0; id < vocab_size; ++id)
      put_ids_[id] = id % 3 == 1 ? -1 : static_cast<int32_t>(vocab_size + 5 * id);
    const std::vector<SampledRow> got = run(rows);
    put_ids_.clear();
    for (size_t i = 0; i < rows.size(); ++i) {
      const bool has_id = i != 7 && best[i] % 3 != 1;
      EXPECT_EQ(got[i].status, i == 7   ? SampleStatus::kBadLogits
                               : has_id ? SampleStatus::kOk
                                        : SampleStatus::kNoToken);
      EXPECT_EQ(got[i].token_id, has_id ? static_cast<int32_t>(vocab_size) + 5 * best[i] : 0) << "row " << i;
    }
  }
}

// An edit of an id on the device, alone and after one of the same id.
TEST_F(SamplerCuda, EditsOfIdsOnTheDevice) {
  for (const size_t vocab_size : {1, 33, 4097}) {
    std::vector<RowCase> known, unknown;
    chosen_.clear();
    for (unsigned i = 0; i < 40; ++i) {
      const auto id = static_cast<int32_t>(i * 977 % vocab_size);
      chosen_.insert(chosen_.end(), {-9, id});
      RowCase row{random_logits(vocab_size, i), {.temperature = i % 2 == 0 ? 0.0f : 1.0f}, 0.02 * i};
      const float add = i % 3 == 0 ? -1e9f : 4;
      if (i % 4 == 1) row.edits = {{.token_id = id, .add = 0.5f}, {.token_id = id, .bias = add}};
      if (i % 4 == 2) row.edits = {{.token_id = id, .bias = add}};
      if (i % 4 == 3) row.edits = random_edits(vocab_size, 20, i), row.edits.push_back({id, 0, 1, add});
      known.push_back(row);
      if (!row.edits.empty()) row.edits.back().token_id = ~static_cast<int32_t>(i);
      unknown.push_back(row);
    }
    const std::vector<SampledRow> got = run(unknown);
    for (size_t i = 0; i < known.size(); ++i) {
      const Sampler sampler(static_cast<int64_t>(vocab_size), {});
      const auto expected =
          sampler.sample(known[i].logits, known[i].params, known[i].random, known[i].edits, {});
      ASSERT_TRUE(expected.ok());
      EXPECT_EQ(got[i].token_id, expected->token_id) << "row " << i << " of " << vocab_size;
    }
  }
}

// Masked rows with and without edits, sampled in every way and mixed with rows without a mask; also masks
// that allow no id.
TEST_F(SamplerCuda, MasksOfRows) {
  std::mt19937 generator(5);
  const SamplingParams ways[] = {{.temperature = 0},
                                 {.temperature = 0, .top_logprobs = 5},
                                 {.temperature = 0.8f, .top_logprobs = 0},
                                 {.temperature = 1, .top_p = 0.9f},
                                 {.temperature = 1, .top_k = 3, .top_logprobs = 20}};
  for (size_t vocab_size : {1, 31, 32, 33, 772, 4097, 201088}) {
    std::vector<RowCase> rows;
    for (size_t i = 0; i < 30; ++i) {
      RowCase row{random_logits(vocab_size, static_cast<unsigned>(i)), ways[i % 5],
                  0.03 * static_cast<double>(i)};
      if (i % 4 == 1) row.edits = {{.token_id = 0, .add = 3}};
      const unsigned one_in = i % 3 == 0 ? 1000 : 2;
      if (i % 7 != 0) row.allowed.resize((vocab_size + 31) / 32);
      for (size_t id = 0; id < vocab_size && !row.allowed.empty(); ++id)
        if (generator() % one_in == 0) row.allowed[id / 32] |= 1u << (id % 32);
      rows.push_back(std::move(row));
    }
    EXPECT_EQ(compare(rows), 0);
  }
}

TEST_F(SamplerCuda, RowsThatAreAllGreedy) {
  const SamplingParams greedy{.temperature = 0};
  for (size_t vocab_size : {1, 2, 7, 8, 9, 40, 4097, 5000, 201088}) {
    std::vector<RowCase> rows;
    const size_t num_rows = vocab_size <= 5000 ? 40 : 12;  // few and many rows are launched differently
    for (size_t i = 0; i < num_rows; ++i) {
      std::vector<float> logits = random_logits(vocab_size, i);
      if (i % 3 == 1) logits[vocab_size / 2] = logits[vocab_size - 1] = 9;
      if (i % 6 == 2) logits[i * vocab_size / num_rows] = i % 4 == 0 ? kInfinity : std::nanf("");
      if (i == 5) std::fill(logits.begin(), logits.end(), -kInfinity);
      rows.push_back({logits, greedy});
    }
    EXPECT_EQ(compare(rows), 0);
    std::vector<int32_t> masked;
    for (size_t id = 0; id < vocab_size; ++id)
      if (id == vocab_size / 2 || id % 3 == 1) masked.push_back(static_cast<int32_t>(id));
    EXPECT_EQ(compare(rows, masked), 0);
    EXPECT_EQ(run(rows)[5].status, SampleStatus::kBadLogits);
  }
  EXPECT_EQ(run({{{1, -kInfinity, -kInfinity}, greedy}}, {0})[0].status, SampleStatus::kNoToken);
}

TEST_F(SamplerCuda, ZerosOfEitherSignAreEqual) {
  EXPECT_EQ(compare({{{-1, -0.0f, 0.0f}, {.temperature = 0, .top_logprobs = 3}},
                     {{0.0f, -0.0f, 0.0f}, {.top_k = 2}, 0.9}}),
            0);
}

TEST_F(SamplerCuda, NanAndInfinityAreReportedForTheirRowOnly) {
  std::vector<RowCase> rows;
  for (size_t i = 0; i < 33; ++i)
    for (const float bad : {std::nanf(""), -std::nanf(""), kInfinity}) {
      std::vector<float> logits(33, 0.5f);
      logits[i] = bad;
      rows.push_back({logits, {.temperature = i % 2 == 0 ? 0.0f : 1.0f}});
      rows.push_back({std::vector<float>(33, 0.25f), {}, 0.1});
    }
  rows.push_back({std::vector<float>(33, -kInfinity), {}});
  compare(rows);
  EXPECT_EQ(run(rows).back().status, SampleStatus::kBadLogits);
  EXPECT_EQ(run({{{1, -kInfinity, -kInfinity}, {}}}, {0})[0].status, SampleStatus::kNoToken);
}

TEST_F(SamplerCuda, MaskedIdsAreNeitherDrawnNorListedButCountInTheNormaliser) {
  std::vector<RowCase> rows;
  for (int i = 0; i < 40; ++i)
    rows.push_back(
        {{5, 1, 5, 0, 2, -kInfinity, 1},
         {.temperature = static_cast<float>(i % 2), .top_p = i % 3 == 0 ? 0.6f : 1.0f, .top_logprobs = 6},
         (i + 0.5) / 40});
  EXPECT_EQ(compare(rows, {0, 2}), 0);
}

TEST_F(SamplerCuda, AllCutsOnAGridOfRandomNumbers) {
  std::vector<float> logits = random_logits(64, 3);
  logits[9] = logits[40];
  for (const float temperature : {0.25f, 1.0f, 3.0f})
    for (const int32_t top_k : {-1, 1, 3, 17, 64, 1000})
      for (const float top_p : {0.1f, 0.5f, 0.9f, 0.999f, 1.0f}) {
        std::vector<RowCase> rows;
        for (int i = 0; i < 50; ++i)
          rows.push_back(
              {logits, {.temperature = temperature, .top_p = top_p, .top_k = top_k}, (i + 0.5) / 50});
        EXPECT_EQ(compare(rows), 0) << temperature << " " << top_k << " " << top_p;
      }
}

TEST_F(SamplerCuda, MinPBesidesTheOtherCutsOnAGridOfRandomNumbers) {
  std::vector<float> logits = random_logits(64, 3);
  logits[9] = logits[40];
  for (const float min_p : {1e-6f, 0.02f, 0.3f, 0.999f, 1.0f})
    for (const int32_t top_k : {-1, 3, 64})
      for (const float top_p : {0.5f, 0.97f, 1.0f}) {
        std::vector<RowCase> rows;
        for (int i = 0; i < 50; ++i)
          rows.push_back({logits,
                          {.temperature = 1.5f, .top_p = top_p, .top_k = top_k, .min_p = min_p},
                          (i + 0.5) / 50});
        EXPECT_EQ(compare(rows), 0) << min_p << " " << top_k << " " << top_p;
      }
}

TEST_F(SamplerCuda, EditedRowsBesideOthers) {
  int num_other = 0;
  for (const size_t vocab_size : {1, 9, 64, 5000, 201088}) {
    std::vector<RowCase> rows;
    for (int i = 0; i < 60; ++i) {
      const auto n = static_cast<unsigned>(i);
      RowCase row{random_logits(vocab_size, n, i % 4 == 0 ? 20.0f : 2.0f),
                  {.temperature = static_cast<float>(i % 3),
                   .top_p = i % 4 == 1 ? 0.8f : 1.0f,
                   .top_k = i % 5 == 1 ? 10 : -1,
                   .min_p = i % 7 == 1 ? 0.1f : 0.0f,
                   .top_logprobs = i % 22 - 1},
                  (i + 0.5) / 60};
      if (i % 6 != 5) row.edits = random_edits(vocab_size, static_cast<size_t>(1) << i % 12, n);
      rows.push_back(std::move(row));
    }
    num_other += compare(rows);
    if (vocab_size > 9) num_other += compare(rows, {0, 5, 8});
  }
  EXPECT_LE(num_other, 1);
  const LogitEdit never{.token_id = 0, .add = -kInfinity};
  const SamplingParams greedy{.temperature = 0, .top_logprobs = 1};
  const std::vector<SampledRow> none =
      run({{{1, -kInfinity}, greedy, 0.5, {never}},
           {{1, -kInfinity}, greedy, 0.5, {{.token_id = 0, .scale = 1e-30f}}},
           {{3e38f, 1}, {}, 0.5, {{.token_id = 0, .scale = 1e-30f}}}});
  EXPECT_EQ(none[0].status, SampleStatus::kNoToken);
  EXPECT_EQ(none[1].status, SampleStatus::kOk);
  EXPECT_EQ(none[2].token_id, 0);
}

TEST_F(SamplerCuda, GivenIdsAreScored) {
  std::vector<RowCase> rows;
  for (const size_t vocab_size : {1, 9, 5000}) {
    rows.clear();
    for (int i = 0; i < 60; ++i)
      rows.push_back({random_logits(vocab_size, static_cast<unsigned>(i)),
                      {.temperature = static_cast<float>(i % 2), .top_p = 0.5f, .top_logprobs = i % 21},
                      0.5,
                      {},
                      static_cast<int32_t>(static_cast<size_t>(i) * 7 % vocab_size)});
    EXPECT_EQ(compare(rows), 0);
    if (vocab_size > 9) {
      EXPECT_EQ(compare(rows, {0, 7, 14}), 0);
    }
  }
  EXPECT_EQ(run({{{1, std::nanf("")}, {.top_logprobs = 0}, 0.5, {}, 1}})[0].status, SampleStatus::kBadLogits);
}

// Ids of every block, masked and repeated ones, in rows that are sampled in every way.
TEST_F(SamplerCuda, ListedIds) {
  for (const size_t vocab_size : {1, 9, 5000, 201088}) {
    std::vector<RowCase> rows;
    for (unsigned i = 0; i < 40; ++i) {
      RowCase row{random_logits(vocab_size, i),
                  {.temperature = static_cast<float>(i % 3) / 2,
                   .top_k = i % 5 == 1 ? 3 : -1,
                   .top_logprobs = static_cast<int32_t>(i % 4)}};
      for (unsigned k = 0; k < i * i % 129; ++k)
        row.params.token_ids_logprob.push_back(static_cast<int32_t>((i * 997 + k * 50021) % vocab_size));
      if (i % 4 == 2) row.given_id = 0;
      if (i % 4 == 3) row.edits = random_edits(vocab_size, 5, i);
      rows.push_back(std::move(row));
    }
    EXPECT_EQ(compare(rows), 0);
    if (vocab_size > 9) {
      EXPECT_EQ(compare(rows, {0, 997, 4999}), 0);
    }
  }
}

TEST_F(SamplerCuda, Edges) {
  const std::vector<float> logits = random_logits(500, 2), equal(7, 1.0f);
  const double last = 1 - 0x1p-53;
  EXPECT_EQ(compare({{logits, {.top_p = 1e-9f}, last},
                     {logits, {.top_k = 1}, last},
                     {logits, {.temperature = 1e-30f}, last},
                     {logits, {.temperature = 100}, last},
                     {logits, {}, 0}}),
            0);
  EXPECT_EQ(
      compare(
          {{equal, {.top_p = 0.42f}, last}, {equal, {.top_p = 0.43f}, last}, {equal, {.top_k = 1000}, last}}),
      0);
}

// Large vocabularies with all kinds of parameters. At most one of more than 2000 draws can fall so close to
// an edge that its id differs.
TEST_F(SamplerCuda, WholeVocabularies) {
  std::mt19937 generator(5);
  std::uniform_real_distribution<double> uniform(0, 1);
  int num_other = 0, num_rows = 0;
  for (const size_t vocab_size : {50000, 201088}) {
    std::vector<int32_t> masked;
    for (size_t id = vocab_size - 1000; id < vocab_size; ++id) masked.push_back(static_cast<int32_t>(id));
    for (const float scale : {0.0f, 0.5f, 3.0f}) {
      const std::vector<float> logits = random_logits(vocab_size, 6, scale);
      std::vector<RowCase> rows;
      for (const float temperature : {0.0f, 0.7f, 1.5f})
        for (const int32_t top_k : {-1, 50, 5000})
          for (const float top_p : {0.3f, 0.95f, 1.0f})
            rows.push_back({logits,
                            {.temperature = temperature,
                             .top_p = top_p,
                             .top_k = top_k,
                             .top_logprobs = static_cast<int32_t>(rows.size() % 21) - 1},
                            uniform(generator)});
      num_other += compare(rows, masked);
      num_rows += static_cast<int>(rows.size());
    }
  }
  std::vector<RowCase> rows;
  const std::vector<float> logits = random_logits(3000, 7, 1.5f);
  for (int i = 0; i < 2000; ++i)
    rows.push_back(
        {logits, {.top_p = i % 2 == 0 ? 1.0f : 0.97f, .top_k = i % 3 == 0 ? 900 : -1}, uniform(generator)});
  num_other += compare(rows);
  RecordProperty("other_ids", num_other);
  EXPECT_LE(num_other, 1) << "of " << num_rows + 2000;
}

TEST_F(SamplerCuda, GivesTheSameBitsAlways) {
  std::vector<RowCase> rows;
  for (int i = 0; i < 30; ++i)
    rows.push_back({random_logits(201088, static_cast<unsigned>(i)),
                    {.temperature = 1, .top_p = 0.9f, .top_k = i % 2 == 0 ? -1 : 4000, .top_logprobs = 20},
                    (i + 0.5) / 30});
  const std::vector<SampledRow> first = run(rows);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const std::vector<SampledRow> again = run(rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      ASSERT_EQ(again[i].token_id, first[i].token_id);
      ASSERT_EQ(again[i].logprob, first[i].logprob);
      ASSERT_TRUE(std::equal(first[i].top_ids, first[i].top_ids + 20, again[i].top_ids));
      ASSERT_TRUE(std::equal(first[i].top_logprobs, first[i].top_logprobs + 20, again[i].top_logprobs));
    }
  }
}

}  // namespace
}  // namespace fp4moe
