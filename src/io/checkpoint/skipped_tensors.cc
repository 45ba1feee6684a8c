#include "io/checkpoint/skipped_tensors.h"

namespace fp4moe {

std::string describe_skipped(const Checkpoint& checkpoint,
                             const std::function<bool(std::string_view)>& is_skipped, const char* what) {
  int64_t num_tensors = 0, num_bytes = 0;
  const std::string* first = nullptr;
  for (const TensorEntry& tensor : checkpoint.tensors()) {
    if (!is_skipped(tensor.name)) continue;
    if (first == nullptr) first = &tensor.name;
    ++num_tensors;
    num_bytes += tensor.view.num_bytes();
  }
  if (first == nullptr) return {};
  return "skipping " + std::to_string(num_tensors) + " tensors (" + std::to_string(num_bytes) + " bytes) " +
         what + "; the first is '" + *first + "'";
}

}  // namespace fp4moe
