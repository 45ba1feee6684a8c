// The folder for data that can be regenerated.
#pragma once

#include <cstdlib>
#include <string>

namespace fp4moe {

// Returns $XDG_CACHE_HOME/fp4moe or $HOME/.cache/fp4moe; empty if neither variable is set.
inline std::string user_cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache != nullptr && *cache != 0) return std::string(cache) + "/fp4moe";
  return home == nullptr || *home == 0 ? "" : std::string(home) + "/.cache/fp4moe";
}

}  // namespace fp4moe
