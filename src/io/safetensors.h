// The safetensors container: u64 header length, JSON header, tensor data. Reading checks everything that
// the header says against the file; writing streams.
// Layout: https://github.com/huggingface/safetensors (format).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "fp4moe/status.h"
#include "io/file.h"

namespace fp4moe {

// What a tensor is, apart from its data.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;  // row-major; empty for a scalar
};

// Data bytes of a tensor; kDataLoss, naming it: a negative or more than 8 dimensions, a size over 2^62 bytes,
// or 4-bit elements that do not fill whole bytes.
Result<int64_t> tensor_bytes(const TensorSpec& spec);

struct SafetensorsEntry {
  TensorSpec spec;
  int64_t begin = 0, end = 0;  // bytes from the start of the file
};

// The tensors of a file in the order of their data, which they cover without hole or overlap. `file` is all
// of the file's bytes; only the header is touched. kDataLoss, with the name and both numbers, for whatever
// does not fit together; kUnsupported for an unknown dtype or data that is not aligned to its elements.
Result<std::vector<SafetensorsEntry>> parse_safetensors(std::span<const uint8_t> file);

// Pushes the bytes of one tensor, in as many pieces as it likes.
using TensorSource = std::function<Status(const TensorSpec&, const ByteSink&)>;

// Writes `path` atomically. Data is laid out by falling element size, then in the order given, so that every
// tensor is aligned; `source` is asked once for each tensor in that order. kInvalidArgument for two tensors
// of one name or a source that gives another number of bytes than the shape needs.
Status write_safetensors(const std::string& path, std::vector<TensorSpec> specs, const TensorSource& source);

// A checkpoint folder's tensors: model.safetensors, or num_shards files of about equal bytes with
// model.safetensors.index.json, which is written last.
Status write_safetensors_shards(const std::string& folder, const std::vector<TensorSpec>& specs,
                                int num_shards, const TensorSource& source);

}  // namespace fp4moe
