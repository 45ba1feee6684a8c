// Compares greedy tokens of rows whose logits are distributed over ranks with those of whole rows, and both
// with a loop on the host. If the machine has fewer GPUs than ranks, several ranks share a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "comm/gpu_ranks.h"
#include "device/graph.h"
#include "kernels/device_sampler.h"

namespace fp4moe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr auto kUnset = static_cast<SampleStatus>(77);

using Mask = std::vector<bool>;  // by id; empty: no id is masked

bool is_masked(const Mask& mask, int64_t id) { return !mask.empty() && mask[static_cast<size_t>(id)]; }

struct Token {
  SampleStatus status = SampleStatus::kOk;
  int32_t id = 0;
  bool operator==(const Token&) const = default;
};

Token expected_token(const float* logits, int64_t vocab_size, const Mask& masked) {
  bool is_empty = true;
  int32_t best = -1;
  for (int32_t id = 0; id < vocab_size; ++id) {
    if (std::isnan(logits[id]) || logits[id] == kInfinity) return {SampleStatus::kBadLogits, 0};
    if (logits[id] == -kInfinity) continue;
    is_empty = false;
    if (!is_masked(masked, id) && (best < 0 || logits[id] > logits[best])) best = id;
  }
  if (best >= 0) return {SampleStatus::kOk, best};
  return {is_empty ? SampleStatus::kBadLogits : SampleStatus::kNoToken, 0};
}

// Rows of every kind: many ties, one value only, NaN and infinities at any id, and few or no ids to choose.
std::vector<float> rows_of(int64_t num_rows, int64_t vocab_size, const Mask& masked,
                           std::mt19937_64& random) {
  std::vector<float> logits(static_cast<size_t>(num_rows * vocab_size));
  for (int64_t row = 0; row < num_rows; ++row) {
    float* const x = &logits[static_cast<size_t>(row * vocab_size)];
    const auto somewhere = [&] { return random() % static_cast<uint64_t>(vocab_size); };
    const uint64_t kind = random() % 12;
    const float scale = kind % 2 == 0 ? 0.25f : 1e-3f;  // 0.25: few values, so that the best one is a tie
    for (int64_t id = 0; id < vocab_size; ++id)
      x[id] = scale * static_cast<float>(static_cast<int64_t>(random() % 41) - 20);
    if (kind == 2) std::fill_n(x, vocab_size, -3.5f);
    if (kind == 3) x[somewhere()] = std::nanf("");
    if (kind == 4) x[somewhere()] = -std::nanf("");
    if (kind == 5) x[somewhere()] = kInfinity;
    if (kind == 6) std::fill_n(x, vocab_size, -kInfinity);
    if (kind == 7)
      std::fill_n(x, vocab_size, -kInfinity), x[somewhere()] = -std::numeric_limits<float>::max();
    if (kind == 8)
      for (int64_t id = 0; id < vocab_size; ++id) x[id] = is_masked(masked, id) ? 1 : -kInfinity;
    if (kind == 9)
      for (int64_t id = 0; id < vocab_size; ++id) x[id] = random() % 2 == 0 ? 0.0f : -0.0f;
    if (kind == 10) x[somewhere()] = x[somewhere()] = std::numeric_limits<float>::max();
    if (kind == 11) x[somewhere()] = -kInfinity;
  }
  return logits;
}

// Rows of logits on all ranks; rank r has the ids [first[r], first[r + 1]).
class ShardedRows {
 public:
  ShardedRows(TestGroup& group, int64_t num_rows, const std::vector<int64_t>& first, const Mask& masked)
      : group_(group), num_rows_(num_rows), first_(first), masked_(masked) {
    std::vector<uint32_t> bits(static_cast<size_t>((vocab_size() + 31) / 32));
    for (size_t id = 0; id < masked.size(); ++id) bits[id / 32] |= uint32_t{masked[id]} << (id % 32);
    group.for_each([&](int r, DeviceCommunicator&) {
      logits_.push_back(on_device(std::vector<float>(static_cast<size_t>(num_rows * count(r)))));
      mask_.push_back(on_device(bits));
      for (auto* const rows : {&out_, &copy_}) rows->push_back(on_device(unset()));
      if (r > 0) return;
      whole_ = on_device(std::vector<float>(static_cast<size_t>(num_rows * vocab_size())));
      whole_out_ = on_device(unset());
    });
  }
  int64_t vocab_size() const { return first_.back(); }

