// gated_delta on a GPU with drafts: compares it with the oracle, and the rows of right drafts with the rows
// of plain decoding.
#include <algorithm>

#include "kernels/cuda/delta_on_gpu.h"

namespace fp4moe {
namespace {

// A sequence whose prompt joins the batches at step `joins`, and which then has up to num_drafts drafts a
// step.
struct DraftedSequence {
  int64_t prompt, num_tokens, num_drafts;
  int64_t joins = 0;
};

// The steps of sequences whose tokens are consecutive rows of `plain`, in slots 1, 2, ... Between none and
// all of a step's drafts are right, and some steps have none.
struct Drafted {
  DeltaCase rows;                                  // of all steps
  std::vector<int64_t> plain_rows;                 // of each row of `rows`; -1: a wrong draft
  std::vector<std::vector<SequenceRows>> batches;  // steps

  Drafted(const DeltaCase& plain, const std::vector<DraftedSequence>& sequences) : rows(plain) {
    std::vector<int64_t> at(sequences.size()), num_replayed(sequences.size());
    for (int64_t step = 0; add_step(sequences, step, at, num_replayed); ++step) {
    }
    rows = DeltaCase(plain.dims, std::ssize(plain_rows), 1, plain.width);
    rows.conv_weight = plain.conv_weight, rows.decay = plain.decay;
    rows.dt_bias = plain.dt_bias, rows.norm_weight = plain.norm_weight;
    for (float& x : rows.qkv) x = 3 - x;
    for (size_t row = 0; row < plain_rows.size(); ++row) {
      if (plain_rows[row] < 0) continue;
      const auto copy = [&](const std::vector<float>& from, std::vector<float>& to, int64_t stride) {
        std::copy_n(from.begin() + plain_rows[row] * stride, stride,
                    to.begin() + static_cast<int64_t>(row) * stride);
      };
      copy(plain.qkv, rows.qkv, plain.qkv_stride());
      copy(plain.z, rows.z, plain.columns() + 5);
      copy(plain.ba, rows.ba, plain.ba_stride());
    }
  }

