#include "io/tokenizer/pretokenizer.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/check.h"
#include "io/tokenizer/unicode_text.h"

namespace fp4moe {
namespace {

constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// PCRE2 patterns for rules that Hugging Face implements in Rust with other Unicode versions. This one
// matches numbers as of Unicode 17.
constexpr const char* kNumber = R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])";
// Matches Unicode 8 punctuation (newer punctuation is excluded) and ASCII symbols. replace_newer_characters
// maps the newest characters, which PCRE2 does not know, to characters listed here.
constexpr const char* kPunctuation =
    R"((?![\x{61D}\x{9FD}\x{A76}\x{C77}\x{C84}\x{1B7D}\x{1B7E}\x{2E43}-\x{2E5D}\x{10EAD})"
    R"(\x{10F55}-\x{10F59}\x{10F86}-\x{10F89}\x{1144B}-\x{1144F}\x{1145A}-\x{1145D}\x{11660}-\x{1166C})"
    R"(\x{116B9}\x{1183B}\x{11944}-\x{11946}\x{119E2}\x{11A3F}-\x{11AA2}\x{11C41}-\x{11C71})"
    R"(\x{11EF7}\x{11EF8}\x{11FFF}\x{12FF1}\x{12FF2}\x{16E97}-\x{16E9A}\x{16FE2}\x{1E95E}\x{1E95F}]))"
    R"([\p{P}$+<=>^`|~\x{166D}\x{111C9}])";
constexpr const char* kWordOrSymbols =
    R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}]+)"
    R"(|[^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}\p{White_Space}]+)";
constexpr const char* kWhiteSpace = R"(\p{White_Space})";

Result<SplitBehavior> parse_behavior(const JsonCursor& behavior) {
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view name, behavior.string());
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return behavior.error("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

// A stretch of a piece: a match, or text between matches. All stretches together cover the piece.
struct Stretch {
  uint32_t begin, end;
  bool is_match;
};

// Joins adjacent stretches or drops matches, as the behavior requires.
class Joiner {
 public:
  explicit Joiner(SplitBehavior behavior) : behavior_(behavior) {}

  // Adds the next stretch; returns the pending one once nothing more can join it.
  std::optional<Stretch> push(Stretch stretch) {
    if (behavior_ == SplitBehavior::kRemoved && stretch.is_match) return std::nullopt;
    const bool joins = joins_left(stretch.is_match);
    previous_match_ = stretch.is_match;
    if (!joins || !pending_) return std::exchange(pending_, stretch);
    pending_->end = stretch.end;
    return std::nullopt;
  }
  std::optional<Stretch> finish() { return std::exchange(pending_, std::nullopt); }

 private:
  bool joins_left(bool is_match) const {
    switch (behavior_) {
      case SplitBehavior::kIsolated:
      case SplitBehavior::kRemoved:
        return false;
      case SplitBehavior::kMergedWithPrevious:
        return is_match && !previous_match_;
      // A match joins the following non-match; if matches are consecutive, only the last one does.
      case SplitBehavior::kMergedWithNext:
        return previous_match_ && !is_match;
      case SplitBehavior::kContiguous:
        return is_match == previous_match_;
    }
    return false;
  }

  const SplitBehavior behavior_;
  std::optional<Stretch> pending_;
  bool previous_match_ = false;
};

}  // namespace

Result<PreTokenizer> PreTokenizer::parse(const JsonCursor& pre_tokenizer) {
  PreTokenizer result;
  if (!pre_tokenizer.is_null()) FP4MOE_RETURN_IF_ERROR(result.add_step(pre_tokenizer));
  if (!result.has_byte_level_)
    return unsupported("tokenizer.json: pre_tokenizer is " + json_brief(pre_tokenizer.value()) +
                       "; supported: pre-tokenizers that contain ByteLevel");
  return result;
}

Result<PreTokenizer> PreTokenizer::from_pattern(std::string_view pattern) {
  PreTokenizer result;
  FP4MOE_ASSIGN_OR_RETURN(const std::string translated, translate_pattern(pattern));
  FP4MOE_ASSIGN_OR_RETURN(SplitPattern compiled, SplitPattern::compile(translated));
  result.steps_.push_back({std::move(compiled), SplitBehavior::kIsolated, false});
  return result;
}

bool PreTokenizer::drops_text() const {
  return std::any_of(steps_.begin(), steps_.end(),
                     [](const Step& step) { return step.behavior == SplitBehavior::kRemoved; });
}

