#include "engine/ranks/batch_stage.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/memory.h"

namespace fp4moe {
namespace {

constexpr StageLimits kLimits{.max_rows = 16, .max_sequences = 8, .max_logit_rows = 8, .max_pages = 5};
constexpr StageLimits with_window() {
  StageLimits limits = kLimits;
  limits.has_window_pages = true;
  return limits;
}

// A stage whose host and device memory are both on the host. write() fills the first buffer, while device
// pointers point into the last one: on_host() converts them.
class Stage {
 public:
  explicit Stage(const StageLimits& limits = kLimits)
      : stage_(BatchStage::make(limits, memory_, memory_).value()) {}
  DeviceBatch write(const Batch& batch, int64_t num_rows) {
    DeviceBatch b = stage_.write(batch, num_rows);
    for (auto** p : {&b.token_ids, &b.row_sequence, &b.first_row, &b.first_position, &b.page_table})
      *p = on_host(*p);
    if (b.window_page_table != nullptr) b.window_page_table = on_host(b.window_page_table);
    b.positions = on_host(b.positions);
    b.logit_rows = on_host(b.logit_rows);
    if (b.feature_rows != nullptr) b.feature_rows = on_host(b.feature_rows);
    DeviceStates& s = b.states;
    for (auto** p : {&s.first_row, &s.first_position, &s.slots, &s.num_replayed, &s.num_tentative})
      if (*p != nullptr) *p = on_host(*p);
    return b;
  }
  BatchStage::AcceptedRows accepted_rows() const {
    BatchStage::AcceptedRows rows = stage_.accepted_rows();
    for (auto** p : {&rows.token_ids, &rows.moves, &rows.num_drafts}) *p = on_host(*p);
    return rows;
  }
  bool decodes(const Batch& batch) const { return stage_.decodes(batch); }

