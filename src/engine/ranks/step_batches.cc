#include "engine/ranks/step_batches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr uint32_t kMagic = 0x53345046;  // "FP4S"
// Bits of the header's last word.
constexpr uint32_t kIsDraft = 1, kHasFeatures = 2, kChains = 4, kMovesExperts = 8;
constexpr int64_t kHeaderWords = 4, kGroupWords = 5, kSequenceWords = 7, kCopyWords = 2;

uint32_t word(int64_t n) {
  FP4MOE_CHECK(n >= 0 && n <= std::numeric_limits<uint32_t>::max(),
               "a step's field does not fit in a word: " + std::to_string(n));
  return static_cast<uint32_t>(n);
}

Status bad(const std::string& what) { return data_loss("a step's message: " + what); }

Status beyond(const char* what, int64_t value, int64_t limit) {
  return bad(std::string(what) + " " + std::to_string(value) + "; legal: at most " + std::to_string(limit));
}

Status decode_pages(std::span<const uint32_t> words, const char* what, int64_t num_pages,
                    std::vector<int32_t>& pages) {
  for (const uint32_t page : words) {
    if (page >= static_cast<uint64_t>(num_pages)) return beyond(what, page, num_pages - 1);
    pages.push_back(static_cast<int32_t>(page));
  }
  return {};
}

// Copies the sequences' tables to `tables` and makes the sequences refer to the copies.
void own_tables(std::vector<SequenceRows>& sequences, std::span<const int32_t> SequenceRows::*table,
                std::vector<int32_t>& tables) {
  tables.clear();
  for (const SequenceRows& s : sequences) tables.insert(tables.end(), (s.*table).begin(), (s.*table).end());
  std::span<const int32_t> rest(tables);
  for (SequenceRows& s : sequences) {
    const size_t size = (s.*table).size();
    s.*table = rest.first(size);
    rest = rest.subspan(size);
  }
}

}  // namespace

void StepBatches::assign(std::span<const Batch> groups) {
  groups_.resize(groups.size());
  model_ = groups.empty() ? BatchModel::kTarget : groups[0].model;
  has_features_ = chains_ = false;
  moves_experts_ = !groups.empty() && groups[0].moves_experts;
  for (size_t g = 0; g < groups.size(); ++g) {
    const Batch& from = groups[g];
    Group& to = groups_[g];
    to.token_ids.assign(from.token_ids.begin(), from.token_ids.end());
    to.positions.assign(from.positions.begin(), from.positions.end());
    to.logit_rows.assign(from.logit_rows.begin(), from.logit_rows.end());
    to.feature_rows.assign(from.feature_rows.begin(), from.feature_rows.end());
    FP4MOE_CHECK(from.model == model_, "a step with batches for two models");
    has_features_ = has_features_ || !from.feature_rows.empty();
    chains_ = chains_ || from.chains;
    to.sequences.assign(from.sequences.begin(), from.sequences.end());
    to.state_copies.assign(from.state_copies.begin(), from.state_copies.end());
    to.routed_experts = from.routed_experts;
    own_tables(to.sequences, &SequenceRows::page_table, to.page_tables);
    own_tables(to.sequences, &SequenceRows::window_page_table, to.window_tables);
  }
}

int64_t StepBatches::max_bytes(const StepLimits& limits) {
  // Token id, sequence, logit row, feature row.
  const int64_t of_rows =
      limits.max_batch_tokens * (1 + kSequenceWords + 1 + (limits.draft.takes_features ? 1 : 0));
  const int64_t of_tables = limits.max_table_pages * (limits.num_window_pages > 0 ? 2 : 1);
  const int64_t of_copies = limits.max_state_copies() * kCopyWords;
  return 4 * (kHeaderWords + limits.num_groups * (kGroupWords + of_rows + of_tables + of_copies));
}

