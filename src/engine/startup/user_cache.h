// The folder for data that can be regenerated.
#pragma once

#include <cstdlib>
#include <string>

namespace fp4moe {

// Returns $XDG_CACHE_HOME/fp4moe or $HOME/.cache/fp4moe; empty if neither variable is set. A relative
// XDG_CACHE_HOME counts as not set, as its specification says: it would be another folder in each place.
inline std::string user_cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache != nullptr && *cache == '/') return std::string(cache) + "/fp4moe";
  return home == nullptr || *home == 0 ? "" : std::string(home) + "/.cache/fp4moe";
}

}  // namespace fp4moe
