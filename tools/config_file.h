// --config FILE: flags from a file.
#pragma once

#include "verb.h"

namespace fp4moe {

// Reads the file that --config or FP4MOE_CONFIG names, if the verb has that flag. Each key is a flag without
// its "--" (with '-' or '_'), as "key = value" (TOML, INI) or, in a file named *.yaml or *.yml, "key: value".
// What the command line or the environment says comes before it. kInvalidArgument for a key that is no flag
// of the verb, kNotFound for a file that cannot be read.
Status apply_config_file(CLI::App& app, int argc, char** argv);

// The environment variable of the flag that `names`, CLI11's, begin with: FP4MOE_ and capitals.
std::string environment_name(const std::string& names);
// Gives one to each of the verb's flags that has none yet.
void add_environment_names(CLI::App& verb);

}  // namespace fp4moe
