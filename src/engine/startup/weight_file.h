// The file format for packed weights that WeightCache uses, and the checks made before a file is used.
//
//   0      WeightFileHeader, one page; its last field is the hash of everything before it
//   4096   the weights in loading order, each padded with zeros to a multiple of 4096 bytes
//   index  the key; a WeightRecord for each weight; the names of the parts, each followed by '\n'
//
// Every byte is covered: by the header's hash, the index's hash, a weight's checksum, or as padding that must
// be zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "fp4moe/status.h"

namespace fp4moe {

inline constexpr int64_t kWeightAlign = 4096;
inline constexpr uint32_t kWeightFileVersion = 2;

// Returns the hash as 16 hexadecimal digits.
std::string hash_text_of(uint64_t hash);

struct WeightFileHeader {
  char magic[8];
  uint32_t version;
  uint32_t num_weights;
  uint64_t file_bytes, index_offset, key_bytes, names_bytes;
  uint64_t index_hash;
  uint8_t reserved[kWeightAlign - 64];  // zeros
  uint64_t header_hash;                 // of everything before it
};
static_assert(sizeof(WeightFileHeader) == kWeightAlign);

struct WeightRecord {
  uint64_t num_bytes;  // without padding
  uint64_t checksum;   // weight_checksum()
  uint64_t part;       // index into the names
};
static_assert(sizeof(WeightRecord) == 24);

struct WeightFileIndex {
  std::string key;
  std::vector<WeightRecord> weights;
  std::vector<std::string> parts;  // "embedding", "layer 0", ...
};

// Returns `num_bytes` rounded up to a multiple of kWeightAlign.
constexpr int64_t weight_room(int64_t num_bytes) {
  return (num_bytes + kWeightAlign - 1) / kWeightAlign * kWeightAlign;
}

// Returns the 64-bit checksum of a weight without its padding. It is computed in parallel, but does not
// depend on the number of threads. It detects only damage: an adversary who can write the file can also write
// its checksums.
uint64_t weight_checksum(std::span<const uint8_t> weight, ThreadPool& pool);

// Reads the index of a complete file with the key `key`. kDataLoss, with the reason: another format or
// version, a size other than the recorded one, a damaged header or index, offsets outside the file, another
// key.
Result<WeightFileIndex> read_weight_index(std::span<const uint8_t> file, std::string_view key);

// Compares each weight with its checksum and its padding with zeros; reads the whole file. kDataLoss names
// the part, the weight and both checksums. `index` must be that of `file`.
Status check_weights(std::span<const uint8_t> file, const WeightFileIndex& index, ThreadPool& pool);

// The index and the header of a file whose weights end at `index_offset`.
struct WeightFileEnds {
  std::string index;
  WeightFileHeader header;
};
WeightFileEnds make_weight_file_ends(const WeightFileIndex& index, uint64_t index_offset);

}  // namespace fp4moe
