#include "io/tokenizer/bpe.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "io/tokenizer/unicode_text.h"

namespace fp4moe {
namespace {

// Printable Latin-1 characters map to themselves, and the other 68 bytes map to U+0100 and up.
struct ByteLevelMap {
  std::array<char32_t, 256> to_character;
  std::array<int16_t, 256 + 68> to_byte;  // -1: outside the mapping
};

constexpr ByteLevelMap make_byte_level_map() {
  ByteLevelMap map{};
  map.to_byte.fill(-1);
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    map.to_character[byte] = printable ? static_cast<char32_t>(byte) : next++;
    map.to_byte[map.to_character[byte]] = static_cast<int16_t>(byte);
  }
  return map;
}
constexpr ByteLevelMap kByteLevel = make_byte_level_map();

// A table of this many merges takes 128 MiB.
constexpr size_t kMaxMerges = size_t{1} << 22;

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

// Merges the symbols of one word, best rank first. A stale candidate is still applied if the pair now at its
// position merges into the same token. This is Hugging Face's rule; it decides the ids if two merges have the
// same result.
void merge_all(const MergeTable& merges, BpeModel::Scratch* scratch) {
  auto& [symbols, heap] = *scratch;
  const auto consider = [&, &symbols = symbols, &heap = heap](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return false;
    const MergeTable::Merge* merge = merges.find(symbols[left].id, symbols[right].id);
    if (merge) heap.push_back({merge->rank, left, merge->merged});
    return merge != nullptr;
  };
  heap.clear();
  for (size_t i = 1; i < symbols.size(); ++i) consider(static_cast<int32_t>(i) - 1, static_cast<int32_t>(i));
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    const BpeModel::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    BpeModel::Symbol& left = symbols[best.position];
    if (left.id < 0 || left.next < 0) continue;
    BpeModel::Symbol& right = symbols[left.next];
    const MergeTable::Merge* current = merges.find(left.id, right.id);
    if (!current || current->merged != best.merged) continue;
    left.id = best.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[left.next].previous = best.position;
    if (consider(left.previous, best.position)) std::push_heap(heap.begin(), heap.end());
    if (consider(best.position, left.next)) std::push_heap(heap.begin(), heap.end());
  }
}

}  // namespace

std::optional<std::string> bytes_of_byte_level(std::string_view token) {
  std::string bytes;
  for (size_t i = 0; i < token.size();) {
    const uint32_t num_bytes = utf8_step(token.substr(i)).num_bytes;
    const char32_t character = decode_utf8(token.substr(i), num_bytes);
    if (character >= kByteLevel.to_byte.size() || kByteLevel.to_byte[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kByteLevel.to_byte[character]);
    i += num_bytes;
  }
  return bytes;
}

std::string byte_level_of(uint8_t byte) {
  std::string character;
  append_utf8(kByteLevel.to_character[byte], &character);
  return character;
}

MergeTable::MergeTable(size_t count) : slots_(std::bit_ceil(2 * count + 2)) {}

size_t MergeTable::slot_of(uint64_t key) const {
  const size_t mask = slots_.size() - 1;
  uint64_t hash = key * 0x9E3779B97F4A7C15u;  // 2^64 divided by the golden ratio
  hash ^= hash >> 32;
  size_t slot = hash & mask;
  while (slots_[slot].key != key && slots_[slot].key != kEmpty) slot = (slot + 1) & mask;
  return slot;
}

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = pair_key(left, right);
  slots_[slot_of(key)] = {key, merge};
}

const MergeTable::Merge* MergeTable::find(int32_t left, int32_t right) const {
  const Slot& slot = slots_[slot_of(pair_key(left, right))];
  return slot.key == kEmpty ? nullptr : &slot.merge;
}

