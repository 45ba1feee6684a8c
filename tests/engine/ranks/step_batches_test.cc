#include "engine/ranks/step_batches.h"

#include <gtest/gtest.h>

#include <algorithm>
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

// The same limits for a model with states.
constexpr StepLimits with_states() {
  StepLimits limits = kLimits;
  limits.num_slots = 6;
  limits.num_replay_rows = 3;
  return limits;
}

// The limits with a draft model that has fewer ids and a smaller vocabulary.
constexpr StepLimits with_draft(bool takes_features, StepLimits limits = kLimits) {
  limits.draft = {.vocab_size = 20, .num_input_ids = 60, .takes_features = takes_features};
  return limits;
}

// Batches and the data that they point to.
struct Owned {
  std::vector<std::vector<int32_t>> ids, tables;
  std::vector<std::vector<int64_t>> positions, logit_rows, feature_rows;
  std::vector<std::vector<SequenceRows>> sequences;
  std::vector<std::vector<StateCopy>> state_copies;
  BatchModel model = BatchModel::kTarget;
  bool chains = false;

  std::vector<Batch> batches() const {
    std::vector<Batch> all;
    for (size_t g = 0; g < ids.size(); ++g) {
      all.push_back({ids[g], positions[g], sequences[g], logit_rows[g]});
      all.back().model = model;
      all.back().chains = chains;
      if (!state_copies.empty()) all.back().state_copies = state_copies[g];
      if (!feature_rows.empty()) all.back().feature_rows = feature_rows[g];
    }
    return all;
  }

