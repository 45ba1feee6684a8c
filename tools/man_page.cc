#include "command_tree.h"

namespace fp4moe {

namespace {

// Escapes text so that troff prints it literally.
std::string plain(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\n') {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out.empty() || (out[0] != '.' && out[0] != '\'') ? out : "\\&" + out;
}

std::string bold(const std::string& text) { return "\\fB" + plain(text) + "\\fR"; }

std::string page_name(const std::string& path) {
  std::string name = "fp4moe";
  if (!path.empty()) name += "-" + path;
  for (char& c : name) c = c == ' ' ? '-' : c;
  return name;
}

std::string entry(const FlagInfo& flag) {
  std::string head;
  for (const std::string& name : flag.names) head += (head.empty() ? "" : ", ") + bold(name);
  if (flag.names.empty()) head = "\\fI" + plain(flag.positional) + "\\fR";
  if (!flag.type.empty() && !flag.names.empty()) head += " \\fI" + plain(flag.type) + "\\fR";
  std::string text = ".TP\n" + head + "\n" + plain(flag.help);
  if (!flag.choices.empty()) {
    text += "\n.br\nOne of:";
    for (const std::string& choice : flag.choices) text += " " + bold(choice);
  }
  if (!flag.initial.empty()) text += "\n.br\nDefault: " + bold(flag.initial);
  if (!flag.environment.empty()) text += "\n.br\nEnvironment: " + bold(flag.environment);
  return text + "\n";
}

std::string synopsis(const SubcommandInfo& subcommand) {
  std::string text = bold("fp4moe" + (subcommand.path.empty() ? "" : " " + subcommand.path));
  if (!subcommand.subcommands.empty()) text += " \\fISUBCOMMAND\\fR";
  text += " [\\fIOPTIONS\\fR]";
  for (const FlagInfo& flag : subcommand.flags)
    if (!flag.positional.empty()) text += " \\fI" + plain(flag.positional) + "\\fR";
  return text;
}

}  // namespace

std::string man_page(const std::vector<SubcommandInfo>& tree, const SubcommandInfo& subcommand) {
  const std::string name = page_name(subcommand.path);
  std::string text = ".TH " + name + " 1 \"\" \"fp4moe " FP4MOE_VERSION "\"\n.SH NAME\n" + plain(name) +
                     " \\- " + plain(subcommand.help) + "\n.SH SYNOPSIS\n" + synopsis(subcommand) + "\n";
  if (!subcommand.subcommands.empty()) {
    text += ".SH SUBCOMMANDS\n";
    for (const SubcommandInfo& other : tree) {
      const bool is_below =
          !other.path.empty() &&
          other.path.rfind(' ') == (subcommand.path.empty() ? std::string::npos : subcommand.path.size());
      if (is_below && other.path.rfind(subcommand.path, 0) == 0)
        text += ".TP\n" + bold(page_name(other.path)) + "(1)\n" + plain(other.help) + "\n";
    }
  }
  std::string group;
  for (const FlagInfo& flag : subcommand.flags) {
    if (flag.group != group) text += ".SH " + plain(group = flag.group) + "\n";
    text += entry(flag);
  }
  return text +
         ".SH EXIT STATUS\n0: success. 2: invalid usage. 3: an unsupported model or combination. 4: does not "
         "fit in memory. 5: the self\\-test failed. 130: interrupted. 1: any other error.\n.SH SEE ALSO\n" +
         (subcommand.path.empty() ? "Each subcommand has a separate page.\n" : bold("fp4moe") + "(1)\n");
}

}  // namespace fp4moe