void BpeModel::encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const {
  if (!whole_words_.empty()) {
    const auto whole = whole_words_.find(std::string(word));
    if (whole != whole_words_.end()) return ids->push_back(whole->second);
  }
  std::vector<Symbol>& symbols = scratch->symbols;
  symbols.clear();
  bool after_unknown = false;
  for (char c : word) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    const bool skip = id < 0 && (unknown_id_ < 0 || (after_unknown && fuse_unknown_));
    after_unknown = id < 0;
    if (skip) continue;
    const auto position = static_cast<int32_t>(symbols.size());
    symbols.push_back({id < 0 ? unknown_id_ : id, position - 1, position + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;
  merge_all(merges_, scratch);
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids->push_back(symbols[i].id);
}

bool BpeModel::drops_bytes() const {
  const bool lacks_bytes = std::find(byte_ids_.begin(), byte_ids_.end(), -1) != byte_ids_.end();
  return lacks_bytes && (unknown_id_ < 0 || fuse_unknown_);
}

Result<BpeModel> BpeModel::parse(const JsonCursor& model) {
  if (!model["type"].is_null()) {  // old files omit it
    FP4MOE_ASSIGN_OR_RETURN(const std::string_view type, model.type());
    if (type != "BPE")
      return unsupported("tokenizer.json: model.type is " + std::string(type) + "; supported: BPE");
  }
  BpeModel bpe;
  FP4MOE_RETURN_IF_ERROR(bpe.parse_vocab(model["vocab"]));
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = bpe.vocab_.find(byte_level_of(static_cast<uint8_t>(byte)));
    bpe.byte_ids_[byte] = found == bpe.vocab_.end() ? -1 : found->second;
  }
  FP4MOE_RETURN_IF_ERROR(bpe.parse_options(model));
  FP4MOE_RETURN_IF_ERROR(bpe.parse_merges(model["merges"]));
  return bpe;
}

Result<BpeModel> BpeModel::from_ranks(const std::vector<std::string>& tokens) {
  BpeModel bpe;
  std::unordered_map<std::string_view, int32_t> ids;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    const auto id = static_cast<int32_t>(rank);
    std::string shown;
    for (const char byte : tokens[rank]) shown += byte_level_of(static_cast<uint8_t>(byte));
    bpe.vocab_.emplace(std::move(shown), id);
    bpe.whole_words_.emplace(tokens[rank], id);
    ids.emplace(tokens[rank], id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    const auto found = ids.find({&c, 1});
    if (found == ids.end()) return data_loss("the ranks have no token for byte " + std::to_string(byte));
    bpe.byte_ids_[byte] = found->second;
  }
  const auto for_each_merge = [&](const auto& visit) {
    for (const std::string& token : tokens)
      for (size_t cut = 1; cut < token.size(); ++cut) {
        const auto left = ids.find(std::string_view(token).substr(0, cut));
        if (left == ids.end()) continue;
        const auto right = ids.find(std::string_view(token).substr(cut));
        if (right != ids.end()) visit(left->second, right->second, ids.at(token));
      }
  };
  size_t count = 0;
  for_each_merge([&](int32_t, int32_t, int32_t) { ++count; });
  if (count > kMaxMerges)
    return does_not_fit("the tokens can be merged in " + std::to_string(count) + " ways; legal: at most " +
                        std::to_string(kMaxMerges));
  bpe.merges_ = MergeTable(count);
  for_each_merge([&](int32_t left, int32_t right, int32_t merged) {
    bpe.merges_.insert(left, right, {static_cast<uint32_t>(merged), merged});
  });
  return bpe;
}

Status BpeModel::parse_vocab(const JsonCursor& vocab) {
  if (!vocab.value().is_object()) return vocab.error("an object of tokens and ids");
  std::unordered_map<int32_t, const std::string*> seen;
  vocab_.reserve(vocab.value().size());
  for (const auto& [token, value] : vocab.value().items()) {
    const JsonCursor entry(value, vocab.path() + "[" + json_brief(token) + "]");
    FP4MOE_ASSIGN_OR_RETURN(const int32_t id, entry.token_id());
    const auto [other, is_new] = seen.emplace(id, &token);
    if (!is_new) return entry.error("a unique id, not that of " + json_brief(*other->second));
    vocab_.emplace(token, id);
  }
  return {};
}

Status BpeModel::parse_options(const JsonCursor& model) {
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const JsonCursor affix = model[key];
    if (!affix.is_null() && affix.value() != "")
      return unsupported("tokenizer.json: " + affix.path() + " is " + json_brief(affix.value()) +
                         "; supported: null or an empty string");
  }
  const JsonCursor dropout = model["dropout"];
  if (!dropout.is_null() && !(dropout.value().is_number() && dropout.value().get<double>() == 0))
    return unsupported("tokenizer.json: model.dropout is " + json_brief(dropout.value()) +
                       "; supported: null or 0");
  FP4MOE_ASSIGN_OR_RETURN(const bool byte_fallback, model["byte_fallback"].boolean_or(false));
  const bool lacks_bytes = std::find(byte_ids_.begin(), byte_ids_.end(), -1) != byte_ids_.end();
  if (byte_fallback && lacks_bytes)
    return unsupported(
        "tokenizer.json: model.byte_fallback is true and the vocabulary lacks some bytes;"
        " supported: false, or a vocabulary with all 256 bytes");
  FP4MOE_ASSIGN_OR_RETURN(fuse_unknown_, model["fuse_unk"].boolean_or(false));
  FP4MOE_ASSIGN_OR_RETURN(const bool ignore_merges, model["ignore_merges"].boolean_or(false));
  if (ignore_merges)
    for (const auto& [token, id] : vocab_)
      if (auto bytes = bytes_of_byte_level(token)) whole_words_.emplace(std::move(*bytes), id);
  const JsonCursor unknown = model["unk_token"];
  if (unknown.is_null()) return {};
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view unknown_token, unknown.string());
  const auto found = vocab_.find(std::string(unknown_token));
  if (found != vocab_.end())
    unknown_id_ = found->second;
  else if (lacks_bytes)
    return unknown.error("a token in the vocabulary, because some bytes have no token");
  return {};
}

