#include "config_file.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "unknown_names.h"

namespace fp4moe {

namespace {

class YamlLines : public CLI::ConfigBase {
 public:
  YamlLines() { valueSeparator(':'); }
};

std::string config_path(int argc, char** argv) {
  const std::string flag = "--config";
  const char* const variable = std::getenv("FP4MOE_CONFIG");
  std::string path = variable == nullptr ? "" : variable;
  for (int i = 2; i < argc; ++i) {  // the last value wins, as for every flag
    const std::string arg = argv[i];
    if (arg == flag && i + 1 < argc) path = argv[i + 1];
    if (arg.rfind(flag + "=", 0) == 0) path = arg.substr(flag.size() + 1);
  }
  return path;
}

Result<std::vector<CLI::ConfigItem>> read_items(const std::string& path) {
  const std::string extension = std::filesystem::path(path).extension();
  const bool is_yaml = extension == ".yaml" || extension == ".yml";
  try {
    return is_yaml ? YamlLines().from_file(path) : CLI::ConfigTOML().from_file(path);
  } catch (const CLI::Error& error) {
    return not_found("--config " + path + ": " + error.what());
  }
}

// Joins values into one string that CLI11 splits again: with the flag's delimiter, or as "[a,b]".
std::string one_string(const CLI::Option& flag, const std::vector<std::string>& values) {
  const char delimiter = flag.get_delimiter();
  std::string text;
  for (const std::string& value : values)
    text += (text.empty() ? "" : std::string(1, delimiter == '\0' ? ',' : delimiter)) + value;
  return values.size() < 2 || delimiter != '\0' ? text : "[" + text + "]";
}

CLI::App* find_subcommand(CLI::App& app, const std::string& name) {
  for (CLI::App* subcommand : app.get_subcommands([&](CLI::App* v) { return v->get_name() == name; }))
    return subcommand;
  return nullptr;
}

// Returns the subcommand's flag for a key, or nullptr.
CLI::Option* find_flag(const CLI::App& subcommand, const CLI::ConfigItem& item) {
  std::string name = item.name;
  std::replace(name.begin(), name.end(), '_', '-');
  const bool nested =
      !item.parents.empty() && item.parents != std::vector<std::string>{subcommand.get_name()};
  if (nested || name == "config") return nullptr;
  for (const CLI::Option* option : subcommand.get_options()) {
    const std::vector<std::string>& names = option->get_lnames();
    if (option->get_configurable() && std::find(names.begin(), names.end(), name) != names.end())
      return const_cast<CLI::App&>(subcommand).get_option_no_throw("--" + name);
  }
  return nullptr;
}

}  // namespace

std::string environment_name(const std::string& names) {
  const size_t first = names.find("--");
  std::string env = "FP4MOE_";
  for (const char c : names.substr(first + 2, names.find(',', first) - first - 2))
    env += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return env;
}

void add_environment_names(CLI::App& subcommand) {
  for (CLI::Option* option :
       subcommand.get_options([](CLI::Option* o) { return o->get_envname().empty(); })) {
    if (option->get_lnames().empty() || !option->get_configurable()) continue;
    option->envname(environment_name("--" + option->get_lnames().front()));
  }
}

// Sets the environment variables of the keys' flags unless they are already set, so that the environment and
// the command line take precedence.
Status apply_config_file(CLI::App& app, int argc, char** argv, VariableSources& sources) {
  CLI::App* subcommand = find_subcommand(app, argc < 2 ? "" : argv[1]);
  if (subcommand == nullptr || subcommand->get_option_no_throw("--config") == nullptr) return {};
  const std::string path = config_path(argc, argv);
  if (path.empty()) return {};
  const auto items = read_items(path);
  if (!items.ok()) return items.status();
  std::map<const CLI::Option*, std::vector<std::string>> values;
  for (const CLI::ConfigItem& item : *items) {
    if (item.name == "++" || item.name == "--") continue;  // CLI11's section markers
    const CLI::Option* flag = find_flag(*subcommand, item);
    if (flag == nullptr)
      return invalid_argument("--config " + path + ": '" + item.fullname() + "' is not a flag of fp4moe " +
                              subcommand->get_name() + unknown_flag_hint(*subcommand, "--" + item.name) +
                              "; see `fp4moe " + subcommand->get_name() + " --help-all`");
    std::vector<std::string>& inputs = values[flag];
    inputs.insert(inputs.end(), item.inputs.begin(), item.inputs.end());
    const bool is_list = flag->get_items_expected_max() > 1;
    if (!is_list && inputs.size() > 1) inputs = {inputs.back()};
  }
  for (const auto& [flag, inputs] : values) {
    const std::string& name = flag->get_envname();
    if (std::getenv(name.c_str()) != nullptr) continue;
    setenv(name.c_str(), one_string(*flag, inputs).c_str(), /*overwrite=*/0);
    sources[name] = path;
  }
  return {};
}

std::string with_value_source(const CLI::App& subcommand, const std::string& text,
                              const std::vector<std::string>& args, const VariableSources& sources) {
  for (const CLI::Option* option : subcommand.get_options()) {
    const std::string name = option->get_name(), &variable = option->get_envname();
    const size_t at = text.find(name), end = at + name.size();
    const bool is_named =
        at != std::string::npos && (end == text.size() || text[end] == ':' || text[end] == ' ');
    if (!is_named || variable.empty() || std::getenv(variable.c_str()) == nullptr) continue;
    const auto is_given = [option](const std::string& arg) {
      return arg.rfind('-', 0) == 0 && option->check_name(arg.substr(0, arg.find('=')));
    };
    if (std::any_of(args.begin(), args.end(), is_given)) continue;
    const auto source = sources.find(variable);
    if (source != sources.end()) return "--config " + source->second + ": " + text;
    return text.substr(0, at) + variable + text.substr(end);
  }
  return text;
}

}  // namespace fp4moe
