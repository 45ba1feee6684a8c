// Any bytes as tokenizer.json: an error, or a tokenizer that encodes and decodes without crashing.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "io/tokenizer/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto tokenizer = fp4moe::Tokenizer::parse({reinterpret_cast<const char*>(data), size});
  if (!tokenizer.ok()) return 0;
  for (std::string_view text :
       {"", "abc ab  \n1 'll <s>\xFF", "a\xCC\x81\xC3\xA9\xE6\x97\xA5\xF0\x9F\x91\x8D <|endoftext|>  x"}) {
    const auto ids = tokenizer->encode(text, true);
    if (!ids.ok()) continue;
    for (bool skip : {false, true}) {
      fp4moe::IncrementalDetokenizer detokenizer(*tokenizer, skip);
      std::string pieces;
      for (int32_t id : *ids) pieces += detokenizer.push(id);
      FP4MOE_CHECK(pieces + detokenizer.finish() == tokenizer->decode(*ids, skip), "pieces and whole differ");
    }
  }
  return 0;
}
