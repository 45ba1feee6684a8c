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

struct VerbInfo {
  std::string path;  // "serve", "bench latency"; empty: the binary itself
  std::string help;
  std::vector<FlagInfo> flags;
  std::vector<std::string> verbs;  // names of its subcommands
};

// The binary, its subcommands and theirs, without hidden ones.
std::vector<VerbInfo> command_tree(const CLI::App& app);

std::string man_page(const std::vector<VerbInfo>& tree, const VerbInfo& verb);
std::string bash_completion(const std::vector<VerbInfo>& tree);
std::string zsh_completion(const std::vector<VerbInfo>& tree);
std::string fish_completion(const std::vector<VerbInfo>& tree);

}  // namespace fp4moe
