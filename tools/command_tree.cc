#include "command_tree.h"

#include <sstream>

namespace fp4moe {

namespace {

// CLI11 prints a set of allowed values as "TEXT:{a,b}".
std::vector<std::string> choices_of(const std::string& type) {
  const size_t begin = type.find('{'), end = type.find('}');
  std::vector<std::string> choices;
  if (begin == std::string::npos || end == std::string::npos) return choices;
  std::istringstream list(type.substr(begin + 1, end - begin - 1));
  for (std::string choice; std::getline(list, choice, ',');) choices.push_back(choice);
  return choices;
}

FlagInfo flag_info(const CLI::Option& option) {
  FlagInfo flag;
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  if (option.get_positional()) flag.positional = option.get_name(true);
  if (option.get_items_expected_max() > 0) {
    const std::string type = option.get_type_name();
    flag.type = type.substr(0, type.find_first_of(":{[ "));
    if (flag.type.empty()) flag.type = "VALUE";
    flag.choices = choices_of(type);
    flag.initial = option.get_default_str();
  }
  flag.environment = option.get_envname();
  flag.help = option.get_description();
  flag.group = option.get_group();
  flag.required = option.get_required();
  return flag;
}

void add_subcommand_info(const CLI::App& app, const std::string& path, std::vector<SubcommandInfo>& tree) {
  SubcommandInfo subcommand;
  subcommand.path = path;
  subcommand.help = app.get_description();
  for (const CLI::Option* option : app.get_options())
    if (!option->get_group().empty()) subcommand.flags.push_back(flag_info(*option));
  const auto shown = [](const CLI::App* sub) { return !sub->get_group().empty(); };
  const auto subs = app.get_subcommands(shown);
  for (const CLI::App* sub : subs) subcommand.subcommands.push_back(sub->get_name());
  tree.push_back(std::move(subcommand));
  for (const CLI::App* sub : subs)
    add_subcommand_info(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name(), tree);
}

}  // namespace

std::vector<SubcommandInfo> command_tree(const CLI::App& app) {
  std::vector<SubcommandInfo> tree;
  add_subcommand_info(app, "", tree);
  return tree;
}

}  // namespace fp4moe
