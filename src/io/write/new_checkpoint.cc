#include "io/write/new_checkpoint.h"

#include <filesystem>

#include "base/check.h"
#include "io/file.h"

namespace fp4moe {

Status prepare_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return not_found("cannot create folder '" + folder + "': " + error.message());
  std::vector<std::string> partial;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::filesystem::path& path = entry.path();
    if (path.extension() != NewFile::kSuffix || !entry.is_regular_file(error))
      return invalid_argument("folder '" + folder + "' is not empty; legal: a new or empty folder");
    partial.push_back((path.parent_path() / path.stem()).string());
  }
  if (error) return data_loss("cannot read folder '" + folder + "': " + error.message());
  for (const std::string& path : partial)  // creating the file anew takes over the partial one and removes it
    FP4MOE_RETURN_IF_ERROR(NewFile::create(path).status());
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
