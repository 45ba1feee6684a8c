#include "io/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>

#include "base/check.h"
#include "base/tensor_view.h"
#include "io/json_document.h"

namespace fp4moe {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is used in place");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr size_t kMaxDims = 8;
constexpr int64_t kMaxTensorBits = int64_t{1} << 62;

std::string label(const std::string& name) { return "tensor '" + name + "'"; }

// Reads the array of unsigned numbers under `key` in a tensor's object.
Result<std::vector<int64_t>> read_sizes(const Json& object, const char* key, const std::string& name) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_array()) return data_loss(label(name) + " has no array '" + key + "'");
  std::vector<int64_t> sizes;
  for (const Json& value : *at) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
      return data_loss(label(name) + ": '" + key + "' holds " + json_brief(value) +
                       "; legal: whole numbers from 0 to 2^63-1");
    sizes.push_back(static_cast<int64_t>(value.get<uint64_t>()));
  }
  return sizes;
}

// Converts the header's offsets, relative to the data, to offsets from the start of the file.
Result<SafetensorsEntry> read_entry(const std::string& name, const Json& object, int64_t data_begin,
                                    int64_t file_bytes) {
  if (!object.is_object()) return data_loss(label(name) + " is not described by an object");
  SafetensorsEntry entry;
  entry.spec.name = name;
  const auto dtype = object.find("dtype");
  if (dtype == object.end() || !dtype->is_string()) return data_loss(label(name) + " has no string 'dtype'");
  const Result<DType> parsed = parse_dtype(dtype->get_ref<const std::string&>());
  if (!parsed.ok()) return unsupported(label(name) + ": " + parsed.status().message());
  entry.spec.dtype = *parsed;
  FP4MOE_ASSIGN_OR_RETURN(entry.spec.shape, read_sizes(object, "shape", name));
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, read_sizes(object, "data_offsets", name));
  FP4MOE_ASSIGN_OR_RETURN(const int64_t needed, tensor_bytes(entry.spec));
  if (offsets.size() != 2 || offsets[0] > offsets[1])
    return data_loss(label(name) + ": data_offsets = " + shape_string(offsets) +
                     "; legal: [begin, end] with begin <= end");
  if (offsets[1] > file_bytes - data_begin)
    return data_loss(label(name) + " ends at data byte " + std::to_string(offsets[1]) +
                     ", but the file has " + std::to_string(file_bytes - data_begin) +
                     " data bytes (truncated?)");
  if (offsets[1] - offsets[0] != needed)
    return data_loss(label(name) + " has " + std::to_string(offsets[1] - offsets[0]) + " bytes, but " +
                     dtype_name(entry.spec.dtype) + " " + shape_string(entry.spec.shape) + " needs " +
                     std::to_string(needed));
  entry.begin = data_begin + offsets[0];
  entry.end = data_begin + offsets[1];
  const int align = std::max(dtype_bits(entry.spec.dtype) / 8, 1);
  if (entry.begin % align != 0)
    return unsupported(label(name) + " begins at file byte " + std::to_string(entry.begin) +
                       ", which is not a multiple of its element size " + std::to_string(align));
  return entry;
}

// Checks that the entries, sorted by offset, cover [data_begin, file_bytes) exactly.
Status check_coverage(const std::vector<SafetensorsEntry>& entries, int64_t data_begin, int64_t file_bytes) {
  int64_t covered = data_begin;
  std::string previous = "the header";
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered)
      return data_loss(label(entry.spec.name) + " begins at file byte " + std::to_string(entry.begin) +
                       (entry.begin < covered ? ", inside " : ", leaving a hole after ") + previous +
                       ", which ends at " + std::to_string(covered));
    covered = entry.end;
    previous = label(entry.spec.name);
  }
  if (covered != file_bytes)
    return data_loss(previous + " ends at file byte " + std::to_string(covered) + ", but the file has " +
                     std::to_string(file_bytes) + " bytes");
  return {};
}

