#include "io/checkpoint/checkpoint_index.h"

#include <set>

#include "base/check.h"
#include "io/json_document.h"

namespace fp4moe {
namespace {

bool is_plain_safetensors_name(std::string_view name) {
  return !name.starts_with('.') && name.ends_with(".safetensors") &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

}  // namespace

Result<CheckpointIndex> parse_checkpoint_index(std::string_view json) {
  FP4MOE_ASSIGN_OR_RETURN(const Json root, parse_json(json, "index"));
  const auto map = root.find("weight_map");
  if (map == root.end() || !map->is_object() || map->empty())
    return data_loss("the index has no object 'weight_map' with at least one tensor");
  CheckpointIndex index;
  std::set<std::string> files;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string())
      return data_loss("weight_map['" + name + "'] is " + json_brief(file) + "; legal: a file name");
    const std::string& file_name = file.get_ref<const std::string&>();
    if (!is_plain_safetensors_name(file_name))
      return invalid_argument("weight_map['" + name + "'] is '" + file_name +
                              "'; legal: the name of a .safetensors file in the same folder");
    index.tensors[name] = file_name;
    files.insert(file_name);
  }
  index.files.assign(files.begin(), files.end());
  return index;
}

}  // namespace fp4moe
