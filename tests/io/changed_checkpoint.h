// An in-memory copy of a checkpoint with some tensors changed.
#pragma once

#include <algorithm>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

class ChangedCheckpoint {
 public:
  explicit ChangedCheckpoint(const Checkpoint& source)
      : folder_(source.folder()), tensors_(source.tensors()) {}

  void add(const std::string& name, DType dtype = DType::kBF16, std::vector<int64_t> shape = {1}) {
    TensorEntry tensor{.name = name, .view = {nullptr, dtype, std::move(shape)}, .file = "added"};
    std::vector<uint8_t>& bytes =
        bytes_->emplace_back(static_cast<size_t>(tensor.view.num_bytes()), uint8_t{0});
    tensor.view.data = bytes.data();
    tensors_.push_back(std::move(tensor));
  }
  void remove(std::string_view name) {
    std::erase_if(tensors_, [&](const TensorEntry& tensor) { return tensor.name == name; });
  }
  void rename(std::string_view name, const std::string& to) { find(name).name = to; }
  // A private, writable copy of the tensor's bytes.
  uint8_t* writable(std::string_view name) {
    TensorEntry& tensor = find(name);
    const uint8_t* data = tensor.view.data;
    std::vector<uint8_t>& bytes = bytes_->emplace_back(data, data + tensor.view.num_bytes());
    tensor.view.data = bytes.data();
    return bytes.data();
  }
  // The source must outlive the result.
  Checkpoint make() const { return Checkpoint::in_memory(folder_, tensors_, bytes_); }

 private:
  TensorEntry& find(std::string_view name) {
    return *std::find_if(tensors_.begin(), tensors_.end(),
                         [&](const TensorEntry& tensor) { return tensor.name == name; });
  }

  const std::string folder_;
  std::vector<TensorEntry> tensors_;
  std::shared_ptr<std::list<std::vector<uint8_t>>> bytes_ =
      std::make_shared<std::list<std::vector<uint8_t>>>();
};

}  // namespace fp4moe
