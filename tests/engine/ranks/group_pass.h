// One data-parallel group's rows in a step or in a pass of a draft model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "model/model.h"

namespace fp4moe {

struct GroupPass {
  std::vector<int32_t> ids;
  std::vector<int64_t> positions, logit_rows, feature_rows;
  std::vector<SequenceRows> sequences;
  std::vector<size_t> owners;  // the sequence of each row of logits

  // `pages` must outlive this object.
  GroupPass& add(std::span<const int32_t> pages, std::span<const int32_t> tokens, int64_t first_position) {
    sequences.push_back({std::ssize(ids), std::ssize(tokens), first_position, pages, {}});
    ids.insert(ids.end(), tokens.begin(), tokens.end());
    for (int64_t i = 0; i < std::ssize(tokens); ++i) positions.push_back(first_position + i);
    return *this;
  }
  void want_logits(size_t sequence, int64_t row) {
    logit_rows.push_back(row);
    owners.push_back(sequence);
  }
  Batch batch(BatchModel model, bool chains) const {
    Batch out{ids, positions, sequences, logit_rows};
    out.model = model;
    if (model == BatchModel::kDraft) out.feature_rows = feature_rows;
    out.chains = chains;
    return out;
  }
};
using Passes = std::vector<GroupPass>;  // [dp]

// Returns the places of the rows of logits among those of all groups, sequence by sequence.
inline std::vector<size_t> by_sequence(const Passes& passes) {
  std::vector<size_t> owners;
  for (const GroupPass& pass : passes) owners.insert(owners.end(), pass.owners.begin(), pass.owners.end());
  std::vector<size_t> places(owners.size());
  std::iota(places.begin(), places.end(), size_t{0});
  std::ranges::stable_sort(places, {}, [&](size_t place) { return owners[place]; });
  return places;
}

}  // namespace fp4moe
