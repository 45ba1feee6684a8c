#include "unknown_names.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <numeric>

#include "command_tree.h"
#include "peer_flags.h"

namespace fp4moe {

namespace {

// Lower case, "-" for "_", without leading dashes and without "=value".
std::string plain_name(const std::string& name) {
  std::string out;
  for (const char c : name.substr(0, name.find('='))) {
    if (out.empty() && c == '-') continue;
    out += c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return out;
}

// The number of insertions, deletions, replacements and swaps of neighbours between `a` and `b`.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before, above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = above;
    above = row;
  }
  return above[b.size()];
}

std::vector<std::string> flag_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::string flag_of(const std::string& arg) { return arg.substr(0, arg.find('=')); }

bool looks_like_flag(const std::string& arg) {
  return arg.size() > 1 && arg[0] == '-' && std::isdigit(static_cast<unsigned char>(arg[1])) == 0 &&
         arg != "--";
}

// The unknown flags among `args`. CLI11 reads "-ngl" as -n with the value "gl", so it does not report it.
std::vector<std::string> unknown_flags(const CLI::App& app, const std::vector<std::string>& args) {
  std::vector<std::string> flags;
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  for (const std::string& arg : args) {
    const bool is_left = std::find(rest.begin(), rest.end(), arg) != rest.end();
    const bool is_short = arg.size() > 2 && arg[0] == '-' && arg[1] != '-' && is_peer_flag(arg);
    const std::string flag = flag_of(arg);
    if (looks_like_flag(arg) && (is_left || is_short) &&
        std::find(flags.begin(), flags.end(), flag) == flags.end())
      flags.push_back(flag);
  }
  return flags;
}

std::string subcommand_error(const CLI::App& app, const std::string& path, const std::string& given) {
  std::vector<std::string> names;
  std::string list;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App* v) { return !v->get_group().empty(); })) {
    names.push_back(sub->get_name());
    list += (list.empty() ? "" : ", ") + sub->get_name();
  }
  std::string text = "error: no subcommand of " + path + " given";
  if (!given.empty()) {
    text = "error: '" + given + "' is not a subcommand of " + path;
    std::string near = nearest_name(given, names);
    if (near.empty() && path == "fp4moe") near = peer_subcommand(given);
    if (!near.empty()) text += " (did you mean " + near + "?)";
  }
  return text + "; use one of: " + list + "\n";
}

}  // namespace

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
  constexpr size_t kMinPrefix = 4;
  const std::string word = plain_name(name);
  std::string best, only;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1, num_longer = 0;
  for (const std::string& candidate : known) {
    const std::string plain = plain_name(candidate);
    const size_t distance = edit_distance(word, plain);
    if (distance < least && distance < word.size()) {
      least = distance;
      best = candidate;
    }
    if (word.size() >= kMinPrefix && plain.rfind(word, 0) == 0) {
      ++num_longer;
      only = candidate;
    }
  }
  return best.empty() && num_longer == 1 ? only : best;
}

std::string unknown_flag_hint(const CLI::App& subcommand, const std::string& name) {
  const std::vector<std::string> known = flag_names(subcommand);
  const std::string hint = peer_flag_hint(name, known);
  if (!hint.empty()) return ": " + hint;
  const std::string near = name.rfind("--", 0) == 0 ? nearest_name(name, known) : "";
  return near.empty() ? "" : " (did you mean " + near + "?)";
}

std::vector<std::string> misspelt_variables(const CLI::App& subcommand) {
  constexpr std::string_view kPrefix = "FP4MOE_";
  std::vector<std::string> warnings;
  const std::vector<std::string> known = flag_names(subcommand);
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable = flag_of(*entry);
    if (variable.rfind(kPrefix, 0) != 0 ||
        !subcommand.get_options([&](const CLI::Option* option) { return option->get_envname() == variable; })
             .empty())
      continue;
    const std::string flag = nearest_name(variable.substr(kPrefix.size()), known);
    const CLI::Option* const option = flag.empty() ? nullptr : subcommand.get_option_no_throw(flag);
    if (option == nullptr || option->get_envname().empty()) continue;
    warnings.push_back("environment variable " + variable + " is not read (did you mean " +
                       option->get_envname() + "?)");
  }
  return warnings;
}

std::string usage_error(const CLI::App& app, const CLI::Error& error, const std::vector<std::string>& args,
                        const VariableSources& sources) {
  const CLI::App* chosen = &app;
  std::string path = "fp4moe";
  while (!chosen->get_subcommands().empty()) {
    chosen = chosen->get_subcommands().front();
    path += " " + chosen->get_name();
  }
  std::string text;
  for (const std::string& flag : unknown_flags(app, args))
    text += (text.empty() ? "error: " : "; ") + flag + " is not a flag of " + path +
            unknown_flag_hint(*chosen, flag);
  if (!text.empty()) return text + "; see `" + path + " --help-all`\n";
  if (!chosen->get_subcommands({}).empty()) {
    const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
    return subcommand_error(*chosen, path, rest.empty() ? "" : rest.front());
  }
  return "error: " + with_value_source(*chosen, error.what(), args, sources) + "; see `" + path +
         " --help`\n";
}

}  // namespace fp4moe
