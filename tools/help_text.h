// The texts of --help and --help-all.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace fp4moe {

// --help of a subcommand: its flags if they fit on one screen, otherwise the flags that most users need, one
// sentence each, and where to find the rest. Everything else (--help-all, subcommands) is CLI11's text.
class HelpText : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

}  // namespace fp4moe
