// The folder for data that can be regenerated.
#pragma once

#include <string>

namespace fp4moe {

// $XDG_CACHE_HOME/fp4moe or ~/.cache/fp4moe; empty if neither variable is set.
std::string user_cache_folder();

}  // namespace fp4moe
