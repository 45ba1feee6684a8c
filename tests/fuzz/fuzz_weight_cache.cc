// Any bytes as a file of packed weights, and as an index with correct hashes.
#include <cstring>

#include "base/hash.h"
#include "engine/startup/weight_file.h"

namespace {

using namespace fp4moe;

constexpr char kKey[] = "model A\nrank 0\n";

void check(const std::vector<uint8_t>& file) {
  static ThreadPool pool(1);
  const Result<WeightFileIndex> index = read_weight_index(file, kKey);
  if (!index.ok()) {
    if (index.status().message().empty()) __builtin_trap();
    return;
  }
  if (index->key != kKey) __builtin_trap();
  uint64_t end = kWeightAlign;  // all weights are inside the file
  for (const WeightRecord& weight : index->weights) {
    if (weight.part >= index->parts.size() || weight.num_bytes > file.size() - end) __builtin_trap();
    end += static_cast<uint64_t>(weight_room(static_cast<int64_t>(weight.num_bytes)));
  }
  if (end > file.size()) __builtin_trap();
  static_cast<void>(check_weights(file, *index, pool));
}

}  // namespace

// Checks the input as a whole file. Then checks a file of some pages with matching hashes whose header fields
// after magic and version come from the input, and whose end is the rest of the input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  check({data, data + size});
  constexpr size_t kBegin = offsetof(WeightFileHeader, num_weights);
  constexpr size_t kFields = offsetof(WeightFileHeader, reserved) - kBegin;
  if (size < kFields + 1) return 0;
  WeightFileHeader header = make_weight_file_ends({}, kWeightAlign).header;
  std::memcpy(reinterpret_cast<uint8_t*>(&header) + kBegin, data, kFields);
  const size_t num_pages = 1 + data[kFields] % 4;
  std::vector<uint8_t> file(num_pages * kWeightAlign);
  const uint8_t* const rest = data + kFields + 1;
  if (data[kFields] & 0x40) file.insert(file.end(), kKey, kKey + sizeof kKey - 1);
  file.insert(file.end(), rest, data + size);
  if (data[kFields] & 0x80) {  // a plausible index position
    header.file_bytes = file.size();
    header.index_offset = num_pages * kWeightAlign;
    header.key_bytes = sizeof kKey - 1;
  }
  if (header.index_offset <= file.size())
    header.index_hash =
        hash64(file.data() + header.index_offset, static_cast<int64_t>(file.size() - header.index_offset));
  header.header_hash = hash64(&header, offsetof(WeightFileHeader, header_hash));
  std::memcpy(file.data(), &header, sizeof header);
  check(file);
  return 0;
}