void StepBatches::encode(std::vector<uint8_t>& bytes) const {
  const uint32_t bits = (model_ == BatchModel::kDraft ? kIsDraft : 0) | (has_features_ ? kHasFeatures : 0) |
                        (chains_ ? kChains : 0) | (moves_experts_ ? kMovesExperts : 0);
  std::vector<uint32_t> words = {kMagic, 0, word(static_cast<int64_t>(groups_.size())), bits};
  for (const Group& g : groups_) {
    for (const size_t n : {g.token_ids.size(), g.sequences.size(), g.logit_rows.size(), g.page_tables.size(),
                           g.state_copies.size()})
      words.push_back(word(static_cast<int64_t>(n)));
    for (const int32_t id : g.token_ids) words.push_back(static_cast<uint32_t>(id));
    for (const SequenceRows& s : g.sequences) {
      words.push_back(word(s.num_rows));
      words.push_back(static_cast<uint32_t>(s.first_position));
      words.push_back(static_cast<uint32_t>(s.first_position >> 32));
      words.push_back(word(static_cast<int64_t>(s.page_table.size())));
      for (const int32_t n : {s.slot, s.num_replayed, s.num_tentative}) words.push_back(word(n));
    }
    for (const StateCopy& copy : g.state_copies) {
      words.push_back(word(copy.from));
      words.push_back(word(copy.to));
    }
    for (const int64_t row : g.logit_rows) words.push_back(word(row));
    for (const int64_t row : g.feature_rows) words.push_back(word(row));
    for (const int32_t page : g.page_tables) words.push_back(word(page));
    if (g.window_tables.empty()) continue;
    for (const SequenceRows& s : g.sequences) {  // as many entries as in its other table
      for (const int32_t page : s.window_page_table) words.push_back(word(page));
      words.insert(words.end(), s.page_table.size() - s.window_page_table.size(), 0);
    }
  }
  words[1] = word(static_cast<int64_t>(words.size()));
  bytes.resize(words.size() * 4);
  std::memcpy(bytes.data(), words.data(), bytes.size());
}

Status StepBatches::decode(std::span<const uint8_t> bytes, const StepLimits& limits) {
  if (bytes.size() < kHeaderWords * 4) return bad("only " + std::to_string(bytes.size()) + " bytes");
  std::vector<uint32_t> all(bytes.size() / 4);
  std::memcpy(all.data(), bytes.data(), all.size() * 4);
  if (all[0] != kMagic) return bad("unknown magic " + std::to_string(all[0]));
  if (all[1] < kHeaderWords || all[1] > all.size())
    return beyond("length", all[1], static_cast<int64_t>(all.size()));
  if (all[2] != static_cast<uint32_t>(limits.num_groups))
    return bad(std::to_string(all[2]) + " groups instead of " + std::to_string(limits.num_groups));
  FP4MOE_RETURN_IF_ERROR(decode_model(all[3], limits));
  std::span<const uint32_t> words(all.data() + kHeaderWords, all[1] - kHeaderWords);
  groups_.assign(all[2], {});
  last_rows_.resize(all[2]);
  int64_t num_logit_rows = 0;
  for (Group& group : groups_) {
    FP4MOE_RETURN_IF_ERROR(decode_group(words, limits, group));
    num_logit_rows += static_cast<int64_t>(group.logit_rows.size());
  }
  if (num_logit_rows > limits.max_logit_rows)
    return beyond("rows of logits", num_logit_rows, limits.max_logit_rows);
  if (!words.empty()) return bad(std::to_string(words.size()) + " extra words");
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (moves_experts_ && !groups_[g].sequences.empty()) return bad("rows in a step that moves experts");
    if (moves_experts_) continue;  // the features of the pass before stay
    last_rows_[g][static_cast<size_t>(model_)] = std::ssize(groups_[g].token_ids);
  }
  return {};
}

