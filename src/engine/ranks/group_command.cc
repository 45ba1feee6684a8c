#include "engine/ranks/group_command.h"

#include <array>
#include <cstring>
#include <string>

#include "base/check.h"
#include "fp4moe/request.h"

namespace fp4moe {
namespace {

constexpr int64_t kCommandMagic = 0x53345047;  // "GP4S"
using Words = std::array<int64_t, 8>;          // magic, kind, five array sizes or two counts, 0

template <class T>
void put_array(const std::vector<T>& from, std::vector<uint8_t>& bytes) {
  const size_t begin = bytes.size(), num_bytes = from.size() * sizeof(T);
  bytes.resize(begin + num_bytes);
  if (num_bytes > 0) std::memcpy(bytes.data() + begin, from.data(), num_bytes);
}

// Takes an array off the front of `bytes`; false if they are too few.
template <class T>
bool take_array(std::span<const uint8_t>& bytes, int64_t count, std::vector<T>& to) {
  if (count < 0 || static_cast<uint64_t>(count) > bytes.size() / sizeof(T)) return false;
  to.resize(static_cast<size_t>(count));
  if (count > 0) std::memcpy(to.data(), bytes.data(), to.size() * sizeof(T));
  bytes = bytes.subspan(to.size() * sizeof(T));
  return true;
}

Status bad_command(const std::string& what, int64_t value) {
  return data_loss("a group's command: " + what + " " + std::to_string(value));
}

// A range of an array.
bool is_inside(int32_t first, int32_t count, size_t size) {
  return first >= 0 && count >= 0 && static_cast<uint64_t>(first) + static_cast<uint64_t>(count) <= size;
}

Status check_sample(const GroupCommand& c, const StepLimits& limits) {
  if (std::ssize(c.rows) > limits.max_logit_rows) return bad_command("rows", std::ssize(c.rows));
  const int64_t mask_words = (limits.vocab_size + 31) / 32, num_masks = std::ssize(c.allowed) / mask_words;
  for (const SampleRowParams& row : c.rows) {
    if (!is_inside(row.first_edit, row.num_edits, c.edits.size())) return bad_command("edits", row.num_edits);
    if (!is_inside(row.first_logprob_id, row.num_logprob_ids, c.ids.size()))
      return bad_command("listed ids", row.num_logprob_ids);
    if (row.allowed >= num_masks) return bad_command("mask", row.allowed);
    if (row.given_id >= limits.vocab_size) return bad_command("given id", row.given_id);
    if (row.top_logprobs > kMaxTopLogprobs) return bad_command("top_logprobs", row.top_logprobs);
  }
  for (const LogitEdit& edit : c.edits)
    if (edit.token_id >= limits.vocab_size || ~int64_t{edit.token_id} >= limits.num_unknown_ids)
      return bad_command("edited id", edit.token_id);
  return {};
}

}  // namespace

std::vector<uint8_t> encode_command(const GroupCommand& c) {
  const bool takes = c.kind == CommandKind::kTake;
  const Words words = {kCommandMagic,
                       static_cast<int64_t>(c.kind),
                       std::ssize(c.step),
                       takes ? c.num_rows : std::ssize(c.rows),
                       std::ssize(c.edits),
                       std::ssize(c.allowed),
                       takes ? c.num_ids : std::ssize(c.ids),
                       0};
  std::vector<uint8_t> bytes(sizeof words);
  std::memcpy(bytes.data(), words.data(), sizeof words);
  put_array(c.rows, bytes);
  put_array(c.edits, bytes);
  put_array(c.allowed, bytes);
  put_array(c.ids, bytes);
  put_array(c.step, bytes);
  return bytes;
}

Result<GroupCommand> decode_command(std::span<const uint8_t> bytes, const StepLimits& limits) {
  Words words{};
  if (bytes.size() < sizeof words) return bad_command("length", std::ssize(bytes));
  std::memcpy(words.data(), bytes.data(), sizeof words);
  bytes = bytes.subspan(sizeof words);
  if (words[0] != kCommandMagic) return bad_command("unknown magic", words[0]);
  if (words[1] < 0 || words[1] > static_cast<int64_t>(CommandKind::kMask))
    return bad_command("unknown kind", words[1]);
  GroupCommand c{.kind = static_cast<CommandKind>(words[1])};
  if (c.kind == CommandKind::kTake) {
    c.num_rows = words[3], c.num_ids = words[6];
    if (c.num_rows < 0 || c.num_rows > limits.max_logit_rows) return bad_command("rows", c.num_rows);
    if (c.num_ids < 0 || c.num_ids > c.num_rows * SamplingParams::kMaxLogprobIds)
      return bad_command("listed ids", c.num_ids);
    return c;
  }
  if (!take_array(bytes, words[3], c.rows) || !take_array(bytes, words[4], c.edits) ||
      !take_array(bytes, words[5], c.allowed) || !take_array(bytes, words[6], c.ids) ||
      !take_array(bytes, words[2], c.step) || !bytes.empty())
    return bad_command("sizes that do not match its length; left", std::ssize(bytes));
  for (const int32_t id : c.ids)
    if (id < 0 || id >= limits.vocab_size) return bad_command("id", id);
  if (c.kind == CommandKind::kSample) FP4MOE_RETURN_IF_ERROR(check_sample(c, limits));
  return c;
}

}  // namespace fp4moe