std::string header_json(const std::vector<SafetensorsEntry>& entries) {
  nlohmann::ordered_json header;  // in the order of the data, for human readers
  header["__metadata__"] = {{"format", "pt"}};
  for (const SafetensorsEntry& entry : entries)
    header[entry.spec.name] = {{"dtype", dtype_name(entry.spec.dtype)},
                               {"shape", entry.spec.shape},
                               {"data_offsets", {entry.begin, entry.end}}};
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

// Forwards the source's bytes and checks their count.
Status write_tensor(const SafetensorsEntry& entry, const TensorSource& source, const ByteSink& sink) {
  const int64_t expected = entry.end - entry.begin;
  int64_t written = 0;
  FP4MOE_RETURN_IF_ERROR(source(entry.spec, [&](std::span<const uint8_t> bytes) {
    written += static_cast<int64_t>(bytes.size());
    return written > expected ? Status{} : sink(bytes);
  }));
  if (written != expected)
    return invalid_argument(label(entry.spec.name) + " was given " + std::to_string(written) +
                            " bytes or more; its shape needs " + std::to_string(expected));
  return {};
}

std::string shard_name(int shard, int num_shards) {
  if (num_shards == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", shard + 1, num_shards);
  return name;
}

// Files that are removed again unless they are kept.
class WrittenFiles {
 public:
  WrittenFiles() = default;
  ~WrittenFiles() {
    std::error_code ignored;
    for (const std::string& path : paths_) std::filesystem::remove(path, ignored);
  }
  WrittenFiles(const WrittenFiles&) = delete;
  WrittenFiles& operator=(const WrittenFiles&) = delete;
  void add(std::string path) { paths_.push_back(std::move(path)); }
  void keep() { paths_.clear(); }

 private:
  std::vector<std::string> paths_;
};

}  // namespace

bool is_shard_name(std::string_view name) {
  std::string pattern(name);
  for (char& c : pattern)
    if (c >= '1' && c <= '9') c = '0';
  return pattern == "model-00000-of-00000.safetensors";  // as shard_name() writes numbers
}

Result<int64_t> tensor_bytes(const TensorSpec& spec) {
  if (spec.shape.size() > kMaxDims)
    return data_loss(label(spec.name) + " has " + std::to_string(spec.shape.size()) +
                     " dimensions; at most " + std::to_string(kMaxDims) + " are allowed");
  int64_t bits = dtype_bits(spec.dtype);
  bool overflow = false, empty = false;
  for (const int64_t dim : spec.shape) {
    if (dim < 0) return data_loss(label(spec.name) + " has the negative dimension " + std::to_string(dim));
    empty |= dim == 0;
    overflow |= __builtin_mul_overflow(bits, dim, &bits);
  }
  if (empty) return int64_t{0};
  if (overflow || bits > kMaxTensorBits)
    return data_loss(label(spec.name) + ": the size of shape " + shape_string(spec.shape) + " overflows");
  if (bits % 8 != 0)
    return data_loss(label(spec.name) + ": " + std::to_string(bits) + " bits of " + dtype_name(spec.dtype) +
                     " do not fill whole bytes");
  return bits / 8;
}

Result<std::vector<SafetensorsEntry>> parse_safetensors(std::span<const uint8_t> file) {
  uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes)
    return data_loss("the file has " + std::to_string(file.size()) +
                     " bytes; a safetensors file has at least 8");
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const uint64_t rest = file.size() - sizeof header_bytes;
  if (header_bytes < 2 || header_bytes > std::min(rest, kMaxHeaderBytes))
    return data_loss("the header's length is " + std::to_string(header_bytes) + " bytes; legal: 2 to " +
                     std::to_string(std::min(rest, kMaxHeaderBytes)) + " in a file of " +
                     std::to_string(file.size()) + " bytes");
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + sizeof header_bytes, header_bytes);
  FP4MOE_ASSIGN_OR_RETURN(const Json header, parse_json(text, "the header"));
  if (!header.is_object()) return data_loss("the header is not a JSON object");

  const int64_t file_bytes = static_cast<int64_t>(file.size());
  const int64_t data_begin = static_cast<int64_t>(sizeof header_bytes + header_bytes);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, object] : header.items()) {
    if (name == "__metadata__") continue;
    FP4MOE_ASSIGN_OR_RETURN(SafetensorsEntry entry, read_entry(name, object, data_begin, file_bytes));
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.spec.name) < std::tie(b.begin, b.end, b.spec.name);
  });
  FP4MOE_RETURN_IF_ERROR(check_coverage(entries, data_begin, file_bytes));
  return entries;
}

