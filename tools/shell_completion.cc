#include "command_tree.h"

namespace fp4moe {

namespace {

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// Single-quotes `text`.
std::string quoted(const std::string& text, const std::string& apostrophe) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? apostrophe : std::string(1, c);
  return out + "'";
}

// zsh interprets brackets and colons in a description.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

std::string bash_completion(const std::vector<SubcommandInfo>& tree) {
  std::string cases, values;
  for (const SubcommandInfo& subcommand : tree) {
    std::vector<std::string> words = subcommand.subcommands;
    for (const FlagInfo& flag : subcommand.flags) {
      words.insert(words.end(), flag.names.begin(), flag.names.end());
      if (flag.choices.empty() || flag.names.empty()) continue;
      for (const std::string& name : flag.names)
        values += "    '" + subcommand.path + " " + name + "') words='" + join(flag.choices) + "' ;;\n";
    }
    cases += "    '" + subcommand.path + "') words='" + join(words) + "' ;;\n";
  }
  std::string parents;
  for (const SubcommandInfo& subcommand : tree)
    if (!subcommand.subcommands.empty() && !subcommand.path.empty())
      parents += (parents.empty() ? "" : "|") + subcommand.path;
  return "# bash completion of fp4moe\n"
         "_fp4moe() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} subcommand='' "
         "words=''\n"
         "  [ \"$COMP_CWORD\" -gt 1 ] && subcommand=${COMP_WORDS[1]}\n"
         "  case \"$subcommand\" in\n"
         "    " +
         parents +
         ") [ \"$COMP_CWORD\" -gt 2 ] && subcommand=\"$subcommand ${COMP_WORDS[2]}\" ;;\n"
         "  esac\n"
         "  case \"$subcommand $previous\" in\n" +
         values +
         "  esac\n"
         "  if [ -n \"$words\" ]; then COMPREPLY=($(compgen -W \"$words\" -- \"$current\")); return; fi\n"
         "  case \"$subcommand\" in\n" +
         cases +
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "}\n"
         "complete -o default -F _fp4moe fp4moe\n";
}

std::string zsh_completion(const std::vector<SubcommandInfo>& tree) {
  std::string text =
      "#compdef fp4moe\nlocal subcommand=''\n(( CURRENT > 2 )) && subcommand=$words[2]\ncase $subcommand "
      "in\n";
  for (const SubcommandInfo& subcommand : tree)
    if (!subcommand.subcommands.empty() && !subcommand.path.empty())
      text += "  " + subcommand.path + ") (( CURRENT > 3 )) && subcommand=\"$subcommand $words[3]\" ;;\n";
  text += "esac\ncase $subcommand in\n";
  for (const SubcommandInfo& subcommand : tree) {
    text += "  " + quoted(subcommand.path, "'\\''") + ")\n";
    if (!subcommand.subcommands.empty()) {
      text += "    local -a subcommands=(" + join(subcommand.subcommands) +
              ")\n    _describe subcommand subcommands\n    ;;\n";
      continue;
    }
    text += "    _arguments";
    for (const FlagInfo& flag : subcommand.flags) {
      std::string value = flag.type.empty() ? "" : ":" + zsh_text(flag.type) + ":";
      if (!value.empty()) value += flag.choices.empty() ? "_files" : "(" + join(flag.choices) + ")";
      for (const std::string& name : flag.names)
        text += " \\\n      " + quoted(name + "[" + zsh_text(flag.help) + "]" + value, "'\\''");
    }
    text += " \\\n      '*:file:_files'\n    ;;\n";
  }
  return text + "esac\n";
}

std::string fish_completion(const std::vector<SubcommandInfo>& tree) {
  std::string text = "# fish completion of fp4moe\n";
  for (const SubcommandInfo& subcommand : tree) {
    const std::string last = subcommand.path.substr(subcommand.path.rfind(' ') + 1);
    const std::string when =
        subcommand.path.empty() ? "__fish_use_subcommand" : "__fish_seen_subcommand_from " + last;
    const std::string head = "complete -c fp4moe -n " + quoted(when, "\\'");
    if (!subcommand.subcommands.empty())
      text += head + " -f -a " + quoted(join(subcommand.subcommands), "\\'") + "\n";
    for (const FlagInfo& flag : subcommand.flags) {
      if (flag.names.empty()) continue;
      text += head;
      for (const std::string& name : flag.names)
        text += name.rfind("--", 0) == 0 ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!flag.type.empty()) text += " -r";
      if (!flag.choices.empty()) text += " -f -a " + quoted(join(flag.choices), "\\'");
      text += " -d " + quoted(flag.help, "\\'") + "\n";
    }
  }
  return text;
}

}  // namespace fp4moe
