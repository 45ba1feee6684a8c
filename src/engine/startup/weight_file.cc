#include "engine/startup/weight_file.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "base/hash.h"

namespace fp4moe {
namespace {

constexpr char kMagic[8] = {'f', 'p', '4', 'm', 'o', 'e', 'W', 'C'};
constexpr int64_t kBlockBytes = int64_t{1} << 20;  // the part of a weight that one thread hashes at a time

std::string count(uint64_t n) { return std::to_string(n); }

uint64_t hash_header(const WeightFileHeader& header) {
  return hash64(&header, offsetof(WeightFileHeader, header_hash));
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

// Reports the first lines that differ.
Status other_key(std::string_view kept, std::string_view wanted) {
  while (!kept.empty() && !wanted.empty() && first_line(kept) == first_line(wanted)) {
    kept.remove_prefix(std::min(kept.size(), first_line(kept).size() + 1));
    wanted.remove_prefix(std::min(wanted.size(), first_line(wanted).size() + 1));
  }
  return data_loss("it was made for '" + first_line(kept) + "', but this run needs '" + first_line(wanted) +
                   "'");
}

Result<WeightFileHeader> read_header(std::span<const uint8_t> file) {
  WeightFileHeader header;
  if (file.size() < sizeof kMagic + sizeof header.version)
    return data_loss("it ends after " + count(file.size()) + " bytes");
  if (std::memcmp(file.data(), kMagic, sizeof kMagic) != 0)
    return data_loss("it is not a file of packed weights, or was not finished");
  uint32_t version;
  std::memcpy(&version, file.data() + sizeof kMagic, sizeof version);
  if (version != kWeightFileVersion)
    return data_loss("its format has version " + count(version) + ", but this binary writes " +
                     count(kWeightFileVersion));
  if (file.size() < sizeof header) return data_loss("it ends after " + count(file.size()) + " bytes");
  std::memcpy(&header, file.data(), sizeof header);
  if (const uint64_t hash = hash_header(header); hash != header.header_hash)
    return data_loss("its header is damaged: checksum " + hash_text_of(hash) + ", expected " +
                     hash_text_of(header.header_hash));
  if (header.file_bytes != file.size())
    return data_loss("it has " + count(file.size()) + " bytes, but " + count(header.file_bytes) +
                     " were written");
  return header;
}

// Splits names that are each followed by '\n'.
Result<std::vector<std::string>> split_names(std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return data_loss("the last name in its index is cut off");
    names.emplace_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return names;
}

// Checks that the weights exactly fill the space before the index, and that each belongs to a part.
Status check_places(const WeightFileHeader& header, const WeightFileIndex& index) {
  uint64_t end = kWeightAlign;
  for (const WeightRecord& weight : index.weights) {
    if (weight.part >= index.parts.size())
      return data_loss("a weight belongs to part " + count(weight.part) + " of " + count(index.parts.size()));
    const uint64_t room = header.index_offset - end;  // a multiple of kWeightAlign, so the padding fits too
    if (weight.num_bytes > room) return data_loss("its weights do not end where its index begins");
    end += static_cast<uint64_t>(weight_room(static_cast<int64_t>(weight.num_bytes)));
  }
  return end == header.index_offset ? Status() : data_loss("its weights do not end where its index begins");
}

}  // namespace

std::string hash_text_of(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

uint64_t weight_checksum(std::span<const uint8_t> weight, ThreadPool& pool) {
  const int64_t num_bytes = std::ssize(weight);
  std::vector<uint64_t> blocks(static_cast<size_t>((num_bytes + kBlockBytes - 1) / kBlockBytes));
  pool.run(std::ssize(blocks), [&](int64_t block, int) {
    const int64_t begin = block * kBlockBytes;
    blocks[static_cast<size_t>(block)] =
        hash64(weight.data() + begin, std::min(kBlockBytes, num_bytes - begin));
  });
  return hash64(blocks.data(), static_cast<int64_t>(blocks.size() * sizeof(uint64_t)),
                static_cast<uint64_t>(num_bytes));
}

Result<WeightFileIndex> read_weight_index(std::span<const uint8_t> file, std::string_view key) {
  FP4MOE_ASSIGN_OR_RETURN(const WeightFileHeader header, read_header(file));
  const Status wrong_end = data_loss("its index does not end where the file does");
  if (header.index_offset > file.size() || header.index_offset < kWeightAlign ||
      header.index_offset % kWeightAlign != 0)
    return wrong_end;
  const uint64_t index_bytes = file.size() - header.index_offset;
  const uint64_t records_bytes = uint64_t{header.num_weights} * sizeof(WeightRecord);
  if (header.key_bytes > index_bytes || header.names_bytes > index_bytes - header.key_bytes ||
      records_bytes != index_bytes - header.key_bytes - header.names_bytes)
    return wrong_end;
  const uint8_t* at = file.data() + header.index_offset;
  if (const uint64_t hash = hash64(at, static_cast<int64_t>(index_bytes)); hash != header.index_hash)
    return data_loss("its index is damaged: checksum " + hash_text_of(hash) + ", expected " +
                     hash_text_of(header.index_hash));
  WeightFileIndex index;
  index.key.assign(reinterpret_cast<const char*>(at), header.key_bytes);
  if (index.key != key) return other_key(index.key, key);
  at += header.key_bytes;
  index.weights.resize(header.num_weights);
  if (records_bytes > 0) std::memcpy(index.weights.data(), at, records_bytes);
  at += records_bytes;
  FP4MOE_ASSIGN_OR_RETURN(index.parts, split_names({reinterpret_cast<const char*>(at), header.names_bytes}));
  FP4MOE_RETURN_IF_ERROR(check_places(header, index));
  return index;
}

Status check_weights(std::span<const uint8_t> file, const WeightFileIndex& index, ThreadPool& pool) {
  size_t at = kWeightAlign;
  for (size_t i = 0; i < index.weights.size(); ++i) {
    const WeightRecord& weight = index.weights[i];
    const std::string name = index.parts[weight.part] + " (weight " + count(i) + " of " +
                             count(index.weights.size()) + ", " + count(weight.num_bytes) +
                             " bytes) is damaged: ";
    const size_t room = static_cast<size_t>(weight_room(static_cast<int64_t>(weight.num_bytes)));
    if (const uint64_t found = weight_checksum(file.subspan(at, weight.num_bytes), pool);
        found != weight.checksum)
      return data_loss(name + "checksum " + hash_text_of(found) + ", expected " +
                       hash_text_of(weight.checksum));
    const std::span<const uint8_t> padding = file.subspan(at + weight.num_bytes, room - weight.num_bytes);
    if (std::any_of(padding.begin(), padding.end(), [](uint8_t byte) { return byte != 0; }))
      return data_loss(name + "its padding is not zero");
    at += room;
  }
  return {};
}

WeightFileEnds make_weight_file_ends(const WeightFileIndex& index, uint64_t index_offset) {
  WeightFileEnds ends;
  ends.index = index.key;
  ends.index.append(reinterpret_cast<const char*>(index.weights.data()),
                    index.weights.size() * sizeof(WeightRecord));
  size_t names_bytes = 0;
  for (const std::string& name : index.parts) {
    FP4MOE_CHECK(name.find('\n') == std::string::npos, "a part's name must be one line");
    ends.index += name + "\n";
    names_bytes += name.size() + 1;
  }
  WeightFileHeader& header = ends.header;
  std::memset(&header, 0, sizeof header);
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kWeightFileVersion;
  header.num_weights = static_cast<uint32_t>(index.weights.size());
  header.file_bytes = index_offset + ends.index.size();
  header.index_offset = index_offset;
  header.key_bytes = index.key.size();
  header.names_bytes = names_bytes;
  header.index_hash = hash64(ends.index.data(), std::ssize(ends.index));
  header.header_hash = hash_header(header);
  return ends;
}

}  // namespace fp4moe
