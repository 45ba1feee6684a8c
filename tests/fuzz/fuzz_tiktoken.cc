// Any bytes as tiktoken.model and, behind the first zero byte, as tokenizer_config.json: an error, or a
// tokenizer that restores every text.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "io/tokenizer/tokenizer.h"
#include "io/tokenizer/unicode_text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t ranks_end = input.find('\0');
  const std::string_view config = ranks_end == input.npos ? "{}" : input.substr(ranks_end + 1);
  const auto tokenizer = fp4moe::Tokenizer::parse_tiktoken(input.substr(0, ranks_end), config);
  if (!tokenizer.ok()) return 0;
  for (std::string_view text :
       {std::string_view("abc ab  \n1 'll <s>\xFF\xE6\x97\xA5"), input.substr(0, 200)}) {
    const auto ids = tokenizer->encode(text, true);
    FP4MOE_CHECK(ids.ok(), "encode() failed");
    std::string lossy;
    fp4moe::append_lossy_utf8(text, &lossy);
    FP4MOE_CHECK(tokenizer->decode(*ids, false) == lossy, "the text differs");
  }
  return 0;
}