 private:
  // Returns whether a sequence has tokens left or has yet to join.
  bool add_step(const std::vector<DraftedSequence>& sequences, int64_t step, std::vector<int64_t>& at,
                std::vector<int64_t>& num_replayed) {
    std::vector<SequenceRows> batch;
    int64_t first = 0;  // the sequence's first token in `plain`
    for (size_t s = 0; s < sequences.size(); first += sequences[s++].num_tokens) {
      const DraftedSequence& sequence = sequences[s];
      if (step < sequence.joins || at[s] == sequence.num_tokens) continue;
      const bool is_prompt = at[s] == 0;
      const int64_t turn = step + static_cast<int64_t>(s);
      const int64_t drafts =
          is_prompt || turn % 4 == 3 ? 0 : std::min(sequence.num_drafts, sequence.num_tokens - 1 - at[s]);
      const int64_t num_committed = is_prompt ? sequence.prompt : 1;
      const int64_t right = std::min(drafts, turn % (sequence.num_drafts + 1));
      batch.push_back({.first_row = std::ssize(plain_rows),
                       .num_rows = num_committed + drafts,
                       .first_position = at[s],
                       .slot = static_cast<int32_t>(s + 1),
                       .num_replayed = static_cast<int32_t>(num_replayed[s]),
                       .num_tentative = static_cast<int32_t>(drafts)});
      for (int64_t i = 0; i < num_committed + drafts; ++i)
        plain_rows.push_back(i < num_committed + right ? first + at[s] + i : -1);
      at[s] += num_committed + right;
      num_replayed[s] = right;
    }
    if (!batch.empty()) batches.push_back(batch);
    return std::ranges::any_of(sequences, [&](const DraftedSequence& s) { return step < s.joins; }) ||
           !batch.empty();
  }
};

// Expects the outputs of the right rows to have the bits of the plain rows.
void expect_plain_bits(const Drafted& drafted, const std::vector<float>& out,
                       const std::vector<float>& plain_out, const std::string& what) {
  const auto columns = static_cast<size_t>(drafted.rows.columns());
  for (size_t row = 0; row < drafted.plain_rows.size(); ++row) {
    if (drafted.plain_rows[row] < 0) continue;
    const auto at = static_cast<size_t>(drafted.plain_rows[row]);
    const auto actual = out.begin() + static_cast<std::ptrdiff_t>(row * columns),
               plain = plain_out.begin() + static_cast<std::ptrdiff_t>(at * columns);
    const auto end = static_cast<std::ptrdiff_t>(columns);
    ASSERT_TRUE(same_bits(std::vector<float>(actual, actual + end), std::vector<float>(plain, plain + end)))
        << what << ", row " << row;
  }
}

// The batches of each sequence for itself, one sequence after the other.
std::vector<std::vector<SequenceRows>> one_by_one(const std::vector<std::vector<SequenceRows>>& batches,
                                                  size_t num_sequences) {
  std::vector<std::vector<SequenceRows>> alone;
  for (size_t slot = 1; slot <= num_sequences; ++slot)
    for (const auto& batch : batches)
      for (const SequenceRows& rows : batch)
        if (rows.slot == static_cast<int32_t>(slot)) alone.push_back({rows});
  return alone;
}

TEST_F(GatedDeltaCuda, DraftsHaveTheSameBitsAsPlainDecoding) {
  ops_ = cuda_invariant_dense_ops();
  for (const Dims& dims : {Dims{2, 4, 128, 128}, Dims{1, 8, 64, 128}, Dims{1, 2, 7, 81}, Dims{1, 2, 256, 256},
                           Dims{2, 2, 16, 16}, Dims{1, 1, 1, 1}})
    for (const int width : {1, 4, 8})
      for (const int64_t most : {int64_t{1}, int64_t{3}, int64_t{kMaxReplayRows}}) {
        const std::vector<DraftedSequence> sequences = {
            {1, 40, most}, {7, 30, std::min<int64_t>(most, 2)}, {20, 60, most, 3}};
        const DeltaCase c(dims, 130, 1, width);
        const Drafted drafted(c, sequences);
        const std::string what = std::to_string(dims.dk) + " x " + std::to_string(dims.dv) + ", width " +
                                 std::to_string(width) + ", " + std::to_string(most) + " drafts";
        std::vector<std::vector<SequenceRows>> ones;
        int64_t first = 0;
        for (int32_t s = 0; s < 3; first += sequences[static_cast<size_t>(s++)].num_tokens)
          for (int64_t i = 0; i < sequences[static_cast<size_t>(s)].num_tokens; ++i)
            ones.push_back({{.first_row = first + i, .num_rows = 1, .first_position = i, .slot = s + 1}});
        num_replay_rows_ = 0;
        const Outputs plain = run(c, ones, 5);
        num_replay_rows_ = most;
        const Outputs actual = run(drafted.rows, drafted.batches, 5),
                      wanted = expected(drafted.rows, drafted.batches, 5);
        expect_near(actual.out, wanted.out, 2e-5, what + ", out");
        expect_near(actual.recurrent, wanted.recurrent, 2e-5, what + ", recurrent");
        expect_near(actual.conv, wanted.conv, 0, what + ", conv");
        expect_near(actual.replay, wanted.replay, 0, what + ", replay rows");
        expect_plain_bits(drafted, actual.out, plain.out, what);
        EXPECT_EQ(run(drafted.rows, drafted.batches, 5, DType::kF32, 4, /*records=*/true), actual) << what;
        EXPECT_EQ(run(drafted.rows, one_by_one(drafted.batches, 3), 5, DType::kF32, 0), actual) << what;
      }
}

// Sequences with drafts beside prompts that run in chunks, and long ones with drafts, which do not.
TEST_F(GatedDeltaCuda, DraftsBesideChunks) {
  num_replay_rows_ = 5;
  const DeltaCase c({2, 4, 128, 128}, 480);
  const Drafted drafted(c, {{3, 60, 5}, {100, 160, 3, 2}, {40, 60, 5, 4}, {150, 200, 1, 4}});
  const Outputs actual = run(drafted.rows, drafted.batches, 6),
                wanted = expected(drafted.rows, drafted.batches, 6);
  expect_near(actual.out, wanted.out, 2e-5, "out");
  expect_near(actual.recurrent, wanted.recurrent, 2e-5, "recurrent");
  expect_near(actual.conv, wanted.conv, 0, "conv");
  expect_near(actual.replay, wanted.replay, 0, "replay rows");
  EXPECT_EQ(run(drafted.rows, one_by_one(drafted.batches, 4), 6, DType::kF32, 0), actual);
  EXPECT_EQ(run(drafted.rows, drafted.batches, 6, DType::kF32, 9, /*records=*/true), actual);
  const std::vector<std::vector<SequenceRows>> long_rows = {
      {{.num_rows = 100, .slot = 1, .num_tentative = 4}},
      {{.first_row = 96, .num_rows = 104, .first_position = 96, .slot = 1},
       {.first_row = 200, .num_rows = 64, .slot = 2}},
      {{.first_row = 264, .num_rows = 70, .first_position = 200, .slot = 1, .num_tentative = 5}},
      {{.first_row = 334, .num_rows = 66, .first_position = 268, .slot = 1, .num_replayed = 3},
       {.first_row = 400, .num_rows = 1, .first_position = 64, .slot = 2}}};
  Outputs chunked = run(c, long_rows, 3), by_oracle = expected(c, long_rows, 3);
  for (Outputs* outputs : {&chunked, &by_oracle}) outputs->out.resize(static_cast<size_t>(401 * c.columns()));
  expect_near(chunked.out, by_oracle.out, 2e-5, "out, long");
  expect_near(chunked.recurrent, by_oracle.recurrent, 2e-5, "recurrent, long");
  expect_near(chunked.conv, by_oracle.conv, 0, "conv, long");
  expect_near(chunked.replay, by_oracle.replay, 0, "replay rows, long");
}

TEST_F(GatedDeltaCuda, AShardOfHeadsWithDraftsHasTheBitsOfTheWhole) {
  num_replay_rows_ = 4;
  const DeltaCase c({2, 4, 128, 128}, 90);
  const Drafted drafted(c, {{5, 50, 4}, {33, 40, 2}});
  const Outputs whole = run(drafted.rows, drafted.batches, 3);
  const int64_t columns = c.columns() / 2, state_size = c.state_size() / 2;
  for (const int64_t rank : {0, 1}) {
    const DeltaCase part = shard(drafted.rows, static_cast<int>(rank));
    const Outputs actual = run(part, drafted.batches, 3);
    for (int64_t t = 0; t < part.tokens; ++t)
      for (int64_t i = 0; i < columns; ++i)
        ASSERT_EQ(actual.out[t * columns + i], whole.out[t * c.columns() + rank * columns + i]) << t;
    for (int64_t slot = 1; slot < 3; ++slot)
      for (int64_t i = 0; i < state_size; ++i)
        ASSERT_EQ(actual.recurrent[slot * state_size + i],
                  whole.recurrent[slot * c.state_size() + rank * state_size + i])
            << slot;
    const Outputs wanted = expected(part, drafted.batches, 3);
    expect_near(actual.conv, wanted.conv, 0, "conv");
    expect_near(actual.replay, wanted.replay, 0, "replay rows");
  }
}

}  // namespace
}  // namespace fp4moe