  // Makes it a step of the draft model that continues the features of `before`; a group without rows there
  // has none here either.
  void make_draft(std::mt19937& random, const Owned& before, bool takes_features, bool is_chain) {
    model = BatchModel::kDraft;
    chains = is_chain;
    for (size_t g = 0; g < ids.size(); ++g) {
      if (takes_features && before.ids[g].empty()) {
        ids[g].clear();
        positions[g].clear();
        sequences[g].clear();
        logit_rows[g].clear();
      }
      for (int32_t& id : ids[g]) id %= 60;
      for (SequenceRows& s : sequences[g]) s.window_page_table = {};
      feature_rows.emplace_back();
      for (size_t row = 0; takes_features && row < ids[g].size(); ++row)
        feature_rows[g].push_back(static_cast<int64_t>(random() % before.ids[g].size()));
    }
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
      if (limits.num_slots > 0) sequences.back().slot = static_cast<int32_t>(below(limits.num_slots));
      if (sequences.back().slot > 0) {
        const auto most = [&](int64_t n) { return 1 + std::clamp<int64_t>(n, 0, limits.num_replay_rows); };
        sequences.back().num_replayed = static_cast<int32_t>(below(most(first - 1)));
        sequences.back().num_tentative = static_cast<int32_t>(below(most(rows - 1)));
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
    step.state_copies.emplace_back();
    for (int64_t n = limits.num_slots > 0 ? below(4) : 0; n > 0; --n)
      step.state_copies.back().push_back({static_cast<int32_t>(1 + below(limits.num_slots - 1)),
                                          static_cast<int32_t>(1 + below(limits.num_slots - 1))});
  }
  return step;
}

void expect_equal(const Batch& a, const Batch& b) {
  const auto same = [](auto x, auto y) { return std::equal(x.begin(), x.end(), y.begin(), y.end()); };
  EXPECT_TRUE(same(a.token_ids, b.token_ids));
  EXPECT_TRUE(same(a.positions, b.positions));
  EXPECT_TRUE(same(a.logit_rows, b.logit_rows));
  EXPECT_TRUE(same(a.feature_rows, b.feature_rows));
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.chains, b.chains);
  EXPECT_TRUE(std::ranges::equal(a.state_copies, b.state_copies, [](const StateCopy& x, const StateCopy& y) {
    return x.from == y.from && x.to == y.to;
  }));
  ASSERT_EQ(a.sequences.size(), b.sequences.size());
  for (size_t s = 0; s < a.sequences.size(); ++s) {
    EXPECT_EQ(a.sequences[s].first_row, b.sequences[s].first_row);
    EXPECT_EQ(a.sequences[s].num_rows, b.sequences[s].num_rows);
    EXPECT_EQ(a.sequences[s].slot, b.sequences[s].slot);
    EXPECT_EQ(a.sequences[s].num_replayed, b.sequences[s].num_replayed);
    EXPECT_EQ(a.sequences[s].num_tentative, b.sequences[s].num_tentative);
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

TEST(StepBatches, SlotsAndCopiesComeBackToo) {
  std::mt19937 random(6);
  StepBatches sent, received;
  int64_t num_copies = 0;
  for (int i = 0; i < 300; ++i) {
    const Owned step = random_step(random, with_states());
    sent.assign(step.batches());
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    EXPECT_LE(std::ssize(bytes), StepBatches::max_bytes(with_states()));
    const Status status = received.decode(bytes, with_states());
    ASSERT_TRUE(status.ok()) << status.message();
    for (int g = 0; g < kLimits.num_groups; ++g) {
      expect_equal(step.batches()[static_cast<size_t>(g)], sent.batch(g));
      expect_equal(sent.batch(g), received.batch(g));
      num_copies += std::ssize(received.batch(g).state_copies);
    }
  }
  EXPECT_GT(num_copies, 300);
}

// Slots beyond the pool, copies of the scrap slot, more copies than a step can have, and either of them for a
// model without states.
TEST(StepBatches, SlotsOutsideTheirLimitsAreRefused) {
  const std::vector<int32_t> table = {1}, ids = {1};
  const std::vector<int64_t> positions = {0}, logit_rows = {0};
  const auto refusal = [&](StepLimits limits, int32_t slot, const std::vector<StateCopy>& copies) {
    limits.num_groups = 1;
    const std::vector<SequenceRows> sequences = {{0, 1, 0, table, {}, slot}};
    Batch batch{ids, positions, sequences, logit_rows};
    batch.state_copies = copies;
    StepBatches sent, received;
    std::vector<uint8_t> bytes;
    sent.assign({&batch, 1});
    sent.encode(bytes);
    return received.decode(bytes, limits).message();
  };
  const auto expect_part = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  EXPECT_EQ(refusal(with_states(), 5, {{5, 1}}), "");
  EXPECT_EQ(refusal(kLimits, 0, {}), "");
  expect_part(refusal(with_states(), 6, {}), "slot of a sequence 6; legal: at most 5");
  expect_part(refusal(kLimits, 1, {}), "slot of a sequence 1; legal: at most 0");
  expect_part(refusal(with_states(), 1, {{6, 1}}), "copied slot 6; legal: 1 to 5");
  expect_part(refusal(with_states(), 1, {{1, 0}}), "copied slot 0; legal: 1 to 5");
  expect_part(refusal(with_states(), 1, std::vector<StateCopy>(25, {1, 2})),
              "state copies 25; legal: at most 24");
  expect_part(refusal(kLimits, 0, {{1, 2}}), "state copies 1; legal: at most 0");
}

// A sequence of 3 rows after `first` tokens.
TEST(StepBatches, DraftsOutsideTheirLimitsAreRefused) {
  const auto refusal = [](int32_t slot, int64_t first, int32_t num_replayed, int32_t num_tentative) {
    StepLimits limits = with_states();
    limits.num_groups = 1;
    const std::vector<int32_t> table = {1, 2, 3}, ids = {1, 2, 3};
    const std::vector<int64_t> positions = {first, first + 1, first + 2}, logit_rows = {2};
    const std::vector<SequenceRows> sequences = {{0, 3, first, table, {}, slot, num_replayed, num_tentative}};
    const Batch batch{ids, positions, sequences, logit_rows};
    StepBatches sent, received;
    std::vector<uint8_t> bytes;
    sent.assign({&batch, 1});
    sent.encode(bytes);
    return received.decode(bytes, limits).message();
  };
  const auto expect_part = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  EXPECT_EQ(refusal(5, 4, 3, 2), "");
  EXPECT_EQ(refusal(0, 4, 0, 0), "");
  expect_part(refusal(5, 8, 4, 0), "replayed rows of a sequence 4; legal: at most 3");
  expect_part(refusal(5, 2, 2, 0), "replayed rows of a sequence 2; legal: at most 1");
  expect_part(refusal(5, 0, 1, 0), "replayed rows of a sequence 1; legal: at most 0");
  expect_part(refusal(0, 4, 1, 0), "replayed rows of a sequence 1; legal: at most 0");
  expect_part(refusal(5, 4, 0, 3), "drafts of a sequence 3; legal: at most 2");
  expect_part(refusal(0, 4, 0, 1), "drafts of a sequence 1; legal: at most 0");
}

bool has_rows(const Owned& step) {
  return std::ranges::any_of(step.ids, [](const auto& ids) { return !ids.empty(); });
}

// A target's step, an extension and a chain, with and without features, and with window pages that a draft
// model does not have.
TEST(StepBatches, DraftStepsComeBackFromTheirBytes) {
  std::mt19937 random(7);
  int num_draft_rows = 0;
  for (const bool takes_features : {false, true})
    for (const StepLimits& limits : {with_draft(takes_features), with_draft(takes_features, with_window())}) {
      StepBatches sent, received;
      for (int i = 0; i < 200; ++i) {
        Owned steps[3] = {random_step(random, limits), random_step(random, limits),
                          random_step(random, limits)};
        steps[1].make_draft(random, steps[0], takes_features, false);
        steps[2].make_draft(random, steps[1], takes_features, takes_features);
        for (const Owned& step : steps) {
          if (!has_rows(step)) break;  // is never sent to a draft model
          sent.assign(step.batches());
          std::vector<uint8_t> bytes;
          sent.encode(bytes);
          EXPECT_LE(std::ssize(bytes), StepBatches::max_bytes(limits));
          const Status status = received.decode(bytes, limits);
          ASSERT_TRUE(status.ok()) << status.message();
          EXPECT_EQ(received.model(), step.model);
          for (int g = 0; g < kLimits.num_groups; ++g) {
            expect_equal(step.batches()[static_cast<size_t>(g)], sent.batch(g));
            expect_equal(sent.batch(g), received.batch(g));
            num_draft_rows +=
                step.model == BatchModel::kDraft ? static_cast<int>(sent.batch(g).num_rows()) : 0;
          }
        }
      }
    }
  EXPECT_GT(num_draft_rows, 10000);
}

// Refusals of a draft model's step; each names the value.
TEST(StepBatches, ADraftStepOutsideItsLimitsIsRefused) {
  const std::vector<int32_t> table = {1}, ids = {1, 59};
  const std::vector<int64_t> positions = {0, 1}, logit_rows = {1};
  const std::vector<SequenceRows> sequences = {{0, 2, 0, table}};
  const auto refusal = [&](StepLimits limits, std::vector<int64_t> feature_rows, bool chains,
                           std::vector<int32_t> token_ids) {
    limits.num_groups = 1;
    Batch batch{ids, positions, sequences, logit_rows};
    StepBatches sent, received;
    std::vector<uint8_t> bytes;
    sent.assign({&batch, 1});  // two rows of the target, whose features may be continued
    sent.encode(bytes);
    EXPECT_TRUE(received.decode(bytes, limits).ok());
    batch.token_ids = token_ids;
    batch.model = BatchModel::kDraft;
    batch.feature_rows = feature_rows;
    batch.chains = chains;
    sent.assign({&batch, 1});
    sent.encode(bytes);
    return received.decode(bytes, limits).message();
  };
  const StepLimits features = with_draft(true), tokens = with_draft(false);
  const auto expect_part = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  EXPECT_EQ(refusal(features, {1, 0}, false, ids), "");
  EXPECT_EQ(refusal(tokens, {}, false, ids), "");
  expect_part(refusal(kLimits, {}, false, ids), "there is none");
  expect_part(refusal(tokens, {0, 0}, false, ids), "takes none");
  expect_part(refusal(features, {}, false, ids), "a draft without features");
  expect_part(refusal(tokens, {}, true, ids), "a chain without features");
  expect_part(refusal(features, {0, 2}, false, ids), "feature row 2; legal: at most 1");
  expect_part(refusal(features, {0, 0}, true, ids),
              "feature row 0; legal: at most -1");  // no draft pass before
  expect_part(refusal(tokens, {}, false, {1, 60}), "token id 60; legal: at most 59");
}

// It keeps the features of the pass before, which later drafts continue.
TEST(StepBatches, AStepThatMovesExpertsComesBackFromItsBytes) {
  std::vector<Batch> groups(static_cast<size_t>(kLimits.num_groups), Batch{.moves_experts = true});
  StepBatches step, back;
  step.assign(groups);
  std::vector<uint8_t> bytes;
  step.encode(bytes);
  ASSERT_TRUE(back.decode(bytes, kLimits).ok());
  for (int g = 0; g < kLimits.num_groups; ++g) {
    EXPECT_TRUE(back.batch(g).moves_experts);
    EXPECT_EQ(back.batch(g).num_rows(), 0);
  }
  step.assign(std::vector<Batch>(groups.size()));
  EXPECT_FALSE(step.batch(0).moves_experts);
  bytes[12] |= 1;  // also a draft's step
  EXPECT_EQ(back.decode(bytes, with_draft(false)).message(),
            "a step's message: a step that moves experts and runs a model");
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
  const StepLimits limits = with_states();
  std::mt19937 random(2);
  StepBatches sent, received;
  int num_refused = 0, num_tried = 0;
  for (int i = 0; i < 20; ++i) {
    const Owned step = random_step(random, limits);
    sent.assign(step.batches());
    std::vector<uint8_t> bytes;
    sent.encode(bytes);
    for (size_t n = 0; n < bytes.size(); n += 4)
      EXPECT_FALSE(received.decode({bytes.data(), n}, limits).ok());
    for (size_t at = 0; at < bytes.size(); at += 4)
      for (const uint32_t value : {0u, 1u, 39u, 41u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        std::vector<uint8_t> bad = bytes;
        std::memcpy(bad.data() + at, &value, 4);
        ++num_tried;
        if (const Status status = received.decode(bad, limits); !status.ok()) {
          ++num_refused;
          EXPECT_EQ(status.code(), StatusCode::kDataLoss);
          continue;
        }
        for (int g = 0; g < kLimits.num_groups; ++g) {
          const Batch batch = received.batch(g);
          for (const int32_t id : batch.token_ids) EXPECT_LT(id, kLimits.vocab_size);
          for (const int64_t row : batch.logit_rows)
            EXPECT_LT(row, static_cast<int64_t>(batch.token_ids.size()));
          for (const StateCopy& copy : batch.state_copies)
            EXPECT_TRUE(copy.from > 0 && copy.from < 6 && copy.to > 0 && copy.to < 6);
          for (const SequenceRows& s : batch.sequences) {
            EXPECT_TRUE(s.slot >= 0 && s.slot < 6);
            EXPECT_TRUE(s.num_replayed >= 0 && s.num_replayed <= 3 && s.num_replayed <= s.first_position);
            EXPECT_TRUE(s.num_tentative >= 0 && s.num_tentative <= 3 && s.num_tentative < s.num_rows);
            EXPECT_LE((s.first_position + s.num_rows + 3) / 4, static_cast<int64_t>(s.page_table.size()));
            for (const int32_t page : s.page_table) EXPECT_LT(page, kLimits.num_kv_pages);
          }
        }
      }
  }
  EXPECT_GT(num_refused, num_tried / 2);
}

TEST(StepBatches, BadBytesOfADraftStepAreRefusedOrLegal) {
  std::mt19937 random(11);
  const StepLimits limits = with_draft(true);
  StepBatches sent, received;
  int num_refused = 0, num_tried = 0;
  for (int i = 0; i < 20; ++i) {
    const Owned target = random_step(random, limits);
    Owned draft = random_step(random, limits);
    draft.make_draft(random, target, true, false);
    if (!has_rows(draft)) continue;
    std::vector<uint8_t> target_bytes, bytes;
    sent.assign(target.batches());
    sent.encode(target_bytes);
    sent.assign(draft.batches());
    sent.encode(bytes);
    for (size_t at = 0; at < bytes.size(); at += 4)
      for (const uint32_t value : {0u, 1u, 7u, 39u, 41u, 0x80000000u, 0xffffffffu}) {
        std::vector<uint8_t> bad = bytes;
        std::memcpy(bad.data() + at, &value, 4);
        ++num_tried;
        ASSERT_TRUE(received.decode(target_bytes, limits).ok());
        if (!received.decode(bad, limits).ok()) {
          ++num_refused;
          continue;
        }
        for (int g = 0; g < kLimits.num_groups; ++g) {
          const Batch batch = received.batch(g);
          const bool is_draft = batch.model == BatchModel::kDraft;
          EXPECT_EQ(batch.feature_rows.size(), is_draft ? batch.token_ids.size() : 0u);
          for (const int64_t row : batch.feature_rows)
            EXPECT_LT(row, std::ssize(target.ids[static_cast<size_t>(g)]));
          for (const int32_t id : batch.token_ids) EXPECT_LT(id, is_draft ? 60 : 100);
        }
      }
  }
  EXPECT_GT(num_tried, 1000);
  EXPECT_GT(num_refused, num_tried / 2);
}

}  // namespace
}  // namespace fp4moe
