// The binary's subcommands and flags as registered with CLI11: the source of man pages and completions.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace fp4moe {

struct FlagInfo {
  std::vector<std::string> names;    // "--port", "-n"; empty for a positional
  std::string positional;            // the name of a positional, else empty
  std::string type, initial;         // type and default of the value; empty: takes no value, has no default
  std::vector<std::string> choices;  // all legal values, if they form a small set
  std::string environment, help, group;
  bool required = false;
};

struct SubcommandInfo {
  std::string path;  // "serve", "bench latency"; empty: the binary itself
  std::string help;
  std::vector<FlagInfo> flags;
  std::vector<std::string> subcommands;  // names of its subcommands
};

// The binary, its subcommands and theirs, without hidden ones.
std::vector<SubcommandInfo> command_tree(const CLI::App& app);

std::string man_page(const std::vector<SubcommandInfo>& tree, const SubcommandInfo& subcommand);
std::string bash_completion(const std::vector<SubcommandInfo>& tree);
std::string zsh_completion(const std::vector<SubcommandInfo>& tree);
std::string fish_completion(const std::vector<SubcommandInfo>& tree);

}  // namespace fp4moe
