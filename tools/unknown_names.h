// Errors about flags and subcommands that do not exist, with the name that was probably meant.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "config_file.h"

namespace fp4moe {

// Returns the known name that is nearest to `name` by edit distance (a swap of neighbours counts once), or
// the only one that begins with `name`; empty: none is near. Case, "_" instead of "-" and leading dashes do
// not count.
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// Returns what to append to "... is not a flag": ": use --x" if another engine has this flag,
// " (did you mean --x?)" if a flag has a similar name, otherwise an empty string.
std::string unknown_flag_hint(const CLI::App& subcommand, const std::string& name);

// Returns a warning for each environment variable that no flag of the subcommand reads but whose name is
// nearly that of a flag's variable, or is made of another spelling of the flag.
std::vector<std::string> misspelt_variables(const CLI::App& subcommand);

// Returns one line for a failed parse of `args` (without the program's name): the unknown flags, each with
// its hint, or the error and the command that lists what is valid. `sources` as for with_value_source().
std::string usage_error(const CLI::App& app, const CLI::Error& error, const std::vector<std::string>& args,
                        const VariableSources& sources);

}  // namespace fp4moe
