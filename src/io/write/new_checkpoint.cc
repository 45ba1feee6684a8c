#include "io/write/new_checkpoint.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "io/file.h"

namespace fp4moe {

Status prepare_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return not_found("cannot create folder '" + folder + "': " + error.message());
  const bool has_partial_index = std::filesystem::exists(folder + "/" + kIndexName + NewFile::kSuffix, error);
  std::vector<std::string> partial, shards;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::filesystem::path& path = entry.path();
    const bool is_regular = entry.is_regular_file(error);
    if (is_regular && path.extension() == NewFile::kSuffix)
      partial.push_back((path.parent_path() / path.stem()).string());
    else if (is_regular && has_partial_index && is_shard_name(path.filename().string()))
      shards.push_back(path.string());
    else
      return invalid_argument("folder '" + folder + "' is not empty; legal: a new or empty folder");
  }
  if (error) return data_loss("cannot read folder '" + folder + "': " + error.message());
  std::vector<NewFile> taken;  // creating a file anew takes over the partial one, and then removes it
  for (const std::string& path : partial) {
    FP4MOE_ASSIGN_OR_RETURN(NewFile file, NewFile::create(path));
    taken.push_back(std::move(file));
  }
  for (const std::string& path : shards)
    if (!std::filesystem::remove(path, error) && error)
      return data_loss("cannot remove '" + path + "': " + error.message());
  return {};
}

Status check_space(const std::string& folder, const std::vector<TensorSpec>& specs) {
  int64_t needed = 0;
  for (const TensorSpec& spec : specs) {
    FP4MOE_ASSIGN_OR_RETURN(const int64_t num_bytes, tensor_bytes(spec));
    needed += num_bytes;
  }
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (!error && space.available < static_cast<uintmax_t>(needed))
    return does_not_fit("the checkpoint has " + std::to_string(needed) + " bytes, but '" + folder +
                        "' has room for " + std::to_string(space.available));
  return {};
}

}  // namespace fp4moe
