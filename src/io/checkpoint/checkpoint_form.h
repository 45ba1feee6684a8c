// CheckpointForm: everything about a checkpoint on which a loaded model depends, except the tensors' values.
// Weights can be reloaded in place only from a checkpoint of the same form.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint/checkpoint.h"

namespace fp4moe {

struct CheckpointForm {
  struct Tensor {
    DType dtype = DType::kBF16;
    std::vector<int64_t> shape;
    std::string file;  // not compared: shards may differ
  };
  std::string folder;                           // not compared
  std::map<std::string, std::string> settings;  // "config.json: rope_scaling.factor" -> JSON text
  std::map<std::string, Tensor> tensors;        // by name

  // Reads the tensors' types and shapes and the folder's config.json and hf_quant_config.json (which may be
  // missing). Their keys "_name_or_path", "transformers_version" and "producer" describe how the files were
  // made, and are left out.
  static Result<CheckpointForm> of(const Checkpoint& checkpoint);

  // Compares `other` with this form of the loaded model. kInvalidArgument names the first setting or tensor
  // that differs, with both values.
  Status check_same(const CheckpointForm& other) const;
  // Opens the checkpoint in `folder` and compares its form. Reads no tensor.
  Result<Checkpoint> open_same(const std::string& folder) const;
};

}  // namespace fp4moe
