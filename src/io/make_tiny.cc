#include "io/make_tiny.h"

#include <filesystem>
#include <map>

#include "base/check.h"
#include "io/make_tiny_files.h"
#include "io/make_tiny_tensors.h"
#include "io/model_config.h"

namespace fp4moe {
namespace {

Status prepare_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return not_found("cannot create folder '" + folder + "': " + error.message());
  if (!std::filesystem::is_empty(folder, error) || error)
    return invalid_argument("folder '" + folder +
                            "' is not empty; a checkpoint is only written into a new one");
  return {};
}

Status check_space(const std::string& folder, const std::vector<TinyTensor>& tensors) {
  int64_t needed = 0;
  for (const TinyTensor& tensor : tensors) {
    FP4MOE_ASSIGN_OR_RETURN(const int64_t num_bytes, tensor_bytes(tensor.spec));
    needed += num_bytes;
  }
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (!error && space.available < static_cast<uintmax_t>(needed))
    return does_not_fit("the checkpoint has " + std::to_string(needed) + " bytes, but '" + folder +
                        "' has room for " + std::to_string(space.available));
  return {};
}

}  // namespace

Status make_tiny(const std::string& folder, const MakeTinyOptions& options) {
  FP4MOE_ASSIGN_OR_RETURN(const MakeTinyFiles files, make_tiny_files(options));
  const auto text = [](const Json& json) { return json.is_null() ? std::string() : json.dump(1) + "\n"; };
  FP4MOE_ASSIGN_OR_RETURN(
      const ModelConfig config,
      parse_model_config(text(files.config), text(files.generation), text(files.hf_quant)));
  FP4MOE_RETURN_IF_ERROR(prepare_folder(folder));

  const std::vector<TinyTensor> tensors = list_tiny_tensors(config);
  FP4MOE_RETURN_IF_ERROR(check_space(folder, tensors));
  std::vector<TensorSpec> specs;
  std::map<std::string, const TinyTensor*> by_name;
  for (const TinyTensor& tensor : tensors) {
    specs.push_back(tensor.spec);
    by_name[tensor.spec.name] = &tensor;
  }
  FP4MOE_RETURN_IF_ERROR(write_safetensors_shards(
      folder, specs, options.num_shards, [&](const TensorSpec& spec, const ByteSink& sink) {
        return fill_tiny_tensor(*by_name.at(spec.name), options.seed, sink);
      }));

  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/generation_config.json", text(files.generation)));
  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/tokenizer.json", text(files.tokenizer)));
  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/tokenizer_config.json", text(files.tokenizer_config)));
  if (!files.hf_quant.is_null())
    FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/hf_quant_config.json", text(files.hf_quant)));
  return write_text_file(folder + "/config.json", text(files.config));
}

}  // namespace fp4moe
