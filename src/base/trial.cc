#include "base/trial.h"

#include <algorithm>
#include <cstdlib>

namespace fp4moe {

bool is_on_trial(std::string_view feature) {
  const char* const value = std::getenv("FP4MOE_TRIAL");
  std::string_view list = value == nullptr ? "" : value;
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == feature) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace fp4moe
