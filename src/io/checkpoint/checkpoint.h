// Checkpoint: the tensors of a checkpoint folder, memory-mapped. A single model.safetensors or the shards
// of model.safetensors.index.json.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/tensor_view.h"
#include "fp4moe/status.h"

namespace fp4moe {

// A tensor's view and its location on disk.
struct TensorEntry {
  std::string name;
  TensorView view;
  std::string file;  // the shard's file name
  int64_t file_offset = 0;
};

class Checkpoint {
 public:
  // Maps every shard and checks its header. kNotFound (folder, missing shard), kDataLoss (truncated or
  // inconsistent header, overlap, hole, wrong size), kInvalidArgument (the index names a file outside the
  // folder).
  static Result<Checkpoint> open(const std::string& folder);
  // The folder has model.safetensors or an index of shards.
  static bool has_weights(const std::string& folder);
  // A checkpoint of tensors with distinct names whose data is in `storage`, which it keeps alive.
  static Checkpoint in_memory(const std::string& folder, std::vector<TensorEntry> tensors,
                              std::shared_ptr<const void> storage);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::string& folder() const;
  // In file order, shard by shard. Views stay valid as long as the Checkpoint lives.
  const std::vector<TensorEntry>& tensors() const;
  int64_t total_bytes() const;
  // Null if there is no such tensor.
  const TensorEntry* find(std::string_view name) const;
  // kNotFound, or kInvalidArgument naming both shapes or dtypes.
  Result<TensorView> get(std::string_view name, DType dtype, std::vector<int64_t> shape) const;
  // Hint to the kernel: these bytes will be read soon / are no longer needed.
  void will_need(const TensorView& view) const;
  void release(const TensorView& view) const;
  // release() for all tensors whose names begin with `prefix`.
  void release_all(std::string_view prefix) const;
  // A hash of every file's name, size, modification time, header and data samples; 0 for in_memory().
  uint64_t identity() const;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
