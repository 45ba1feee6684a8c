// The binary's subcommands and flags as registered with CLI11, from which man pages and completions are made.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace fp4moe {

struct FlagInfo {
  std::vector<std::string> names;    // "--port", "-n"; empty for an argument that is only positional
  std::string positional;            // its name as a positional argument; empty: it is not one
  std::string type, initial;         // type of the value (empty: no value; FILE and FOLDER are completed as
                                     // paths) and default (empty: no default)
  std::vector<std::string> choices;  // all allowed values, if the flag has a fixed set
  std::string environment, help, group;
  bool required = false;
};

struct SubcommandInfo {
  std::string path;  // "serve", "bench latency"; empty: the binary itself
  std::string help;
  std::vector<FlagInfo> flags;
  std::vector<std::string> subcommands;  // names of nested subcommands
};

// Lists the binary and all its subcommands, including nested ones, except hidden ones.
std::vector<SubcommandInfo> command_tree(const CLI::App& app);

std::string man_page(const std::vector<SubcommandInfo>& tree, const SubcommandInfo& subcommand);
std::string bash_completion(const std::vector<SubcommandInfo>& tree);
std::string zsh_completion(const std::vector<SubcommandInfo>& tree);
std::string fish_completion(const std::vector<SubcommandInfo>& tree);
// docs/flags.md
std::string flags_document(const std::vector<SubcommandInfo>& tree);

}  // namespace fp4moe
