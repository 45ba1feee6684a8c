#include "io/write/make_tiny.h"

#include <map>

#include "base/check.h"
#include "io/config/model_config.h"
#include "io/config/tensor_names.h"
#include "io/write/make_tiny_files.h"
#include "io/write/make_tiny_tensors.h"
#include "io/write/new_checkpoint.h"

namespace fp4moe {
Status make_tiny(const std::string& folder, const MakeTinyOptions& options) {
  FP4MOE_ASSIGN_OR_RETURN(const MakeTinyFiles files, make_tiny_files(options));
  const auto text = [](const Json& json) { return json.is_null() ? std::string() : json.dump(1) + "\n"; };
  FP4MOE_ASSIGN_OR_RETURN(
      const ModelConfig config,
      parse_model_config(text(files.config), text(files.generation), text(files.hf_quant)));
  FP4MOE_RETURN_IF_ERROR(prepare_folder(folder));

  const std::vector<TinyTensor> tensors = list_tiny_tensors(config);
  std::vector<TensorSpec> specs;
  std::map<std::string, const TinyTensor*> by_name;
  for (const TinyTensor& tensor : tensors) {
    TensorSpec& spec = specs.emplace_back(tensor.spec);
    spec.name = stored_name(config.text_prefix, tensor.spec.name, config.mtp_layer);
    by_name[spec.name] = &tensor;
  }
  FP4MOE_RETURN_IF_ERROR(check_space(folder, specs));
  FP4MOE_RETURN_IF_ERROR(write_safetensors_shards(
      folder, specs, options.num_shards, [&](const TensorSpec& spec, const ByteSink& sink) {
        return fill_tiny_tensor(*by_name.at(spec.name), options.seed, sink);
      }));

  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/generation_config.json", text(files.generation)));
  const bool is_json = files.tiktoken.empty();
  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + (is_json ? "/tokenizer.json" : "/tiktoken.model"),
                                         is_json ? text(files.tokenizer) : files.tiktoken));
  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/tokenizer_config.json", text(files.tokenizer_config)));
  if (!files.hf_quant.is_null())
    FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/hf_quant_config.json", text(files.hf_quant)));
  return write_text_file(folder + "/config.json", text(files.config));
}

}  // namespace fp4moe