Status StepBatches::decode_model(uint32_t bits, const StepLimits& limits) {
  const bool is_draft = (bits & kIsDraft) != 0;
  has_features_ = (bits & kHasFeatures) != 0;
  chains_ = (bits & kChains) != 0;
  model_ = is_draft ? BatchModel::kDraft : BatchModel::kTarget;
  moves_experts_ = (bits & kMovesExperts) != 0;
  if (moves_experts_ && bits != kMovesExperts) return bad("a step that moves experts and runs a model");
  if ((bits & ~(kIsDraft | kHasFeatures | kChains | kMovesExperts)) != 0)
    return bad("unknown bits " + std::to_string(bits));
  if (is_draft && limits.draft.vocab_size == 0) return bad("batches for a draft model, but there is none");
  if (has_features_ != (is_draft && limits.draft.takes_features))
    return bad(has_features_ ? "features for a model that takes none" : "a draft without features");
  return chains_ && !has_features_ ? bad("a chain without features") : Status();
}

// Row t's features are those of a row of the group's last pass of the model that the batch continues.
Status StepBatches::decode_feature_rows(std::span<const uint32_t> words, size_t index, Group& group) const {
  const BatchModel source = chains_ ? BatchModel::kDraft : BatchModel::kTarget;
  const int64_t num_rows = last_rows_[index][static_cast<size_t>(source)];
  for (const uint32_t row : words) {
    if (row >= num_rows) return beyond("feature row", row, num_rows - 1);
    group.feature_rows.push_back(row);
  }
  return {};
}

// Decodes one group and removes its words from the front of `words`.
Status StepBatches::decode_group(std::span<const uint32_t>& words, const StepLimits& limits,
                                 Group& group) const {
  if (words.size() < kGroupWords) return bad("it ends within a group");
  const uint64_t rows = words[0], sequences = words[1], logit_rows = words[2], pages = words[3];
  const uint64_t copies = words[4];
  if (rows > static_cast<uint64_t>(limits.max_batch_tokens))
    return beyond("rows", words[0], limits.max_batch_tokens);
  if (sequences > rows) return beyond("sequences", words[1], words[0]);
  if (logit_rows > rows) return beyond("rows of logits", words[2], words[0]);
  if (pages > static_cast<uint64_t>(limits.max_table_pages))
    return beyond("pages", words[3], limits.max_table_pages);
  if (copies > static_cast<uint64_t>(limits.max_state_copies()))
    return beyond("state copies", words[4], limits.max_state_copies());
  words = words.subspan(kGroupWords);
  const uint64_t window_pages = limits.num_window_pages > 0 && model_ == BatchModel::kTarget ? pages : 0;
  const uint64_t feature_rows = has_features_ ? rows : 0;
  if (words.size() < rows + sequences * kSequenceWords + copies * kCopyWords + logit_rows + feature_rows +
                         pages + window_pages)
    return bad("it ends within a group");
  const auto take = [&words](uint64_t n) {
    const std::span<const uint32_t> taken = words.first(n);
    words = words.subspan(n);
    return taken;
  };
  for (const uint32_t id : take(rows)) {
    const bool is_unknown = ~id < limits.num_unknown_ids;
    if (!is_unknown && id >= static_cast<uint64_t>(limits.num_ids_of(model_)))
      return beyond("token id", id, limits.num_ids_of(model_) - 1);
    group.token_ids.push_back(static_cast<int32_t>(id));
  }
  const std::span<const uint32_t> of_sequences = take(sequences * kSequenceWords);
  FP4MOE_RETURN_IF_ERROR(decode_copies(take(copies * kCopyWords), limits, group));
  int64_t before = -1;
  for (const uint32_t row : take(logit_rows)) {
    if (row >= rows || row <= before) return bad("invalid logit row " + std::to_string(row));
    group.logit_rows.push_back(before = row);
  }
  FP4MOE_RETURN_IF_ERROR(
      decode_feature_rows(take(feature_rows), static_cast<size_t>(&group - groups_.data()), group));
  FP4MOE_RETURN_IF_ERROR(decode_pages(take(pages), "page", limits.num_kv_pages, group.page_tables));
  FP4MOE_RETURN_IF_ERROR(
      decode_pages(take(window_pages), "window page", limits.num_window_pages, group.window_tables));
  return decode_sequences(of_sequences, limits, group);
}

