#include <algorithm>
#include <unordered_set>

#include "base/check.h"
#include "io/file.h"
#include "io/tokenizer/tiktoken.h"
#include "io/tokenizer/tokenizer_state.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{256} << 20;
constexpr int64_t kMaxTiktokenBytes = int64_t{64} << 20, kMaxTiktokenConfigBytes = int64_t{16} << 20;

}  // namespace

std::string tokenizer_file(const std::string& path) {
  if (!file_exists(path + "/")) return path;
  const std::string json = path + "/tokenizer.json", ranks = path + "/" + kTiktokenFile;
  return !file_exists(json) && file_exists(ranks) ? ranks : json;
}

Result<Tokenizer> Tokenizer::load(const std::string& path) {
  const std::string file = tokenizer_file(path);
  const size_t slash = file.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : file.substr(0, slash);
  const bool is_tiktoken = file.substr(slash == std::string::npos ? 0 : slash + 1) == kTiktokenFile;
  FP4MOE_ASSIGN_OR_RETURN(const std::string text,
                          read_text_file(file, is_tiktoken ? kMaxTiktokenBytes : kMaxFileBytes));
  std::string config;
  if (is_tiktoken) {
    FP4MOE_ASSIGN_OR_RETURN(config,
                            read_text_file(folder + "/" + kTokenizerConfigFile, kMaxTiktokenConfigBytes));
  }
  auto tokenizer = is_tiktoken ? parse_tiktoken(text, config) : parse(text);
  if (!tokenizer.ok()) return tokenizer.status().with_context(path);
  return tokenizer;
}

Result<Tokenizer> Tokenizer::parse(std::string_view json) {
  FP4MOE_ASSIGN_OR_RETURN(const Json document, parse_json(json, "tokenizer.json"));
  const JsonCursor root(document, "");
  if (!document.is_object()) return JsonCursor(document, "the document").error("an object");
  const JsonCursor version = root["version"];
  if (!version.is_null() && version.value() != "1.0") return version.error("\"1.0\"");
  FP4MOE_ASSIGN_OR_RETURN(BpeModel model, BpeModel::parse(root["model"]));
  FP4MOE_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::parse(root["pre_tokenizer"]));
  auto state = std::make_unique<State>(std::move(model), std::move(pre_tokenizer));
  FP4MOE_RETURN_IF_ERROR(state->parse_normalizer(root["normalizer"]));
  FP4MOE_RETURN_IF_ERROR(state->parse_post_processor(root["post_processor"]));
  state->join_with_space = root["decoder"].is_null();
  FP4MOE_RETURN_IF_ERROR(state->parse_decoder(root["decoder"]));
  FP4MOE_ASSIGN_OR_RETURN(std::vector<AddedToken> added,
                          parse_added_tokens(root["added_tokens"], state->model.vocab(), state->normalize));
  state->index_tokens(std::move(added));
  return Tokenizer(std::move(state));
}

Result<Tokenizer> Tokenizer::parse_tiktoken(std::string_view ranks, std::string_view config_json) {
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<std::string> tokens, parse_tiktoken_ranks(ranks));
  FP4MOE_ASSIGN_OR_RETURN(const Json config, parse_json(config_json, kTokenizerConfigFile));
  FP4MOE_ASSIGN_OR_RETURN(
      std::vector<AddedToken> specials,
      parse_tiktoken_specials(JsonCursor(config, "", kTokenizerConfigFile), tokens.size()));
  auto model = BpeModel::from_ranks(tokens);
  if (!model.ok()) return model.status().with_context(kTiktokenFile);
  FP4MOE_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::from_pattern(kTiktokenPattern));
  auto state = std::make_unique<State>(std::move(*model), std::move(pre_tokenizer));
  state->decode_byte_level = true;
  const std::vector<AddedToken> literal = specials;
  state->index_tokens(std::move(specials));
  for (const AddedToken& token : literal) state->tokens[token.id].bytes = token.content;
  return Tokenizer(std::move(state));
}

Status Tokenizer::State::parse_normalizer(const JsonCursor& normalizer) {
  if (normalizer.is_null()) return {};
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view type, normalizer.type());
  if (type == "NFC") {
    normalize = true;
    return {};
  }
  if (type != "Sequence")
    return unsupported("tokenizer.json: " + normalizer.path() + " is " + std::string(type) +
                       "; supported: null, NFC, Sequence");
  const JsonCursor parts = normalizer["normalizers"];
  FP4MOE_ASSIGN_OR_RETURN(const size_t count, parts.array_size());
  for (size_t i = 0; i < count; ++i) FP4MOE_RETURN_IF_ERROR(parse_normalizer(parts.element(i)));
  return {};
}

