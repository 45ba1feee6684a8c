#include "io/write/new_checkpoint.h"

#include <filesystem>

#include "base/check.h"

namespace fp4moe {

Status prepare_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return not_found("cannot create folder '" + folder + "': " + error.message());
  if (!std::filesystem::is_empty(folder, error) || error)
    return invalid_argument("folder '" + folder + "' is not empty; legal: a new or empty folder");
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