Status PreTokenizer::add_step(const JsonCursor& config) {
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view type, config.type());
  if (type == "Sequence") {
    const JsonCursor parts = config["pretokenizers"];
    FP4MOE_ASSIGN_OR_RETURN(const size_t count, parts.array_size());
    for (size_t i = 0; i < count; ++i) FP4MOE_RETURN_IF_ERROR(add_step(parts.element(i)));
    return {};
  }
  if (has_byte_level_)
    return unsupported("tokenizer.json: " + config.path() + " is " + std::string(type) +
                       " after ByteLevel; supported: ByteLevel as the last step");
  if (type == "Split") return add_split(config);
  if (type == "ByteLevel") return add_byte_level(config);
  if (type == "Digits") {
    FP4MOE_ASSIGN_OR_RETURN(const bool individual, config["individual_digits"].boolean_or(false));
    return add_pattern(config, kNumber, individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
                       false);
  }
  if (type == "Punctuation") {
    SplitBehavior behavior = SplitBehavior::kIsolated;
    if (!config["behavior"].is_null()) {
      FP4MOE_ASSIGN_OR_RETURN(behavior, parse_behavior(config["behavior"]));
    }
    return add_pattern(config, kPunctuation, behavior, false);
  }
  if (type == "Whitespace") return add_pattern(config, kWordOrSymbols, SplitBehavior::kRemoved, true);
  if (type == "WhitespaceSplit") return add_pattern(config, kWhiteSpace, SplitBehavior::kRemoved, false);
  return unsupported(
      "tokenizer.json: " + config.path() + " is " + std::string(type) +
      "; supported: Sequence, Split, ByteLevel, Digits, Punctuation, Whitespace, WhitespaceSplit");
}

Status PreTokenizer::add_pattern(const JsonCursor& config, const std::string& pattern, SplitBehavior behavior,
                                 bool invert) {
  auto compiled = SplitPattern::compile(pattern);
  if (!compiled.ok()) return compiled.status().with_context("tokenizer.json: " + config.path());
  steps_.push_back({std::move(*compiled), behavior, invert});
  return {};
}

Status PreTokenizer::add_split(const JsonCursor& config) {
  FP4MOE_ASSIGN_OR_RETURN(const SplitBehavior behavior, parse_behavior(config["behavior"]));
  FP4MOE_ASSIGN_OR_RETURN(const bool invert, config["invert"].boolean());
  const JsonCursor regex = config["pattern"]["Regex"];
  if (regex.is_null()) {
    FP4MOE_ASSIGN_OR_RETURN(const std::string_view text, config["pattern"]["String"].string());
    return add_pattern(config, escape_pattern(text), behavior, invert);
  }
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view pattern, regex.string());
  auto translated = translate_pattern(pattern);
  if (!translated.ok()) return translated.status().with_context("tokenizer.json: " + regex.path());
  return add_pattern(regex, *translated, behavior, invert);
}

Status PreTokenizer::add_byte_level(const JsonCursor& config) {
  FP4MOE_ASSIGN_OR_RETURN(const bool add_prefix_space, config["add_prefix_space"].boolean());
  FP4MOE_ASSIGN_OR_RETURN(const bool use_regex, config["use_regex"].boolean_or(true));
  has_byte_level_ = true;
  if (add_prefix_space) prefix_before_ = steps_.size();
  if (!use_regex) return {};
  FP4MOE_ASSIGN_OR_RETURN(const std::string pattern, translate_pattern(kGpt2Pattern));
  return add_pattern(config, pattern, SplitBehavior::kIsolated, false);
}

struct PreTokenizer::Call {
  std::deque<std::string>* storage;
  std::deque<std::string> prefixed;  // the `shown` counterparts of strings in storage
  const Visit& visit;
};

// Applies the steps from `step` on.
Status PreTokenizer::split_piece(size_t step, Piece piece, Call* call) const {
  if (step == prefix_before_ && piece.text[0] != ' ') {
    const std::string_view old_shown(piece.shown, piece.text.size());
    piece.text = call->storage->emplace_back(" " + std::string(piece.text));
    piece.shown = call->prefixed.emplace_back(" " + std::string(old_shown)).data();
  }
  if (step == steps_.size()) return call->visit(piece.text);
  const Step& rule = steps_[step];
  Joiner joiner(rule.behavior);
  const auto pass_on = [&](const std::optional<Stretch>& s) {
    if (!s || s->begin == s->end) return Status();
    return split_piece(step + 1, {piece.text.substr(s->begin, s->end - s->begin), piece.shown + s->begin},
                       call);
  };
  const auto add = [&](uint32_t begin, uint32_t end, bool is_match) {
    return pass_on(joiner.push({begin, end, is_match != rule.invert}));
  };
  const auto size = static_cast<uint32_t>(piece.text.size());
  uint32_t done = 0;
  const Status status = rule.pattern.for_each({piece.shown, size}, [&](SplitPattern::Range match) {
    if (done < match.first) FP4MOE_RETURN_IF_ERROR(add(done, match.first, false));
    done = match.second;
    return add(match.first, match.second, true);
  });
  FP4MOE_RETURN_IF_ERROR(status);
  if (done < size) FP4MOE_RETURN_IF_ERROR(add(done, size, false));
  return pass_on(joiner.finish());
}

Status PreTokenizer::split(std::string_view text, std::deque<std::string>* storage,
                           const Visit& visit) const {
  std::string shown;
  const bool replaced = replace_newer_characters(text, &shown);
  Call call{storage, {}, visit};
  return split_piece(0, {text, replaced ? shown.data() : text.data()}, &call);
}

}  // namespace fp4moe