Status write_safetensors(const std::string& path, std::vector<TensorSpec> specs, const TensorSource& source) {
  std::stable_sort(specs.begin(), specs.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return dtype_bits(a.dtype) > dtype_bits(b.dtype);
  });
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> names;
  int64_t end = 0;  // end of the data so far, relative to the first data byte
  for (TensorSpec& spec : specs) {
    if (!names.insert(spec.name).second) return invalid_argument(label(spec.name) + " is written twice");
    FP4MOE_ASSIGN_OR_RETURN(const int64_t num_bytes, tensor_bytes(spec));
    entries.push_back({.spec = std::move(spec), .begin = end, .end = end + num_bytes});
    end += num_bytes;
  }
  const std::string header = header_json(entries);
  const uint64_t header_bytes = header.size();
  return write_file(path, [&](const ByteSink& sink) -> Status {
    FP4MOE_RETURN_IF_ERROR(sink({reinterpret_cast<const uint8_t*>(&header_bytes), sizeof header_bytes}));
    FP4MOE_RETURN_IF_ERROR(sink({reinterpret_cast<const uint8_t*>(header.data()), header.size()}));
    for (const SafetensorsEntry& entry : entries) FP4MOE_RETURN_IF_ERROR(write_tensor(entry, source, sink));
    return {};
  });
}

Status write_safetensors_shards(const std::string& folder, const std::vector<TensorSpec>& specs,
                                int num_shards, const TensorSource& source) {
  if (num_shards < 1 || num_shards > 99999 ||
      static_cast<size_t>(num_shards) > std::max<size_t>(specs.size(), 1))
    return invalid_argument("num_shards=" + std::to_string(num_shards) +
                            "; legal: 1 to the number of tensors, " + std::to_string(specs.size()) +
                            ", and at most 99999");
  int64_t total = 0;
  for (const TensorSpec& spec : specs) {
    FP4MOE_ASSIGN_OR_RETURN(const int64_t num_bytes, tensor_bytes(spec));
    total += num_bytes;
  }
  std::optional<NewFile> index;
  if (num_shards > 1) {
    FP4MOE_ASSIGN_OR_RETURN(index, NewFile::create(folder + "/" + kIndexName));
  }
  WrittenFiles written;
  Json weight_map = Json::object();
  size_t next = 0;
  int64_t done = 0;
  for (int shard = 0; shard < num_shards; ++shard) {
    // Fills a shard up to its share, but leaves at least one tensor for each following shard.
    const size_t last = specs.size() - static_cast<size_t>(num_shards - 1 - shard);
    std::vector<TensorSpec> part;
    while (next < last &&
           (part.empty() || shard == num_shards - 1 || done < total / num_shards * (shard + 1))) {
      weight_map[specs[next].name] = shard_name(shard, num_shards);
      done += tensor_bytes(specs[next]).value();
      part.push_back(specs[next++]);
    }
    const std::string path = folder + "/" + shard_name(shard, num_shards);
    FP4MOE_RETURN_IF_ERROR(write_safetensors(path, std::move(part), source));
    if (index) written.add(path);
  }
  if (!index) return {};
  const Json contents = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  const std::string text = contents.dump(1) + "\n";
  FP4MOE_RETURN_IF_ERROR(index->append({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
  FP4MOE_RETURN_IF_ERROR(index->commit());
  written.keep();
  return {};
}

}  // namespace fp4moe