  // Replaces the logits and clears the results of all ranks, which must be idle.
  void fill(std::mt19937_64& random) {
    const std::vector<float> logits = rows_of(num_rows_, vocab_size(), masked_, random);
    expected_.clear();
    for (int64_t row = 0; row < num_rows_; ++row)
      expected_.push_back(
          expected_token(&logits[static_cast<size_t>(row * vocab_size())], vocab_size(), masked_));
    group_.for_each([&](int r, DeviceCommunicator&) {
      std::vector<float> part;
      for (int64_t row = 0; row < num_rows_; ++row) {
        const auto begin = logits.begin() + row * vocab_size();
        part.insert(part.end(), begin + first_[index(r)], begin + first_[index(r) + 1]);
      }
      put(logits_[index(r)], part);
      for (auto* const rows : {&out_, &copy_}) put((*rows)[index(r)], unset());
      if (r > 0) return;
      put(whole_, logits);
      put(whole_out_, unset());
    });
  }
  void enqueue(int r, const DeviceCommunicator& rank) { enqueue(r, rank, 0, num_rows_); }
  // The rank gets the results of `count` rows from `first` on.
  void enqueue(int r, const DeviceCommunicator& rank, int64_t first, int64_t num_own) {
    const CommGroup group = rank.exchange_group();
    SampleRowsArgs rows = whole_rows(r);
    rows.num_rows = num_own;
    rows.logits = logits_[index(r)].as<float>();
    rows.vocab_size = rows.row_stride = count(r);
    rows.out = out_[index(r)].as<SampledRow>();
    rows.copy = copy_[index(r)].as<SampledRow>();
    cuda_sample_shards()(rows, {.group = group,
                                .op = {"greedy"},
                                .first_id = first_[index(r)],
                                .num_rows = num_rows_,
                                .first_row = first});
  }
  void enqueue() {
    group_.for_each([&](int r, DeviceCommunicator& rank) { enqueue(r, rank); });
  }
  // Waits for all ranks and compares their results with the host's and with those of whole rows.
  void check(const std::string& what) {
    group_.expect_ok();
    group_.for_each([&](int r, DeviceCommunicator&) {
      if (r == 0) cuda_sample_rows()(whole_rows(0));
    });
    group_.synchronize();
    EXPECT_EQ(tokens(whole_out_), expected_) << what << ", whole rows";
    group_.for_each([&](int r, DeviceCommunicator&) {
      EXPECT_EQ(tokens(out_[index(r)]), expected_) << what << ", rank " << r;
      EXPECT_EQ(tokens(copy_[index(r)]), expected_) << what << ", copy of rank " << r;
    });
  }
  // Expects `num_own` results from row `first` on, and that nothing has been written behind them.
  void check_own(int r, int64_t first, int64_t num_own, const std::string& what) const {
    for (const Buffer* const rows : {&out_[index(r)], &copy_[index(r)]}) {
      const auto actual = from_device<SampledRow>(*rows);
      for (int64_t i = 0; i < num_rows_; ++i) {
        const SampledRow& row = actual[static_cast<size_t>(i)];
        const Token token = i < num_own ? expected_[static_cast<size_t>(first + i)] : Token{kUnset, -5};
        EXPECT_EQ((Token{row.status, row.token_id}), token) << what << ", row " << i;
      }
    }
  }
  std::vector<Token> results(int r) const { return tokens(out_[index(r)]); }