 private:
  struct Memory final : MemoryResource {
    Result<uint8_t*> allocate(int64_t n) override {
      auto data = host_memory().allocate(n);
      if (data.ok()) made.push_back(*data);
      return data;
    }
    void release(uint8_t* data) override { host_memory().release(data); }
    Status upload(void*, const void*, int64_t) override { return {}; }
    Status download(void*, const void*, int64_t) override { return {}; }
    bool is_host() const override { return true; }
    std::vector<uint8_t*> made;
  };
  template <class T>
  const T* on_host(const T* p) const {
    return reinterpret_cast<const T*>(memory_.made[0] +
                                      (reinterpret_cast<const uint8_t*>(p) - memory_.made[2]));
  }
  Memory memory_;
  BatchStage stage_;
};

template <class T>
std::vector<int64_t> values(const T* p, int64_t n) {
  return {p, p + n};
}
using Values = std::vector<int64_t>;

TEST(BatchStage, DecodeIsPaddedWithSequencesWithoutRows) {
  Stage stage;
  const std::vector<int32_t> ids = {11, 12, 13}, pages0 = {7, 8}, pages1 = {3}, pages2 = {1, 2, 4};
  const std::vector<int64_t> positions = {20, 5, 40}, logit_rows = {0, 1, 2};
  const std::vector<SequenceRows> sequences = {{0, 1, 20, pages0}, {1, 1, 5, pages1}, {2, 1, 40, pages2}};
  const DeviceBatch b = stage.write({ids, positions, sequences, logit_rows}, 4);
  EXPECT_EQ(b.num_rows, 4);
  EXPECT_EQ(b.num_sequences, 4);
  EXPECT_EQ(b.num_logit_rows, 4);
  EXPECT_EQ(b.max_rows, 1);
  EXPECT_EQ(b.max_pages, 5);
  EXPECT_EQ(values(b.token_ids, 4), (Values{11, 12, 13, 0}));
  EXPECT_EQ(values(b.positions, 4), (Values{20, 5, 40, 0}));
  EXPECT_EQ(values(b.row_sequence, 4), (Values{0, 1, 2, -1}));
  EXPECT_EQ(values(b.first_row, 5), (Values{0, 1, 2, 3, 3}));
  EXPECT_EQ(values(b.first_position, 4), (Values{20, 5, 40, 0}));
  EXPECT_EQ(values(b.logit_rows, 4), (Values{0, 1, 2, 3}));
  EXPECT_EQ(values(b.page_table, 2), (Values{7, 8}));
  EXPECT_EQ(values(b.page_table + 5, 1), (Values{3}));
  EXPECT_EQ(values(b.page_table + 10, 3), (Values{1, 2, 4}));
}

// Padding, and the rows of a model without features, take those of row 0.
TEST(BatchStage, RowsOfADraftModelHaveFeatureRows) {
  StageLimits limits = kLimits;
  limits.has_feature_rows = true;
  Stage stage(limits);
  const std::vector<int32_t> ids = {11, 12, 13}, pages0 = {7, 8}, pages1 = {3};
  const std::vector<int64_t> positions = {20, 21, 5}, logit_rows = {1, 2}, feature_rows = {4, 5, 9};
  const std::vector<SequenceRows> sequences = {{0, 2, 20, pages0}, {2, 1, 5, pages1}};
  Batch batch{ids, positions, sequences, logit_rows};
  batch.feature_rows = feature_rows;
  for (const int64_t num_rows : {3, 5}) {
    const DeviceBatch b = stage.write(batch, num_rows);
    Values expected = feature_rows;
    expected.resize(static_cast<size_t>(num_rows), 0);
    EXPECT_EQ(values(b.feature_rows, num_rows), expected);
    EXPECT_EQ(values(b.logit_rows, 2), (Values{1, 2}));
    EXPECT_EQ(values(b.token_ids, 3), (Values{11, 12, 13}));
  }
  batch.feature_rows = {};
  EXPECT_EQ(values(stage.write(batch, 3).feature_rows, 3), (Values{0, 0, 0}));
  EXPECT_EQ(Stage().write(batch, 3).feature_rows, nullptr);
  // All limits at once.
  const std::vector<int32_t> many(16), full = {1, 2, 3, 4, 5};
  std::vector<int64_t> rows(16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(15 - i);
  const SequenceRows whole{0, 16, 0, full};
  Batch most{many, rows, {&whole, 1}, std::span(rows).first(8)};
  most.feature_rows = rows;
  const DeviceBatch b = stage.write(most, 16);
  EXPECT_EQ(values(b.feature_rows, 16), rows);
  EXPECT_EQ(values(b.page_table, 5), (Values{1, 2, 3, 4, 5}));
}

// For five requests.
constexpr StageLimits with_states(int64_t rows_per_request) {
  StageLimits limits = kLimits;
  limits.max_sequences = limits.max_logit_rows = 5 * rows_per_request;
  limits.has_slots = true;
  limits.rows_per_request = rows_per_request;
  return limits;
}

TEST(BatchStage, SequencesHaveStates) {
  Stage stage(with_states(1));
  const std::vector<int32_t> ids = {11, 12, 13}, pages0 = {7, 8}, pages1 = {3}, pages2 = {1};
  const std::vector<int64_t> positions = {20, 21, 5}, all = {0, 1, 2}, last = {1, 2};
  const std::vector<SequenceRows> prompts = {{0, 2, 20, pages0, {}, 9}, {2, 1, 5, pages1, {}, 4}};
  const DeviceBatch prefill = stage.write({ids, positions, prompts, last}, 3);
  EXPECT_EQ(prefill.states.num_sequences, 2);
  EXPECT_EQ(prefill.states.max_rows, 2);
  EXPECT_EQ(values(prefill.states.first_row, 3), (Values{0, 2, 3}));
  EXPECT_EQ(values(prefill.states.first_position, 2), (Values{20, 5}));
  EXPECT_EQ(values(prefill.states.slots, 2), (Values{9, 4}));
  EXPECT_EQ(values(prefill.states.num_replayed, 2), (Values{0, 0}));
  EXPECT_EQ(values(prefill.states.num_tentative, 2), (Values{0, 0}));
  EXPECT_EQ(values(prefill.logit_rows, 2), (Values{1, 2}));
  const std::vector<SequenceRows> decoding = {
      {0, 1, 20, pages0, {}, 9}, {1, 1, 21, pages1, {}, 4}, {2, 1, 5, pages2, {}, 2}};
  const DeviceBatch decode = stage.write({ids, positions, decoding, all}, 5);
  EXPECT_EQ(decode.states.num_sequences, 5);
  EXPECT_EQ(decode.states.max_rows, 1);
  EXPECT_EQ(values(decode.states.first_row, 6), (Values{0, 1, 2, 3, 3, 3}));
  EXPECT_EQ(values(decode.states.slots, 5), (Values{9, 4, 2, 0, 0}));
  EXPECT_EQ(values(stage.write({}, 2).states.slots, 2), (Values{0, 0}));
  EXPECT_EQ(Stage().write({ids, positions, decoding, all}, 3).states.slots, nullptr);
}

// Layers with states take the rows of a sequence together, also in a decode step.
TEST(BatchStage, DraftsOfASequenceWithAStateStayTogether) {
  Stage stage(with_states(3));
  const std::vector<int32_t> ids(7), pages0 = {7, 8}, pages1 = {3};
  const std::vector<int64_t> positions = {20, 21, 22, 5, 30, 31, 32}, all = {0, 1, 2, 3, 4, 5, 6};
  const std::vector<SequenceRows> sequences = {
      {0, 3, 20, pages0, {}, 9, 1, 2}, {3, 1, 5, pages1, {}, 4, 2, 0}, {4, 2, 30, pages1, {}, 3, 0, 1}};
  const Batch batch{std::span(ids).first(6), std::span(positions).first(6), sequences,
                    std::span(all).first(6)};
  const DeviceBatch padding = stage.write({}, 8);
  const DeviceBatch b = stage.write(batch, 8);
  EXPECT_EQ(values(b.row_sequence, 8), (Values{0, 1, 2, 3, 4, 5, -1, -1}));
  EXPECT_EQ(values(b.first_position, 8), (Values{20, 21, 22, 5, 30, 31, 0, 0}));
  EXPECT_EQ(b.max_rows, 1);
  EXPECT_EQ(b.states.num_sequences, 5);
  EXPECT_EQ(b.states.max_rows, 3);
  EXPECT_EQ(values(b.states.first_row, 6), (Values{0, 3, 4, 6, 6, 6}));
  EXPECT_EQ(values(b.states.first_position, 5), (Values{20, 5, 30, 0, 0}));
  EXPECT_EQ(values(b.states.slots, 5), (Values{9, 4, 3, 0, 0}));
  EXPECT_EQ(values(b.states.num_replayed, 5), (Values{1, 2, 0, 0, 0}));
  EXPECT_EQ(values(b.states.num_tentative, 5), (Values{2, 0, 1, 0, 0}));
  // A graph is recorded with padding of the same sizes and addresses.
  EXPECT_EQ(padding.states.num_sequences, b.states.num_sequences);
  EXPECT_EQ(padding.states.max_rows, b.states.max_rows);
  EXPECT_EQ(padding.states.first_row, b.states.first_row);
  EXPECT_EQ(padding.states.num_replayed, b.states.num_replayed);
  EXPECT_EQ(padding.states.num_tentative, b.states.num_tentative);
  EXPECT_EQ(stage.write({}, 4).states.num_sequences, 4);
  // Beside a prompt, whose rows have no logits.
  const std::vector<SequenceRows> mixed = {{0, 3, 20, pages0, {}, 9, 1, 2}, {3, 4, 0, pages1, {}, 4}};
  const DeviceBatch m = stage.write({ids, positions, mixed, std::span(all).first(3)}, 7);
  EXPECT_EQ(m.states.num_sequences, 2);
  EXPECT_EQ(m.states.max_rows, 4);
  EXPECT_EQ(values(m.states.first_row, 3), (Values{0, 3, 7}));
  EXPECT_EQ(values(m.states.num_replayed, 2), (Values{1, 0}));
  EXPECT_EQ(values(m.states.num_tentative, 2), (Values{2, 0}));
}

TEST(BatchStage, WindowLayersHaveASecondPageTable) {
  Stage stage(with_window());
  const std::vector<int32_t> ids = {11, 12}, full0 = {7, 8, 9}, full1 = {3, 4}, window0 = {0, 0, 5},
                             window1 = {6};
  const std::vector<int64_t> positions = {20, 0}, logit_rows = {0, 1};
  const std::vector<SequenceRows> sequences = {{0, 1, 20, full0, window0}, {1, 1, 0, full1, window1}};
  const DeviceBatch b = stage.write({ids, positions, sequences, logit_rows}, 2);
  EXPECT_EQ(values(b.page_table, 3), (Values{7, 8, 9}));
  EXPECT_EQ(values(b.page_table + 5, 2), (Values{3, 4}));
  EXPECT_EQ(values(b.window_page_table, 3), (Values{0, 0, 5}));
  EXPECT_EQ(values(b.window_page_table + 5, 1), (Values{6}));
  EXPECT_EQ(stage.write({}, 2).window_page_table, b.window_page_table);
  EXPECT_EQ(Stage().write({}, 2).window_page_table, nullptr);
}

// Rows of drafts are presented as decoding sequences with copies of their sequence's page tables.
TEST(BatchStage, EveryRowOfAStepThatVerifiesIsASequence) {
  StageLimits limits = with_window();
  limits.rows_per_request = 3;
  Stage stage(limits);
  const std::vector<int32_t> ids = {11, 12, 13, 14}, full0 = {7, 8, 9}, full1 = {3, 4}, window0 = {0, 0, 5},
                             window1 = {6};
  const std::vector<int64_t> positions = {20, 21, 22, 5}, logit_rows = {0, 1, 2, 3};
  const std::vector<SequenceRows> sequences = {{0, 3, 20, full0, window0}, {3, 1, 5, full1, window1}};
  const DeviceBatch b = stage.write({ids, positions, sequences, logit_rows}, 4);
  EXPECT_EQ(b.num_sequences, 4);
  EXPECT_EQ(b.num_logit_rows, 4);
  EXPECT_EQ(b.max_rows, 1);
  EXPECT_EQ(values(b.token_ids, 4), (Values{11, 12, 13, 14}));
  EXPECT_EQ(values(b.positions, 4), (Values{20, 21, 22, 5}));
  EXPECT_EQ(values(b.row_sequence, 4), (Values{0, 1, 2, 3}));
  EXPECT_EQ(values(b.first_row, 5), (Values{0, 1, 2, 3, 4}));
  EXPECT_EQ(values(b.first_position, 4), (Values{20, 21, 22, 5}));
  EXPECT_EQ(values(b.logit_rows, 4), (Values{0, 1, 2, 3}));
  for (int row = 0; row < 3; ++row) {
    EXPECT_EQ(values(b.page_table + 5 * row, 3), (Values{7, 8, 9})) << row;
    EXPECT_EQ(values(b.window_page_table + 5 * row, 3), (Values{0, 0, 5})) << row;
  }
  EXPECT_EQ(values(b.page_table + 15, 2), (Values{3, 4}));
  EXPECT_EQ(values(b.window_page_table + 15, 1), (Values{6}));
}

// The first sequence follows the right drafts of row 3; the rows of the last one are those of row 5 itself.
TEST(BatchStage, RowsOfAcceptedDraftsHaveMoves) {
  StageLimits limits = kLimits;
  limits.rows_per_request = 4;
  limits.accepts_drafts = true;
  Stage stage(limits);
  const std::vector<int32_t> ids = {~3, ~20, 7, 8, ~5, ~6}, pages = {7, 8, 9};
  const std::vector<int64_t> positions = {20, 21, 22, 5, 9, 10}, logit_rows = {0, 1, 2, 3, 4, 5};
  const std::vector<SequenceRows> sequences = {{0, 3, 20, pages}, {3, 1, 5, pages}, {4, 2, 9, pages}};
  const std::vector<RowsMove> moves = {{.row = 3, .follows = true, .num_ids = 2}, {}, {.row = 5}};
  Batch batch{ids, positions, sequences, logit_rows};
  batch.moves = moves;
  const DeviceBatch b = stage.write(batch, 8);
  const BatchStage::AcceptedRows rows = stage.accepted_rows();
  EXPECT_TRUE(rows.has_moves);
  EXPECT_EQ(rows.num_rows, 6);
  EXPECT_EQ(rows.token_ids, b.token_ids);
  const int32_t right = move_code(kLimits.max_logit_rows + 3, false), itself = move_code(5, false);
  EXPECT_EQ(values(rows.moves, 8), (Values{right + 1, right + 1, right, 0, itself, itself, 0, 0}));
  EXPECT_EQ(values(rows.num_drafts, 8), (Values{2, 0, 0, 0, 1, 0, 0, 0}));
  EXPECT_EQ(values(b.first_position, 8), (Values{20, 21, 22, 5, 9, 10, 0, 0})) << "row t is sequence t";
}

TEST(BatchStage, AStepDecodesIfAllRowsHaveLogitsAndNoSequenceHasTooMany) {
  StageLimits limits = with_window();
  limits.rows_per_request = 2;
  Stage drafted(limits), plain(with_window());
  const std::vector<int32_t> ids(4), pages = {7, 8};
  const std::vector<int64_t> positions = {0, 1, 2, 0}, logit_rows = {0, 1, 2, 3};
  const std::vector<SequenceRows> three = {{0, 3, 0, pages}, {3, 1, 0, pages}},
                                  two = {{0, 2, 0, pages}, {2, 1, 2, pages}, {3, 1, 0, pages}},
                                  one = {
                                      {0, 1, 0, pages}, {1, 1, 1, pages}, {2, 1, 2, pages}, {3, 1, 0, pages}};
  const auto decodes = [&](Stage& stage, std::span<const SequenceRows> sequences, size_t num_logit_rows) {
    return stage.decodes({ids, positions, sequences, std::span(logit_rows).first(num_logit_rows)});
  };
  EXPECT_FALSE(decodes(drafted, three, 4));
  EXPECT_TRUE(decodes(drafted, two, 4));
  EXPECT_FALSE(decodes(drafted, two, 3));
  EXPECT_TRUE(decodes(drafted, one, 4));
  EXPECT_FALSE(decodes(plain, two, 4));
  EXPECT_TRUE(decodes(plain, one, 4));
  EXPECT_FALSE(decodes(plain, one, 3));
  EXPECT_TRUE(plain.decodes({}));
}

TEST(BatchStage, AMixedStepKeepsItsRowsAndWantsSomeLogits) {
  Stage stage;
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5, 6}, pages = {9};
  const std::vector<int64_t> positions = {0, 1, 2, 3, 10, 0}, logit_rows = {4};
  const std::vector<SequenceRows> sequences = {{0, 4, 0, pages}, {4, 1, 10, pages}, {5, 1, 0, pages}};
  const DeviceBatch b = stage.write({ids, positions, sequences, logit_rows}, 6);
  EXPECT_EQ(b.num_rows, 6);
  EXPECT_EQ(b.num_sequences, 3);
  EXPECT_EQ(b.num_logit_rows, 1);
  EXPECT_EQ(b.max_rows, 4);
  EXPECT_EQ(values(b.row_sequence, 6), (Values{0, 0, 0, 0, 1, 2}));
  EXPECT_EQ(values(b.first_row, 4), (Values{0, 4, 5, 6}));
  EXPECT_EQ(values(b.logit_rows, 1), (Values{4}));
}

TEST(BatchStage, APaddingStepHasTheAddressesOfAnyOtherOfItsSize) {
  Stage stage;
  const DeviceBatch padding = stage.write({}, 4);
  EXPECT_EQ(padding.num_sequences, 4);
  EXPECT_EQ(padding.max_rows, 1);
  EXPECT_EQ(values(padding.row_sequence, 4), (Values{-1, -1, -1, -1}));
  EXPECT_EQ(values(padding.first_row, 5), (Values{0, 0, 0, 0, 0}));
  const std::vector<int32_t> ids = {11}, pages = {7};
  const std::vector<int64_t> positions = {20}, logit_rows = {0};
  const std::vector<SequenceRows> sequences = {{0, 1, 20, pages}};
  const DeviceBatch one = stage.write({ids, positions, sequences, logit_rows}, 4);
  EXPECT_EQ(one.token_ids, padding.token_ids);
  EXPECT_EQ(one.positions, padding.positions);
  EXPECT_EQ(one.row_sequence, padding.row_sequence);
  EXPECT_EQ(one.first_row, padding.first_row);
  EXPECT_EQ(one.first_position, padding.first_position);
  EXPECT_EQ(one.page_table, padding.page_table);
  EXPECT_EQ(one.logit_rows, padding.logit_rows);
}

TEST(DecodeBuckets, CoverEverySizeUpToTheLargest) {
  EXPECT_EQ(decode_buckets(64, {}), (Values{1, 2, 4, 8, 12, 16, 24, 32, 48, 64}));
  EXPECT_EQ(decode_buckets(50, {}), (Values{1, 2, 4, 8, 12, 16, 24, 32, 48, 50}));
  EXPECT_EQ(decode_buckets(1, {}), (Values{1}));
  EXPECT_EQ(decode_buckets(160, {}), (Values{1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160}));
  const Values given = {32, 4, 4, 100, 0};
  EXPECT_EQ(decode_buckets(64, given), (Values{4, 32}));
}

// Sizes of verified drafts: each request has several rows.
TEST(DecodeBuckets, GoUpToTheRowsOfAllDrafts) {
  EXPECT_EQ(decode_buckets(1, {}, 4), (Values{1, 2, 4}));
  EXPECT_EQ(decode_buckets(3, {}, 3), (Values{1, 2, 3, 4, 8, 9}));
  EXPECT_EQ(decode_buckets(64, {}, 4),
            (Values{1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256}));
  const std::vector<int64_t> many = decode_buckets(256, {}, 4);
  EXPECT_EQ(many.back(), 1024);
  EXPECT_EQ(std::ranges::count(many, 256), 1);
  for (size_t i = 1; i < many.size(); ++i)
    EXPECT_LE(many[i] - many[i - 1], std::max<int64_t>(32, many[i - 1] / 8)) << many[i];
  EXPECT_EQ(decode_buckets(8, Values{2, 8, 40}, 4), (Values{2, 8, 32}));
}

TEST(DecodeBuckets, ARowCountGoesToTheNextBucketOrStaysAsItIs) {
  const Values buckets = {1, 4, 16};
  EXPECT_EQ(bucket_for(buckets, 1), 1);
  EXPECT_EQ(bucket_for(buckets, 2), 4);
  EXPECT_EQ(bucket_for(buckets, 16), 16);
  EXPECT_EQ(bucket_for(buckets, 17), 17);
}

}  // namespace
}  // namespace fp4moe
