// Serves tokenizer requests from stdin until end of file.
//   tokenizer_dump FILE_OR_FOLDER
// Request: 'e' (encode) or 's' (encode with special tokens), a byte count and the text; or 'd' (decode) or
// 'k' (decode, skipping special tokens), a count and the ids. Response: a count (-1 for an error) and the ids
// or the text. All numbers are native int32.
#include <cstdio>
#include <string>
#include <vector>

#include "io/tokenizer/tokenizer.h"

namespace fp4moe {
namespace {

template <class T>
bool read(T* items, size_t count) {
  return count == 0 || std::fread(items, sizeof(T), count, stdin) == count;
}

template <class Container>
void answer(const Container& items) {
  const auto count = static_cast<int32_t>(items.size());
  std::fwrite(&count, sizeof count, 1, stdout);
  if (count > 0) std::fwrite(items.data(), sizeof items[0], items.size(), stdout);
  std::fflush(stdout);
}

void encode(const Tokenizer& tokenizer, const std::string& text, bool add_special_tokens) {
  const auto ids = tokenizer.encode(text, add_special_tokens);
  if (ids.ok()) return answer(*ids);
  std::fprintf(stderr, "%s\n", ids.status().to_string().c_str());
  const int32_t failed = -1;
  std::fwrite(&failed, sizeof failed, 1, stdout);
  std::fflush(stdout);
}

std::string decode(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  IncrementalDetokenizer incremental(tokenizer, skip);
  std::string text;
  for (int32_t id : ids) text += incremental.push(id);
  text += incremental.finish();
  const std::string whole = tokenizer.decode(ids, skip);
  return text == whole ? whole : "incremental and whole decoding differ: " + text + " and " + whole;
}

int serve(const Tokenizer& tokenizer) {
  char kind = 0;
  int32_t count = 0;
  while (read(&kind, 1) && read(&count, 1)) {
    if (kind == 'e' || kind == 's') {
      std::string text(count, '\0');
      if (!read(text.data(), text.size())) return 1;
      encode(tokenizer, text, kind == 's');
    } else {
      std::vector<int32_t> ids(count);
      if (!read(ids.data(), ids.size())) return 1;
      answer(decode(tokenizer, ids, kind == 'k'));
    }
  }
  return 0;
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: tokenizer_dump FILE_OR_FOLDER\n");
    return 2;
  }
  const auto tokenizer = fp4moe::Tokenizer::load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().to_string().c_str());
    return 1;
  }
  return fp4moe::serve(*tokenizer);
}
