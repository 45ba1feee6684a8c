#include "io/tokenizer/tokenizer.h"

#include <algorithm>

#include "base/check.h"
#include "io/tokenizer/tokenizer_state.h"
#include "io/tokenizer/unicode_text.h"

namespace fp4moe {
namespace {

// Encoding a word takes up to 40 bytes of memory per input byte.
constexpr size_t kMaxTextBytes = size_t{16} << 20;
constexpr size_t kMaxCachedWordBytes = 64, kMaxCachedWords = 65536;
// Form C is at least a third as long as the text: U+212A (3 bytes) becomes "K", three jamo (9 bytes) become
// one syllable (3 bytes).
constexpr int64_t kMaxCompositionRatio = 3;

}  // namespace

// The state of one call to encode().
struct Tokenizer::State::EncodeCall {
  std::vector<int32_t> ids;
  std::deque<std::string> storage;  // temporary strings that words point into
  // Word -> the range of `ids` that holds its first encoding.
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> cache;
  BpeModel::Scratch scratch;
};

void Tokenizer::State::encode_word(std::string_view word, EncodeCall* call) const {
  std::vector<int32_t>& ids = call->ids;
  const bool cached = word.size() > 1 && word.size() <= kMaxCachedWordBytes;
  const auto found = cached ? call->cache.find(word) : call->cache.end();
  if (found != call->cache.end()) {
    const auto [begin, end] = found->second;
    for (size_t i = begin; i < end; ++i) ids.push_back(ids[i]);
    return;
  }
  const size_t begin = ids.size();
  model.encode(word, &call->scratch, &ids);
  if (cached && call->cache.size() < kMaxCachedWords) call->cache.emplace(word, std::pair(begin, ids.size()));
}

Status Tokenizer::State::encode_segment(std::string_view text, EncodeCall* call) const {
  return pre_tokenizer.split(text, &call->storage, [&](std::string_view word) {
    encode_word(word, call);
    return Status();
  });
}

void Tokenizer::State::split(std::string_view text, std::deque<std::string>* storage,
                             std::vector<Segment>* segments) const {
  std::vector<Segment> raw_segments;
  raw_tokens.split(text, &raw_segments);
  for (const Segment& raw : raw_segments) {
    if (raw.id >= 0)
      segments->push_back(raw);
    else if (!normalize)
      normalized_tokens.split(raw.text, segments);
    else
      normalized_tokens.split(storage->emplace_back(normalize_nfc(raw.text)), segments);
  }
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  if (text.size() > kMaxTextBytes)
    return invalid_argument("text of " + std::to_string(text.size()) + " bytes; legal: at most " +
                            std::to_string(kMaxTextBytes) + " per call");
  State::EncodeCall call;
  if (add_special_tokens) call.ids = state_->prefix;
  std::string& valid = call.storage.emplace_back();
  if (!is_valid_utf8(text)) {
    append_lossy_utf8(text, &valid);
    text = valid;
  }
  std::vector<Segment> segments;
  state_->split(text, &call.storage, &segments);
  for (const Segment& segment : segments) {
    if (segment.id >= 0)
      call.ids.push_back(segment.id);
    else
      FP4MOE_RETURN_IF_ERROR(state_->encode_segment(segment.text, &call));
  }
  if (add_special_tokens) call.ids.insert(call.ids.end(), state_->suffix.begin(), state_->suffix.end());
  return std::move(call.ids);
}

std::vector<int32_t> Tokenizer::find_special_tokens(std::string_view text) const {
  std::deque<std::string> storage;
  std::string valid;
  if (!is_valid_utf8(text)) {
    append_lossy_utf8(text, &valid);
    text = valid;
  }
  std::vector<Segment> segments;
  state_->split(text, &storage, &segments);
  std::vector<int32_t> ids;
  for (const Segment& segment : segments)
    if (is_special(segment.id)) ids.push_back(segment.id);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

int64_t Tokenizer::max_bytes_per_token() const {
  if (state_->drops_text) return 0;
  size_t longest = 0;
  for (const State::Token& token : state_->tokens) longest = std::max(longest, token.bytes.size());
  return static_cast<int64_t>(longest) * (state_->normalize ? kMaxCompositionRatio : 1);
}

void Tokenizer::append_bytes(int32_t id, bool skip_special_tokens, bool* is_first, std::string* bytes) const {
  if (!has_token(id) || (skip_special_tokens && is_special(id))) return;
  if (state_->join_with_space && !*is_first) *bytes += ' ';
  *is_first = false;
  *bytes += state_->tokens[id].bytes;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const {
  std::string bytes, text;
  bool is_first = true;
  for (int32_t id : ids) append_bytes(id, skip_special_tokens, &is_first, &bytes);
  append_lossy_utf8(bytes, &text);
  return text;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  return has_token(id) ? state_->tokens[id].bytes : std::string_view();
}

bool Tokenizer::is_special(int32_t id) const { return has_token(id) && state_->tokens[id].special; }

bool Tokenizer::has_token(int32_t id) const {
  return id >= 0 && id < vocab_size() && state_->tokens[id].exists;
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(state_->tokens.size()); }

int32_t Tokenizer::find_token(std::string_view content) const {
  const std::string key(content);
  if (const auto added = state_->added_ids.find(key); added != state_->added_ids.end()) return added->second;
  const auto found = state_->model.vocab().find(key);
  return found == state_->model.vocab().end() ? -1 : found->second;
}

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::string IncrementalDetokenizer::push(int32_t id) {
  tokenizer_->append_bytes(id, skip_special_tokens_, &is_first_, &pending_);
  // Hold back an incomplete character at the end until its remaining bytes arrive.
  size_t certain = pending_.size();
  for (size_t i = pending_.size() - std::min<size_t>(pending_.size(), 3); i < pending_.size(); ++i) {
    const Utf8Step step = utf8_step(std::string_view(pending_).substr(i));
    if (step.kind == Utf8Kind::kTruncated) {
      certain = i;
      break;
    }
  }
  std::string text;
  append_lossy_utf8(std::string_view(pending_).substr(0, certain), &text);
  pending_.erase(0, certain);
  return text;
}

std::string IncrementalDetokenizer::finish() {
  std::string text;
  append_lossy_utf8(pending_, &text);
  pending_.clear();
  return text;
}

}  // namespace fp4moe