Status StepBatches::decode_copies(std::span<const uint32_t> words, const StepLimits& limits, Group& group) {
  for (const uint32_t slot : words)
    if (slot < 1 || slot >= static_cast<uint64_t>(limits.num_slots))
      return bad("copied slot " + std::to_string(slot) + "; legal: 1 to " +
                 std::to_string(limits.num_slots - 1));
  for (; !words.empty(); words = words.subspan(kCopyWords))
    group.state_copies.push_back({static_cast<int32_t>(words[0]), static_cast<int32_t>(words[1])});
  return {};
}

Status StepBatches::decode_sequences(std::span<const uint32_t> words, const StepLimits& limits,
                                     Group& group) {
  std::span<const int32_t> pages(group.page_tables), window_pages(group.window_tables);
  int64_t first_row = 0;
  const int64_t num_rows = static_cast<int64_t>(group.token_ids.size());
  for (; !words.empty(); words = words.subspan(kSequenceWords)) {
    const int64_t rows = words[0], num_pages = words[3];
    const int64_t first = static_cast<int64_t>(words[1] | uint64_t{words[2]} << 32);
    if (rows < 1 || rows > num_rows - first_row)
      return beyond("rows of a sequence", rows, num_rows - first_row);
    if (static_cast<uint64_t>(num_pages) > pages.size())
      return beyond("pages of a sequence", num_pages, static_cast<int64_t>(pages.size()));
    if (const int64_t most = std::max<int64_t>(limits.num_slots - 1, 0); words[4] > most)
      return beyond("slot of a sequence", words[4], most);
    const int64_t room = num_pages * limits.page_size;
    if (first < 0 || first > room - rows) return beyond("first position", first, room - rows);
    const auto count = static_cast<size_t>(num_pages), window_count = window_pages.empty() ? 0 : count;
    group.sequences.push_back({first_row, rows, first, pages.first(count), window_pages.first(window_count),
                               static_cast<int32_t>(words[4])});
    FP4MOE_RETURN_IF_ERROR(decode_drafts(words.subspan(5, 2), limits, group.sequences.back()));
    pages = pages.subspan(count);
    window_pages = window_pages.subspan(window_count);
    for (int64_t i = 0; i < rows; ++i) group.positions.push_back(first + i);
    first_row += rows;
  }
  if (first_row != num_rows || !pages.empty())
    return bad("sequences cover " + std::to_string(first_row) + " of " + std::to_string(num_rows) +
               " rows and leave " + std::to_string(pages.size()) + " pages unused");
  return {};
}

// A sequence that replays drafts has a state before them, and at least one new row is no draft.
Status StepBatches::decode_drafts(std::span<const uint32_t> words, const StepLimits& limits,
                                  SequenceRows& sequence) {
  const int64_t most = sequence.slot > 0 ? limits.num_replay_rows : 0;
  const int64_t replayed = words[0], tentative = words[1];
  const int64_t most_replayed = std::min(most, std::max<int64_t>(sequence.first_position - 1, 0));
  if (replayed > most_replayed) return beyond("replayed rows of a sequence", replayed, most_replayed);
  const int64_t most_tentative = std::min(most, sequence.num_rows - 1);
  if (tentative > most_tentative) return beyond("drafts of a sequence", tentative, most_tentative);
  sequence.num_replayed = static_cast<int32_t>(replayed);
  sequence.num_tentative = static_cast<int32_t>(tentative);
  return {};
}

Batch StepBatches::batch(int group) const {
  const Group& g = groups_[static_cast<size_t>(group)];
  return {.token_ids = g.token_ids,
          .positions = g.positions,
          .sequences = g.sequences,
          .logit_rows = g.logit_rows,
          .routed_experts = g.routed_experts,
          .model = model_,
          .feature_rows = g.feature_rows,
          .chains = chains_,
          .moves_experts = moves_experts_,
          .state_copies = g.state_copies};
}

int64_t StepBatches::num_logit_rows(int group) const {
  return static_cast<int64_t>(groups_[static_cast<size_t>(group)].logit_rows.size());
}

int64_t StepBatches::first_logit_row(int group) const {
  int64_t row = 0;
  for (int g = 0; g < group; ++g) row += num_logit_rows(g);
  return row;
}

}  // namespace fp4moe
