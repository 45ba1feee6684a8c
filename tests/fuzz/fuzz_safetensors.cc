// Any bytes as a safetensors file and as a shard index: a parser refuses them, or all its guarantees hold.
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "io/checkpoint/checkpoint_index.h"
#include "io/checkpoint/safetensors.h"

using namespace fp4moe;

namespace {

void check_file(std::span<const uint8_t> file) {
  const auto entries = parse_safetensors(file);
  if (!entries.ok()) {
    FP4MOE_CHECK(!entries.status().message().empty(), "an error without a message");
    return;
  }
  int64_t end = -1;
  for (const SafetensorsEntry& entry : *entries) {
    FP4MOE_CHECK(end < 0 || entry.begin == end, entry.spec.name);
    FP4MOE_CHECK(entry.end - entry.begin == tensor_bytes(entry.spec).value(), entry.spec.name);
    end = entry.end;
  }
  FP4MOE_CHECK(end < 0 || end == static_cast<int64_t>(file.size()), "the data is not covered");
}

}  // namespace

// The first byte selects an index, a header whose length and data size are made to fit, or a whole file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const uint8_t> rest(data + 1, size - 1);
  if (data[0] == 'i') {
    const auto index = parse_checkpoint_index({reinterpret_cast<const char*>(rest.data()), rest.size()});
    if (index.ok())
      for (const std::string& file : index->files)
        FP4MOE_CHECK(file.find('/') == std::string::npos && file[0] != '.', file);
  } else if (data[0] == 'h') {
    const uint64_t length = rest.size();
    std::vector<uint8_t> file(sizeof length + rest.size());
    std::memcpy(file.data(), &length, sizeof length);
    if (!rest.empty()) std::memcpy(file.data() + sizeof length, rest.data(), rest.size());
    for (const size_t num_data_bytes : {0, 4, 64, 1024}) {
      file.resize(sizeof length + rest.size() + num_data_bytes);
      check_file(file);
    }
  } else {
    check_file(rest);
  }
  return 0;
}