 private:
  static size_t index(int r) { return static_cast<size_t>(r); }
  int64_t count(int r) const { return first_[index(r) + 1] - first_[index(r)]; }
  // Values that no result has.
  std::vector<SampledRow> unset() const {
    const SampledRow row{.status = kUnset, .token_id = -5, .num_top = 9};
    return std::vector<SampledRow>(static_cast<size_t>(num_rows_), row);
  }
  template <class T>
  static void put(const Buffer& to, const std::vector<T>& values) {
    if (values.empty()) return;
    EXPECT_TRUE(device_memory().upload(to.data(), values.data(), to.num_bytes()).ok());
  }
  static std::vector<Token> tokens(const Buffer& rows) {
    std::vector<Token> tokens;
    for (const SampledRow& row : from_device<SampledRow>(rows)) {
      tokens.push_back({row.status, row.token_id});
      EXPECT_EQ(row.num_top, 0);
    }
    return tokens;
  }
  SampleRowsArgs whole_rows(int r) {
    return {.logits = whole_.as<float>(),
            .num_rows = num_rows_,
            .vocab_size = vocab_size(),
            .row_stride = vocab_size(),
            .masked = masked_.empty() ? nullptr : mask_[index(r)].as<uint32_t>(),
            .all_greedy = true,
            .out = whole_out_.as<SampledRow>()};
  }

  TestGroup& group_;
  const int64_t num_rows_;
  const std::vector<int64_t> first_;
  const Mask masked_;
  std::vector<Token> expected_;
  std::vector<Buffer> logits_, mask_, out_, copy_;  // by rank
  Buffer whole_, whole_out_;                        // on rank 0's GPU
};

// Returns where the ranks' ids begin: panels of 16 as in a model, or anywhere; some ranks may have none.
std::vector<int64_t> cuts(int num_ranks, int64_t vocab_size, int64_t unit, std::mt19937_64& random) {
  std::vector<int64_t> first = {0, vocab_size};
  for (int r = 1; r < num_ranks; ++r)
    first.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(vocab_size + 1)) / unit * unit);
  std::sort(first.begin(), first.end());
  return first;
}

std::vector<int64_t> halves(int num_ranks, int64_t vocab_size) {
  std::vector<int64_t> first;
  for (int r = 0; r <= num_ranks; ++r) first.push_back(vocab_size * r / num_ranks);
  return first;
}

// Masks id 1 and every step-th id after it.
Mask every(int64_t vocab_size, size_t step) {
  Mask mask(static_cast<size_t>(vocab_size));
  for (size_t id = 1; id < mask.size(); id += step) mask[id] = true;
  return mask;
}