Status Tokenizer::State::parse_post_processor(const JsonCursor& post_processor) {
  if (post_processor.is_null()) return {};
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view type, post_processor.type());
  if (type == "ByteLevel") return {};  // it only trims offsets
  if (type == "TemplateProcessing") return parse_template(post_processor);
  if (type != "Sequence")
    return unsupported("tokenizer.json: " + post_processor.path() + " is " + std::string(type) +
                       "; supported: null, ByteLevel, TemplateProcessing, Sequence");
  const JsonCursor parts = post_processor["processors"];
  FP4MOE_ASSIGN_OR_RETURN(const size_t count, parts.array_size());
  for (size_t i = 0; i < count; ++i) FP4MOE_RETURN_IF_ERROR(parse_post_processor(parts.element(i)));
  return {};
}

Status Tokenizer::State::parse_template(const JsonCursor& config) {
  std::vector<int32_t> before, after;
  bool seen_text = false;
  const JsonCursor single = config["single"];
  FP4MOE_ASSIGN_OR_RETURN(const size_t count, single.array_size());
  for (size_t i = 0; i < count; ++i) {
    const JsonCursor piece = single.element(i);
    if (!piece["Sequence"].is_null()) {
      if (piece["Sequence"]["id"].value() != "A" || seen_text) return piece.error("sequence A, exactly once");
      seen_text = true;
      continue;
    }
    FP4MOE_ASSIGN_OR_RETURN(const std::string_view name, piece["SpecialToken"]["id"].string());
    const JsonCursor ids = config["special_tokens"][name]["ids"];
    FP4MOE_ASSIGN_OR_RETURN(const size_t num_ids, ids.array_size());
    for (size_t k = 0; k < num_ids; ++k) {
      FP4MOE_ASSIGN_OR_RETURN(const int32_t id, ids.element(k).token_id());
      (seen_text ? after : before).push_back(id);
    }
  }
  if (!seen_text) return single.error("an element for sequence A");
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
  return {};
}

Status Tokenizer::State::parse_decoder(const JsonCursor& decoder) {
  if (decoder.is_null()) return {};
  FP4MOE_ASSIGN_OR_RETURN(const std::string_view type, decoder.type());
  if (type == "ByteLevel" && !decode_byte_level) {
    decode_byte_level = true;
    return {};
  }
  if (type == "Fuse" && decode_byte_level) return {};  // no effect: ByteLevel produces one string
  if (type != "Sequence")
    return unsupported("tokenizer.json: " + decoder.path() + " is " + std::string(type) +
                       "; supported: null, Sequence, one ByteLevel, Fuse after it");
  const JsonCursor parts = decoder["decoders"];
  FP4MOE_ASSIGN_OR_RETURN(const size_t count, parts.array_size());
  for (size_t i = 0; i < count; ++i) FP4MOE_RETURN_IF_ERROR(parse_decoder(parts.element(i)));
  return {};
}

void Tokenizer::State::index_tokens(std::vector<AddedToken> added) {
  std::unordered_set<std::string> specials;
  int32_t max_id = -1;
  for (const auto& entry : model.vocab()) max_id = std::max(max_id, entry.second);
  for (const AddedToken& token : added) {
    max_id = std::max(max_id, token.id);
    if (token.special) specials.insert(token.content);
  }
  tokens.resize(static_cast<size_t>(max_id) + 1);
  // Decoding starts from this text: for normalized added tokens, the pattern and not the content.
  const auto set = [&](int32_t id, const std::string& text) {
    auto bytes = decode_byte_level ? bytes_of_byte_level(text) : std::nullopt;
    tokens[id] = {bytes ? std::move(*bytes) : text, true, specials.count(text) > 0};
  };
  for (const auto& [text, id] : model.vocab()) set(id, text);
  std::vector<AddedToken> raw, normalized;
  for (AddedToken& token : added) {
    set(token.id, token.pattern);
    added_ids.emplace(token.content, token.id);
    (token.normalized ? normalized : raw).push_back(std::move(token));
  }
  const auto strips = [](const AddedToken& token) { return token.lstrip || token.rstrip; };
  drops_text = model.drops_bytes() || pre_tokenizer.drops_text() ||
               std::any_of(raw.begin(), raw.end(), strips) ||
               std::any_of(normalized.begin(), normalized.end(), strips);
  raw_tokens = AddedTokenMatcher(std::move(raw));
  normalized_tokens = AddedTokenMatcher(std::move(normalized));
}

}  // namespace fp4moe
