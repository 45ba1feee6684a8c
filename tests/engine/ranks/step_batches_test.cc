#include "engine/ranks/step_batches.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

namespace fp4moe {
namespace {

constexpr StepLimits kLimits{.num_groups = 3,
                             .max_batch_tokens = 40,
                             .max_logit_rows = 12,
                             .num_kv_pages = 30,
                             .max_table_pages = 30,
                             .page_size = 4,
                             .vocab_size = 100};
// The same limits for a model whose window layers have separate pages.
constexpr StepLimits with_window() {
  StepLimits limits = kLimits;
  limits.num_window_pages = 9;
  return limits;
}

// Batches and the data that they point to.
struct Owned {
  std::vector<std::vector<int32_t>> ids, tables;
  std::vector<std::vector<int64_t>> positions, logit_rows;
  std::vector<std::vector<SequenceRows>> sequences;

  std::vector<Batch> batches() const {
    std::vector<Batch> all;
    for (size_t g = 0; g < ids.size(); ++g)
      all.push_back({ids[g], positions[g], sequences[g], logit_rows[g]});
    return all;
  }
};

Owned random_step(std::mt19937& random, const StepLimits& limits = kLimits) {
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Owned step;
  step.tables.reserve(64);
  for (int g = 0; g < kLimits.num_groups; ++g) {
    std::vector<int32_t> ids;
    std::vector<int64_t> positions, logit_rows;
    std::vector<SequenceRows> sequences;
    for (int64_t s = below(4); s > 0; --s) {
      const int64_t rows = 1 + below(10), first = below(20);
      std::vector<int32_t> table(static_cast<size_t>((first + rows + 3) / 4));
      for (int32_t& page : table) page = static_cast<int32_t>(below(kLimits.num_kv_pages));
      step.tables.push_back(table);
      sequences.push_back({static_cast<int64_t>(ids.size()), rows, first, step.tables.back()});
      if (limits.num_window_pages > 0) {
        for (int32_t& page : table) page = static_cast<int32_t>(below(limits.num_window_pages));
        step.tables.push_back(table);
        sequences.back().window_page_table = step.tables.back();
      }
      for (int64_t i = 0; i < rows; ++i) {
        ids.push_back(static_cast<int32_t>(below(kLimits.vocab_size)));
        positions.push_back(first + i);
      }
      if (below(2) == 0) logit_rows.push_back(static_cast<int64_t>(ids.size()) - 1);
    }
    step.ids.push_back(ids);
    step.positions.push_back(positions);
    step.logit_rows.push_back(logit_rows);
    step.sequences.push_back(sequences);
  }
  return step;
}

void expect_equal(const Batch& a, const Batch& b) {
  const auto same = [](auto x, auto y) { return std::equal(x.begin(), x.end(), y.begin(), y.end()); };
  EXPECT_TRUE(same(a.token_ids, b.token_ids));
  EXPECT_TRUE(same(a.positions, b.positions));
  EXPECT_TRUE(same(a.logit_rows, b.logit_rows));
  ASSERT_EQ(a.sequences.size(), b.sequences.size());
  for (size_t s = 0; s < a.sequences.size(); ++s) {
    EXPECT_EQ(a.sequences[s].first_row, b.sequences[s].first_row);
    EXPECT_EQ(a.sequences[s].num_rows, b.sequences[s].num_rows);
    EXPECT_EQ(a.sequences[s].first_position, b.sequences[s].first_position);
    EXPECT_TRUE(same(a.sequences[s].page_table, b.sequences[s].page_table));
    EXPECT_TRUE(same(a.sequences[s].window_page_table, b.sequences[s].window_page_table));
  }
}

TEST(StepBatches, ComeBackFromTheirBytes) {
  std::mt19937 random(1);
  StepBatches sent, received;
  for (int i = 0; i < 500; ++i) {
    const Owned step = random_step(random);
    sent.assign(step.batches());
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    EXPECT_LE(static_cast<int64_t>(bytes.size()), StepBatches::max_bytes(kLimits));
    const Status status = received.decode(bytes, kLimits);
    ASSERT_TRUE(status.ok()) << status.message();
    int64_t row = 0;
    for (int g = 0; g < kLimits.num_groups; ++g) {
      expect_equal(step.batches()[static_cast<size_t>(g)], sent.batch(g));
      expect_equal(sent.batch(g), received.batch(g));
      EXPECT_EQ(received.first_logit_row(g), row);
      row += received.num_logit_rows(g);
    }
  }
}

TEST(StepBatches, WindowPageTablesComeBackToo) {
  std::mt19937 random(5);
  StepBatches sent, received;
  for (int i = 0; i < 300; ++i) {
    const Owned step = random_step(random, with_window());
    sent.assign(step.batches());
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    EXPECT_LE(static_cast<int64_t>(bytes.size()), StepBatches::max_bytes(with_window()));
    const Status status = received.decode(bytes, with_window());
    ASSERT_TRUE(status.ok()) << status.message();
    for (int g = 0; g < kLimits.num_groups; ++g) expect_equal(sent.batch(g), received.batch(g));
  }
}

// A window table may end before the other one, as that of a prompt does; the rest is sent as page 0.
TEST(StepBatches, AWindowPageTableIsExtendedAndItsPagesAreChecked) {
  const std::vector<int32_t> ids = {1}, full = {1, 2, 3}, window = {8}, wrong = {9};
  const std::vector<int64_t> positions = {2}, logit_rows = {0};
  for (const auto& table : {window, wrong}) {
    const std::vector<SequenceRows> sequences = {{0, 1, 2, full, table}};
    StepLimits limits = with_window();
    limits.num_groups = 1;
    const Batch batch{ids, positions, sequences, logit_rows};
    StepBatches sent, received;
    sent.assign({&batch, 1});
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    const Status status = received.decode(bytes, limits);
    ASSERT_EQ(status.ok(), table == window);
    if (status.ok()) {
      const std::span<const int32_t> back = received.batch(0).sequences[0].window_page_table;
      EXPECT_EQ(std::vector<int32_t>(back.begin(), back.end()), (std::vector<int32_t>{8, 0, 0}));
    } else {
      EXPECT_NE(status.message().find("window page 9; legal: at most 8"), std::string::npos)
          << status.message();
    }
  }
}

TEST(StepBatches, TheLargestStepFits) {
  Owned step;
  for (int g = 0; g < kLimits.num_groups; ++g) {
    step.ids.push_back(std::vector<int32_t>(40, 99));
    step.positions.push_back(std::vector<int64_t>(40, 0));
    step.logit_rows.push_back({0, 1, 2, 3});
    step.tables.push_back({29});
  }
  for (int g = 0; g < kLimits.num_groups; ++g) {
    std::vector<SequenceRows> sequences;  // 30 sequences with one page each, the maximum
    for (int64_t s = 0; s < 30; ++s) sequences.push_back({s, 1, 0, step.tables[static_cast<size_t>(g)]});
    step.sequences.push_back(sequences);
    step.ids[static_cast<size_t>(g)].resize(30);
    step.positions[static_cast<size_t>(g)].resize(30);
  }
  StepBatches sent, received;
  sent.assign(step.batches());
  std::vector<uint8_t> bytes;
  sent.encode(bytes);
  EXPECT_LE(static_cast<int64_t>(bytes.size()), StepBatches::max_bytes(kLimits));
  EXPECT_TRUE(received.decode(bytes, kLimits).ok());
}

// If a step is truncated or any of its words changes, decoding refuses it or returns another valid step
// within the limits. It never crashes.
TEST(StepBatches, BadBytesAreRefusedOrLegal) {
  std::mt19937 random(2);
  StepBatches sent, received;
  int num_refused = 0, num_tried = 0;
  for (int i = 0; i < 20; ++i) {
    const Owned step = random_step(random);
    sent.assign(step.batches());
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    for (size_t n = 0; n < bytes.size(); n += 4)
      EXPECT_FALSE(received.decode({bytes.data(), n}, kLimits).ok());
    for (size_t at = 0; at < bytes.size(); at += 4)
      for (const uint32_t value : {0u, 1u, 39u, 41u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        std::vector<uint8_t> bad = bytes;
        std::memcpy(bad.data() + at, &value, 4);
        ++num_tried;
        if (const Status status = received.decode(bad, kLimits); !status.ok()) {
          ++num_refused;
          EXPECT_EQ(status.code(), StatusCode::kDataLoss);
          continue;
        }
        for (int g = 0; g < kLimits.num_groups; ++g) {
          const Batch batch = received.batch(g);
          for (const int32_t id : batch.token_ids) EXPECT_LT(id, kLimits.vocab_size);
          for (const int64_t row : batch.logit_rows)
            EXPECT_LT(row, static_cast<int64_t>(batch.token_ids.size()));
          for (const SequenceRows& s : batch.sequences) {
            EXPECT_LE((s.first_position + s.num_rows + 3) / 4, static_cast<int64_t>(s.page_table.size()));
            for (const int32_t page : s.page_table) EXPECT_LT(page, kLimits.num_kv_pages);
          }
        }
      }
  }
  EXPECT_GT(num_refused, num_tried / 2);
}

}  // namespace
}  // namespace fp4moe
