#include "io/checkpoint/checkpoint_form.h"

#include <functional>

#include "base/check.h"
#include "base/tensor_view.h"
#include "io/file.h"
#include "io/json_document.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;

// Adds a line for each value in `json` that is not an object or array with elements.
void flatten(const Json& json, const std::string& name, std::map<std::string, std::string>& settings) {
  if (!json.is_structured() || json.empty()) {
    settings.emplace(name, json.dump(-1, ' ', /*ensure_ascii=*/true));
    return;
  }
  const std::string prefix = name.ends_with(": ") ? name : name + (json.is_object() ? "." : "");
  size_t index = 0;
  for (const auto& [key, value] : json.items()) {
    if (json.is_array())
      flatten(value, prefix + "[" + std::to_string(index++) + "]", settings);
    else if (key != "_name_or_path" && key != "transformers_version" && key != "producer")
      flatten(value, prefix + key, settings);
  }
}

Status add_settings(const std::string& folder, const std::string& file,
                    std::map<std::string, std::string>& settings) {
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(folder + "/" + file, kMaxConfigBytes));
  FP4MOE_ASSIGN_OR_RETURN(const Json json, parse_json(text, folder + "/" + file));
  flatten(json, file + ": ", settings);
  return {};
}

std::string value_text(const std::map<std::string, std::string>& settings, const std::string& name) {
  constexpr size_t kShownBytes = 60;
  const auto at = settings.find(name);
  if (at == settings.end()) return "missing";
  return at->second.size() <= kShownBytes ? at->second : at->second.substr(0, kShownBytes) + "...";
}

std::string tensor_text(const CheckpointForm::Tensor& tensor) {
  return dtype_name(tensor.dtype) + std::string(" ") + shape_string(tensor.shape);
}

// Returns the first key at which the maps differ, or null. Equal values are those for which `equal` is true.
template <class Map, class Equal>
const std::string* first_difference(const Map& a, const Map& b, const Equal& equal) {
  auto at = a.begin(), other = b.begin();
  while (at != a.end() && other != b.end() && at->first == other->first && equal(at->second, other->second))
    ++at, ++other;
  if (at == a.end() && other == b.end()) return nullptr;
  const bool is_first = other == b.end() || (at != a.end() && at->first <= other->first);
  return is_first ? &at->first : &other->first;
}

}  // namespace

Result<CheckpointForm> CheckpointForm::of(const Checkpoint& checkpoint) {
  CheckpointForm form;
  form.folder = checkpoint.folder();
  FP4MOE_RETURN_IF_ERROR(add_settings(form.folder, "config.json", form.settings));
  if (file_exists(form.folder + "/hf_quant_config.json"))
    FP4MOE_RETURN_IF_ERROR(add_settings(form.folder, "hf_quant_config.json", form.settings));
  for (const TensorEntry& tensor : checkpoint.tensors())
    form.tensors.emplace(tensor.name, Tensor{tensor.view.dtype, tensor.view.shape, tensor.file});
  return form;
}

Status CheckpointForm::check_same(const CheckpointForm& other) const {
  if (const std::string* name = first_difference(settings, other.settings, std::equal_to<std::string>()))
    return invalid_argument("'" + other.folder + "': " + *name + " is " + value_text(other.settings, *name) +
                            ", but in the loaded model it is " + value_text(settings, *name));
  const auto equal = [](const Tensor& a, const Tensor& b) {
    return a.dtype == b.dtype && a.shape == b.shape;
  };
  const std::string* name = first_difference(tensors, other.tensors, equal);
  if (name == nullptr) return {};
  const auto here = tensors.find(*name), there = other.tensors.find(*name);
  if (there == other.tensors.end())
    return invalid_argument("'" + other.folder + "' has no tensor '" + *name + "', which is " +
                            tensor_text(here->second) + " in the loaded model");
  const std::string found = "'" + other.folder + "': tensor '" + *name + "' in '" + there->second.file +
                            "' is " + tensor_text(there->second);
  if (here == tensors.end()) return invalid_argument(found + ", but the loaded model has no such tensor");
  return invalid_argument(found + ", but in the loaded model it is " + tensor_text(here->second));
}

Result<Checkpoint> CheckpointForm::open_same(const std::string& new_folder) const {
  FP4MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(new_folder));
  FP4MOE_ASSIGN_OR_RETURN(const CheckpointForm other, of(checkpoint));
  FP4MOE_RETURN_IF_ERROR(check_same(other));
  return checkpoint;
}

}  // namespace fp4moe
