// Checkpoint: the memory-mapped tensors of a checkpoint folder, from a single model.safetensors or from the
// shards listed in model.safetensors.index.json.
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
  std::string name;  // see Checkpoint::tensors()
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
  // Whether the folder has model.safetensors or an index of shards.
  static bool has_weights(const std::string& folder);
  // Makes a checkpoint from tensors with distinct names; it keeps `storage`, which holds their data, alive.
  static Checkpoint in_memory(const std::string& folder, std::vector<TensorEntry> tensors,
                              std::shared_ptr<const void> storage);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::string& folder() const;
  // Names below are text_model_name()s (io/config/tensor_names.h), whatever prefix the files have; an MTP
  // layer below "mtp.", if it has "mtp.fc", is the layer after the last one, by mtp_layer_name().
  // All tensors in file order, shard by shard. Views stay valid as long as the Checkpoint lives.
  const std::vector<TensorEntry>& tensors() const;
  int64_t total_bytes() const;
  // Returns null if there is no such tensor.
  const TensorEntry* find(std::string_view name) const;
  // Returns the view if dtype and shape match. kNotFound, or kInvalidArgument with the stored and the
  // requested dtype and shape.
  Result<TensorView> get(std::string_view name, DType dtype, std::vector<int64_t> shape) const;
  // Hint to the kernel that these bytes will be read soon (will_need) or are no longer needed (release).
  void will_need(const TensorView& view) const;
  void release(const TensorView& view) const;
  // Calls release() for all tensors whose names begin with `prefix`.
  void release_all(std::string_view prefix) const;
  // Returns a hash of every file's name, size, modification time, header and data samples; 0 for in_memory().
  uint64_t identity() const;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
