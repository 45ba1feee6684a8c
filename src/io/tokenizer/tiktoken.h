// A tokenizer of tiktoken's format: tiktoken.model lists tokens and their ranks, and tokenizer_config.json
// names the special tokens. The split pattern is in neither file but in the class that publishes the format.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"
#include "io/tokenizer/added_tokens.h"
#include "io/tokenizer/tokenizer_json.h"

namespace fp4moe {

inline constexpr const char* kTiktokenFile = "tiktoken.model";
inline constexpr const char* kTokenizerConfigFile = "tokenizer_config.json";
// Ids behind the ranks. Each is a special token, <|reserved_token_ID|> unless the configuration names it.
inline constexpr int32_t kNumTiktokenSpecials = 256;

// The pattern of TikTokenTokenizer (Kimi), in the syntax of Rust's regular expressions, which here means the
// same in Oniguruma's.
extern const char* const kTiktokenPattern;

// Returns the tokens' bytes, indexed by rank. Each line is a token in base64, a space and its rank.
// kDataLoss, naming the line: a malformed line, an empty or oversized token, a repeated token or rank, or a
// rank that is not below the number of tokens. kDataLoss, too, if there are no tokens.
Result<std::vector<std::string>> parse_tiktoken_ranks(std::string_view text);

// Returns the kNumTiktokenSpecials special tokens behind `num_ranks` ranks. `config` is the root of
// tokenizer_config.json. kUnsupported: another tokenizer class, or tokens that strip white space or match
// whole words only; kInvalidArgument: a malformed entry, or ids that do not begin at `num_ranks`.
Result<std::vector<AddedToken>> parse_tiktoken_specials(const JsonCursor& config, size_t num_ranks);

}  // namespace fp4moe