Status BpeModel::parse_merges(const JsonCursor& merges) {
  FP4MOE_ASSIGN_OR_RETURN(const size_t count, merges.array_size());
  merges_ = MergeTable(count);
  const bool as_pairs = count > 0 && merges.element(0).value().is_array();
  size_t rank = 0;
  for (size_t i = 0; i < count; ++i) {
    const JsonCursor merge = merges.element(i);
    if (as_pairs) {
      if (!merge.value().is_array() || merge.value().size() != 2) return merge.error("a pair of tokens");
      FP4MOE_ASSIGN_OR_RETURN(const std::string_view left, merge.element(0).string());
      FP4MOE_ASSIGN_OR_RETURN(const std::string_view right, merge.element(1).string());
      FP4MOE_RETURN_IF_ERROR(insert_merge(merge, left, right, rank++));
      continue;
    }
    FP4MOE_ASSIGN_OR_RETURN(const std::string_view line, merge.string());
    if (line.rfind("#version", 0) == 0) continue;
    const size_t space = line.find(' ');
    if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos)
      return merge.error("two tokens with one space between them");
    FP4MOE_RETURN_IF_ERROR(insert_merge(merge, line.substr(0, space), line.substr(space + 1), rank++));
  }
  return {};
}

Status BpeModel::insert_merge(const JsonCursor& where, std::string_view left, std::string_view right,
                              size_t rank) {
  int32_t ids[3];
  const std::string tokens[3] = {std::string(left), std::string(right),
                                 std::string(left) + std::string(right)};
  for (int i = 0; i < 3; ++i) {
    const auto found = vocab_.find(tokens[i]);
    if (found == vocab_.end()) return where.error("tokens in the vocabulary, not " + json_brief(tokens[i]));
    ids[i] = found->second;
  }
  merges_.insert(ids[0], ids[1], {static_cast<uint32_t>(rank), ids[2]});
  return {};
}

}  // namespace fp4moe
