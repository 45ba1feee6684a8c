// The verbs and flags of the binary as CLI11 knows them: what man pages and completions are written from.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace fp4moe {

struct FlagInfo {
  std::vector<std::string> names;    // "--port", "-n"; of a positional none
  std::string positional;            // its name, if it is one
  std::string type, initial;         // of the value; empty: takes none, has none
  std::vector<std::string> choices;  // all legal values, where they are few
  std::string environment, help, group;
  bool required = false;
};

struct VerbInfo {
  std::string path;  // "serve", "bench latency"; empty: the binary
  std::string help;
  std::vector<FlagInfo> flags;
  std::vector<std::string> verbs;  // of the next level, by name
};

// The binary, its verbs and theirs; hidden ones are left out.
std::vector<VerbInfo> command_tree(const CLI::App& app);

std::string man_page(const std::vector<VerbInfo>& tree, const VerbInfo& verb);
std::string bash_completion(const std::vector<VerbInfo>& tree);
std::string zsh_completion(const std::vector<VerbInfo>& tree);
std::string fish_completion(const std::vector<VerbInfo>& tree);

}  // namespace fp4moe
