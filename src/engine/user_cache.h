// The folder for what can be made again.
#pragma once

#include <string>

namespace fp4moe {

// $XDG_CACHE_HOME/fp4moe or ~/.cache/fp4moe; empty where the environment has neither.
std::string user_cache_folder();

}  // namespace fp4moe
