// Multi-token prediction layers: present in the checkpoint and declared. Only drafts use them
// (model/mtp_head.h).
#pragma once

#include <string>
#include <string_view>

#include "io/checkpoint/checkpoint.h"
#include "io/config/model_config.h"

namespace fp4moe {

// Whether a module pattern of a quantization declaration refers to MTP layers: "mtp.*", "model.mtp.*", and
// "model.layers.N.*" with N >= num_layers.
bool is_mtp_name(const ModelConfig& config, std::string_view name);

// Whether a tensor belongs to an MTP layer: "mtp.*", "model.mtp.*", and "model.layers.N.*" with N >=
// num_layers if the checkpoint has layer N's "eh_proj", which projects the embedding and hidden state and
// exists in no other layer ("mtp.fc" in a layer below "mtp."). A layer N without it is an ordinary layer that
// num_hidden_layers does not count.
bool is_mtp_tensor(const ModelConfig& config, const Checkpoint& checkpoint, std::string_view name);

// Whether the tensor is an MTP layer's copy of the embedding or the LM head, which are not read.
bool is_mtp_copy(const ModelConfig& config, std::string_view name);

// Returns a log line about the skipped tensors (describe_skipped()): those of the MTP layers or, if the layer
// is loaded, its copies.
std::string describe_skipped_mtp(const ModelConfig& config, const Checkpoint& checkpoint,
                                 bool is_loaded = false);

}  // namespace fp4moe
