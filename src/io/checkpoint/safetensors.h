// The safetensors container: u64 header length, JSON header, tensor data. The reader checks every claim in
// the header against the file; the writer streams the data.
// Layout: https://github.com/huggingface/safetensors (format).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "fp4moe/status.h"
#include "io/file.h"

namespace fp4moe {

// A tensor's description without its data.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;  // row-major; empty for a scalar
};

// Returns the size of a tensor's data in bytes. kDataLoss, naming the tensor: a negative dimension, more than
// 8 dimensions, a size over 2^62 bits, or 4-bit elements that do not fill whole bytes.
Result<int64_t> tensor_bytes(const TensorSpec& spec);

struct SafetensorsEntry {
  TensorSpec spec;
  int64_t begin = 0, end = 0;  // bytes from the start of the file
};

// Returns the tensors of a file in the order of their data, which they cover without holes or overlaps.
// `file` is the whole file; only its header is read. kDataLoss, with the tensor's name and the actual and
// expected numbers, for any inconsistency; kUnsupported for an unknown dtype or data that is not aligned to
// its elements.
Result<std::vector<SafetensorsEntry>> parse_safetensors(std::span<const uint8_t> file);

// Pushes the bytes of one tensor, in any number of pieces.
using TensorSource = std::function<Status(const TensorSpec&, const ByteSink&)>;

// Writes `path` atomically. Data is laid out by decreasing element size, then in the given order, so that
// every tensor is aligned; `source` is called once per tensor in that order. kInvalidArgument for duplicate
// names or a source that pushes a wrong number of bytes.
Status write_safetensors(const std::string& path, std::vector<TensorSpec> specs, const TensorSource& source);

inline constexpr const char* kIndexName = "model.safetensors.index.json";
// Whether write_safetensors_shards() names one of several files so.
bool is_shard_name(std::string_view name);

// Writes a checkpoint folder's tensors: model.safetensors, or num_shards files of about equal size and
// model.safetensors.index.json, whose partial file (NewFile) is there from the beginning until all shards
// are. On an error the shards are removed.
Status write_safetensors_shards(const std::string& folder, const std::vector<TensorSpec>& specs,
                                int num_shards, const TensorSource& source);

}  // namespace fp4moe