class SamplerShards : public testing::TestWithParam<int> {
 protected:
  // Enqueues on each rank alone, which loads the kernels: loading one can wait for kernels of other ranks.
  template <class Enqueue>
  static void rehearse(TestGroup& group, const Enqueue& enqueue) {
    group.for_each([&](int r, DeviceCommunicator& rank) {
      rank.rehearse(true);
      enqueue(r, rank);
    });
    group.synchronize();
    group.for_each([](int, DeviceCommunicator& rank) { rank.rehearse(false); });
    group.synchronize();
  }
  static void rehearse(TestGroup& group, ShardedRows& rows) {
    rehearse(group, [&](int r, const DeviceCommunicator& rank) { rows.enqueue(r, rank); });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, SamplerShards, testing::Values(1, 2, 3, 4, 8));

TEST_P(SamplerShards, HaveTheTokensOfWholeRows) {
  TestGroup group(GetParam(), {0, 256, 128});  // choices of 32 rows per exchange
  std::mt19937_64 random(1);
  for (const int64_t vocab_size : {1, 2, 31, 33, 64, 500, 4097})
    for (const int64_t num_rows : {1, 2, 31, 32, 33, 70})
      for (const int64_t unit : {1, 16}) {
        const Mask masked = num_rows % 2 == 0 ? every(vocab_size, 3) : Mask();
        ShardedRows rows(group, num_rows, cuts(group.size(), vocab_size, unit, random), masked);
        rehearse(group, rows);
        rows.fill(random);
        rows.enqueue();
        rows.check(std::to_string(num_rows) + " rows of " + std::to_string(vocab_size) + ", unit " +
                   std::to_string(unit));
      }
}

// As data-parallel groups that share an LM head; a group may have no rows.
TEST_P(SamplerShards, EachRankGetsItsOwnRows) {
  TestGroup group(GetParam(), {0, 256, 128});  // choices of 32 rows per exchange
  std::mt19937_64 random(4);
  for (const int64_t num_rows : {1, 8, 40, 140}) {
    ShardedRows rows(group, num_rows, cuts(group.size(), 1000, 16, random), {});
    std::vector<int64_t> first, count;
    for (int r = 0; r < group.size(); ++r) {
      first.push_back(num_rows * r / group.size());
      const int64_t room = num_rows * (r + 1) / group.size() - first.back();
      count.push_back(r % 3 == 2 ? 0
                                 : room - static_cast<int64_t>(random() % 2) * std::min<int64_t>(room, 1));
    }
    const auto enqueue = [&](int r, const DeviceCommunicator& rank) {
      const auto at = static_cast<size_t>(r);
      rows.enqueue(r, rank, first[at], count[at]);
    };
    rehearse(group, enqueue);
    for (int round = 0; round < 3; ++round) {
      rows.fill(random);
      group.for_each([&](int r, DeviceCommunicator& rank) { enqueue(r, rank); });
      group.expect_ok();
      group.for_each([&](int r, DeviceCommunicator&) {
        const auto at = static_cast<size_t>(r);
        rows.check_own(r, first[at], count[at],
                       std::to_string(num_rows) + " rows, rank " + std::to_string(r));
      });
    }
  }
}

TEST_P(SamplerShards, WholeVocabularies) {
  TestGroup group(GetParam());
  std::mt19937_64 random(2);
  for (const int64_t num_rows : {40, 128})
    for (const size_t step : {1, 2, 1000}) {
      ShardedRows rows(group, num_rows, halves(group.size(), 201088), every(201088, step));
      rehearse(group, rows);
      rows.fill(random);
      rows.enqueue();
      rows.check(std::to_string(num_rows) + " rows, mask of every " + std::to_string(step));
    }
}

// In a rehearsal a rank chooses among its own ids.
TEST_P(SamplerShards, RehearsalsNeedNoOtherRank) {
  TestGroup group(GetParam());
  std::mt19937_64 random(3);
  ShardedRows rows(group, 5, halves(group.size(), 640), {});
  rows.fill(random);
  for (int r = 0; r < group.size(); ++r) {
    TestRank& rank = *group.ranks[static_cast<size_t>(r)];
    const StreamScope scope(rank.stream);
    rank.group->rehearse(true);
    rows.enqueue(r, *rank.group);
    EXPECT_TRUE(rank.stream.synchronize().ok());
    for (const Token& token : rows.results(r)) {
      EXPECT_NE(token.status, kUnset);
      if (token.status != SampleStatus::kOk) continue;
      EXPECT_GE(token.id, 640 * r / group.size());
      EXPECT_LT(token.id, 640 * (r + 1) / group.size());
    }
    rank.group->rehearse(false);
  }
  group.synchronize();
  rows.fill(random);
  rows.enqueue();
  rows.check("after the rehearsal");
}

TEST_P(SamplerShards, GraphsReplayTheChoice) {
  TestGroup group(GetParam());
  std::mt19937_64 random(4);
  for (const int64_t num_rows : {1, 40}) {
    ShardedRows rows(group, num_rows, halves(group.size(), 1600), every(1600, 7));
    rehearse(group, rows);
    std::vector<Graph> graphs;
    group.for_each([&](int r, DeviceCommunicator& rank) {
      graphs.push_back(Graph::capture(group.ranks[static_cast<size_t>(r)]->stream, [&]() -> Status {
                         rows.enqueue(r, rank);
                         return {};
                       }).value());
    });
    for (int i = 0; i < 12; ++i) {
      rows.fill(random);
      for (int again = 0; again <= i % 3; ++again)  // a replay uses either buffer of the words
        group.for_each([&](int r, DeviceCommunicator&) {
          graphs[static_cast<size_t>(r)].launch(group.ranks[static_cast<size_t>(r)]->stream);
        });
      rows.check("replay " + std::to_string(i));
    }
  }
}

// Sums use the same words of the heap. Nothing waits in between, so ranks are up to two operations apart.
TEST_P(SamplerShards, AmongSums) {
  TestGroup group(GetParam());
  std::mt19937_64 random(5);
  constexpr int64_t kElements = 2880;
  std::vector<std::unique_ptr<ShardedRows>> all;
  for (size_t i = 0; i < 20; ++i) {
    all.push_back(std::make_unique<ShardedRows>(group, static_cast<int64_t>(1 + 3 * i),
                                                cuts(group.size(), 700, 16, random), every(700, 2 + i)));
    all.back()->fill(random);
  }
  std::vector<Buffer> partial, sum;
  group.for_each([&](int r, DeviceCommunicator&) {
    partial.push_back(on_device(std::vector<float>(kElements, static_cast<float>(r + 1))));
    sum.push_back(on_device(std::vector<float>(kElements)));
  });
  const auto add = [&](int r, const DeviceCommunicator& rank, int64_t n) {
    const auto at = static_cast<size_t>(r);
    rank.add_all_reduced({"sum"}, partial[at].as<float>(), sum[at].as<float>(), n);
  };
  rehearse(group, [&](int r, const DeviceCommunicator& rank) {
    all[0]->enqueue(r, rank);
    add(r, rank, 4);
  });
  for (size_t i = 0; i < all.size(); ++i)
    group.for_each([&](int r, DeviceCommunicator& rank) {
      all[i]->enqueue(r, rank);
      for (size_t sums = 0; sums < i % 3; ++sums) add(r, rank, kElements);
    });
  for (const auto& rows : all) rows->check("a choice among sums");
  const int num_sums = 19;  // of i % 3 for i < 20
  const auto total = static_cast<float>(num_sums * group.size() * (group.size() + 1) / 2);
  group.for_each([&](int r, DeviceCommunicator&) {
    std::vector<float> expected(kElements, total);
    for (size_t i = 0; i < 4; ++i) expected[i] += static_cast<float>(r + 1);  // the rehearsal's
    EXPECT_EQ(from_device<float>(sum[static_cast<size_t>(r)]), expected);
  });
}

TEST_P(SamplerShards, AMissingRankFailsTheGroupAndNoTokenIsChosen) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank has no peer";
  TestGroup group(GetParam(), {0, 64 << 10, 128}, std::chrono::milliseconds(300));
  std::mt19937_64 random(6);
  ShardedRows rows(group, 40, halves(group.size(), 320), {});
  rehearse(group, rows);
  rows.fill(random);
  const int missing = group.size() - 1;
  const auto start = std::chrono::steady_clock::now();
  group.for_each([&](int r, DeviceCommunicator& rank) {
    if (r != missing) rows.enqueue(r, rank);
  });
  group.synchronize();
  group.for_each([&](int r, DeviceCommunicator& rank) {
    if (r == missing) rows.enqueue(r, rank);  // too late
  });
  group.synchronize();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  int num_named = 0;
  for (int r = 0; r < group.size(); ++r) {
    const Status status = group.ranks[static_cast<size_t>(r)]->group->failure();
    num_named +=
        status.message().find("for rank " + std::to_string(missing) + " in greedy") != std::string::npos;
    EXPECT_EQ(rows.results(r), std::vector<Token>(40, {SampleStatus::kBadLogits, 0})) << "rank " << r;
  }
  EXPECT_GE(num_named, 1);
}

}  // namespace
}  // namespace fp4moe
