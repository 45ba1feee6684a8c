#include "help_text.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "command_tree.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxLines = 40, kMaxColumns = 100, kIndent = 30;

// The flags of large subcommands that --help shows, by their first name. Flags of the group "Options" are
// always shown.
constexpr std::string_view kMainFlags[] = {
    "--served-model-name",
    "--chat-template",
    "--context-length",
    "--moe-runner-backend",
    "--moe-a2a-backend",
    "--fp4-compute",
    "--tp-size",
    "--ep-size",
    "--dp-size",
    "--device",
    "--threads",
    "--mem-fraction-static",
    "--max-total-tokens",
    "--max-running-requests",
    "--chunked-prefill-size",
    "--disable-radix-cache",
    "--host",
    "--port",
    "--api-key-file",
    "--log-level",
    "--log-requests",
};

bool is_main(const FlagInfo& flag) {
  return flag.group == "Options" || !flag.positional.empty() ||
         std::find(std::begin(kMainFlags), std::end(kMainFlags), flag.names.front()) != std::end(kMainFlags);
}

// "-n, --max-tokens INT": the first long name and a short one.
std::string head(const FlagInfo& flag) {
  std::string text = flag.positional;
  for (const std::string& name : flag.names)
    if (name.rfind("--", 0) != 0) text += (text.empty() ? "" : ", ") + name;
  if (!flag.names.empty() && flag.names.front().rfind("--", 0) == 0)
    text += (text.empty() ? "" : ", ") + flag.names.front();
  return flag.type.empty() || !flag.positional.empty() ? text : text + " " + flag.type;
}

// The first clause of the help, the choices unless it lists them or they are many, and the default. Defaults
// that stand for an automatic choice are explained in the rest of the help.
std::string summary(const FlagInfo& flag) {
  constexpr size_t kMaxChoices = 5;
  std::string text = flag.help.substr(0, flag.help.find("; ")), list;
  bool is_listed = true;
  for (const std::string& choice : flag.choices) {
    list += (list.empty() ? "" : ",") + choice;
    is_listed = is_listed && text.find(choice) != std::string::npos;
  }
  if (!is_listed && flag.choices.size() <= kMaxChoices) text += " {" + list + "}";
  const std::string& initial = flag.initial;
  return initial.empty() || initial == "0" || initial == "-1" || initial == "[]"
             ? text
             : text + " [" + initial + "]";
}

// Wraps words at kMaxColumns; further lines begin at kIndent.
std::string wrapped(const std::string& text) {
  std::string out, line = text;
  while (line.size() > kMaxColumns - kIndent) {
    const size_t space = line.rfind(' ', kMaxColumns - kIndent);
    if (space == std::string::npos) break;
    out += line.substr(0, space) + "\n" + std::string(kIndent, ' ');
    line.erase(0, space + 1);
  }
  return out + line + "\n";
}

std::string entry_of(const FlagInfo& flag) {
  std::string text = "  " + head(flag);
  text += text.size() < kIndent ? std::string(kIndent - text.size(), ' ') : "  ";
  return text + wrapped(summary(flag));
}

std::string entries(const std::vector<FlagInfo>& flags) {
  std::vector<std::string> groups;
  for (const FlagInfo& flag : flags)
    if (std::find(groups.begin(), groups.end(), flag.group) == groups.end()) groups.push_back(flag.group);
  std::string text;
  for (const std::string& group : groups) {
    if (groups.size() > 1) text += group + ":\n";
    for (const FlagInfo& flag : flags)
      if (flag.group == group) text += entry_of(flag);
  }
  return text;
}

}  // namespace

std::string HelpText::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  if (mode != CLI::AppFormatMode::Normal || !app->get_subcommands({}).empty())
    return CLI::Formatter::make_help(app, name, mode);
  const std::vector<FlagInfo> all = command_tree(*app).front().flags;
  std::vector<FlagInfo> main;
  std::copy_if(all.begin(), all.end(), std::back_inserter(main), is_main);
  const std::string top = app->get_description() + "\n" + make_usage(app, name), every = entries(all);
  if (std::count(every.begin(), every.end(), '\n') + 3 <= static_cast<int64_t>(kMaxLines)) return top + every;
  return top + entries(main) + "All " + std::to_string(all.size()) + " flags: " + name +
         " --help-all, or docs/flags.md\n";
}

}  // namespace fp4moe
