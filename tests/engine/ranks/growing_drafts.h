// Growing sequences with drafts, compared with plain decoding.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/ranks/growing.h"

namespace fp4moe {

// Flags with which sequences may have up to 4 rows in a decode step.
inline EngineConfig with_drafts(EngineConfig flags) {
  flags.speculative_algorithm = "NGRAM";
  flags.speculative_num_draft_tokens = 4;
  return flags;
}

// Runs steps with and without drafts.
inline void expect_equal_bits_with_drafts(Growing& recorded, Growing& launched) {
  ASSERT_EQ(recorded.step(kPrompts), launched.step(kPrompts));
  for (int32_t i = 0; i < 4; ++i) {
    const std::vector<std::vector<int32_t>> rows = {{i, 7, 8, 9}, {i + 1}, {5, i}};
    ASSERT_EQ(recorded.verify(rows), launched.verify(rows)) << "step " << i;
    for (Growing* growing : {&recorded, &launched}) growing->drop_last(0, 2);
    const std::vector<std::vector<int32_t>> next = {{3}, {i}, {9}};
    ASSERT_EQ(recorded.step(next), launched.step(next)) << "step " << i << " without drafts";
  }
}

// Decodes the prompts with drafts of `drafted`, and without them by `plain`: steps of 4, 3 and 2 rows whose
// first `num_right` drafts (2, 1, 0, ...) are what plain decoding chooses. Calls check(a, b, what) with the
// logits of each row up to the first wrong draft, and those of the same token without drafts.
template <class Check>
void compare_with_plain(Growing& drafted, Growing& plain, const Check& check) {
  constexpr int kSteps = 7;
  Logits next = plain.step(kPrompts);
  std::vector<std::vector<int32_t>> chosen = best_of(next);  // by plain decoding, sequence by sequence
  std::vector<Logits> after{{}, {}, {}};                     // the logits after each of them
  for (int i = 0; i < 3 * kSteps; ++i) {
    std::vector<std::vector<int32_t>> last;
    for (const auto& ids : chosen) last.push_back({ids.back()});
    next = plain.step(last);
    for (size_t s = 0; s < 3; ++s) {
      after[s].push_back(next[s]);
      chosen[s].push_back(best(next[s]));
    }
  }
  drafted.step(kPrompts);
  size_t at[3] = {};  // how many of `chosen` are computed
  for (size_t step = 0; step < kSteps; ++step) {
    std::vector<std::vector<int32_t>> rows(3);
    size_t num_right[3];
    for (size_t s = 0; s < 3; ++s) {
      num_right[s] = (step + s) % 3;
      for (size_t i = 0; i < 4 - s; ++i)
        rows[s].push_back(i <= num_right[s] ? chosen[s][at[s] + i] : (chosen[s][at[s] + i] + 1) % 97);
      num_right[s] = std::min(num_right[s], 3 - s);
    }
    const std::vector<Logits> logits = drafted.verify(rows);
    for (size_t s = 0; s < 3; ++s) {
      for (size_t i = 0; i <= num_right[s]; ++i)
        check(logits[s][i], after[s][at[s] + i],
              "step " + std::to_string(step) + ", sequence " + std::to_string(s) + ", row " +
                  std::to_string(i));
      drafted.drop_last(s, rows[s].size() - 1 - num_right[s]);
      at[s] += num_right[s] + 1;
    }
  }
}

// Decodes a model with states with drafts: logits, and then the states, have the bits of the tokens without
// drafts, and a rank that takes the states over continues with these bits.
inline void expect_states_without_drafts(const std::string& model, const EngineConfig& flags,
                                         const std::string& what) {
  Growing drafted(model, with_drafts(flags));
  {
    Growing plain(model, flags);
    compare_with_plain(drafted, plain, [&](const auto& a, const auto& b, const std::string& where) {
      EXPECT_EQ(a, b) << what << ", " << where;
    });
  }
  Logits last = drafted.step({{1}, {2}, {3}});  // replays the last drafts
  Growing prefilled(model, flags);
  for (const bool is_first : {true, false}) {
    std::vector<std::vector<int32_t>> halves;
    for (size_t s = 0; s < 3; ++s) {
      const std::vector<int32_t>& all = drafted.tokens(s);
      const auto middle = all.begin() + std::ssize(all) / 2;
      halves.emplace_back(is_first ? all.begin() : middle, is_first ? middle : all.end());
    }
    if (const Logits logits = prefilled.step(halves); !is_first) {
      EXPECT_EQ(logits, last) << what;
    }
  }
  EXPECT_EQ(drafted.states(), prefilled.states()) << what;
  Growing decode(model, with_drafts(flags));
  decode.take_over(drafted);
  for (int i = 0; i < 3; ++i) {
    const auto next = best_of(last);
    last = drafted.step(next);
    ASSERT_EQ(decode.step(next), last) << what << ", step " << i;
  }
}

}  // namespace fp4moe
