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

// How values are completed.
enum class Values { kFlag, kChoices, kFiles, kFolders, kOther };
Values values_of(const FlagInfo& flag) {
  if (!flag.choices.empty()) return Values::kChoices;
  return flag.type.empty()       ? Values::kFlag
         : flag.type == "FILE"   ? Values::kFiles
         : flag.type == "FOLDER" ? Values::kFolders
                                 : Values::kOther;
}

// The subcommand's first positional argument, or nullptr. All positional arguments of one subcommand are
// completed alike.
const FlagInfo* positional_of(const SubcommandInfo& subcommand) {
  for (const FlagInfo& flag : subcommand.flags)
    if (!flag.positional.empty()) return &flag;
  return nullptr;
}

// What a bash script assigns to complete the flag's value.
std::string bash_values(const FlagInfo& flag) {
  switch (values_of(flag)) {
    case Values::kChoices:
      return "words='" + join(flag.choices) + "'";
    case Values::kFiles:
      return "paths=-f";
    case Values::kFolders:
      return "paths=-d";
    default:
      return "paths=none";
  }
}

// The action of zsh's _arguments that completes the flag's value.
std::string zsh_action(const FlagInfo& flag) {
  switch (values_of(flag)) {
    case Values::kChoices:
      return "(" + join(flag.choices) + ")";
    case Values::kFiles:
      return "_files";
    case Values::kFolders:
      return "_files -/";
    default:
      return " ";
  }
}

// The options of fish's complete for the flag's value, or for a positional argument.
std::string fish_values(const FlagInfo& flag) {
  switch (values_of(flag)) {
    case Values::kFlag:
      return "";
    case Values::kChoices:
      return " -x -a " + quoted(join(flag.choices), "\\'");
    case Values::kFiles:
      return " -r -F";
    case Values::kFolders:
      return " -x -a '(__fish_complete_directories)'";
    case Values::kOther:
      return " -x";
  }
  return "";
}

}  // namespace

std::string bash_completion(const std::vector<SubcommandInfo>& tree) {
  std::string cases, values, positionals, parents;
  for (const SubcommandInfo& subcommand : tree) {
    std::vector<std::string> words = subcommand.subcommands;
    for (const FlagInfo& flag : subcommand.flags) {
      words.insert(words.end(), flag.names.begin(), flag.names.end());
      if (values_of(flag) == Values::kFlag) continue;
      for (const std::string& name : flag.names)
        values += "    '" + subcommand.path + " " + name + "') " + bash_values(flag) + " ;;\n";
    }
    cases += "    '" + subcommand.path + "') words='" + join(words) + "' ;;\n";
    if (const FlagInfo* argument = positional_of(subcommand))
      positionals += "    '" + subcommand.path + "') " + bash_values(*argument) + " ;;\n";
    if (!subcommand.subcommands.empty() && !subcommand.path.empty())
      parents += (parents.empty() ? "" : "|") + subcommand.path;
  }
  return R"(# bash completion of fp4moe
_fp4moe() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} subcommand='' words='' paths=''
  if [ "$current" = = ]; then current=''; fi
  if [ "$previous" = = ]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi
  [ "$COMP_CWORD" -gt 1 ] && subcommand=${COMP_WORDS[1]}
  case "$subcommand" in
    )" + parents +
         R"() [ "$COMP_CWORD" -gt 2 ] && subcommand="$subcommand ${COMP_WORDS[2]}" ;;
  esac
  case "$subcommand $previous" in
)" + values +
         R"(  esac
  if [ -z "$words$paths" ] && [[ "$current" != -* ]]; then
    case "$subcommand" in
)" + positionals +
         R"(    esac
  fi
  if [ -z "$words$paths" ]; then
    case "$subcommand" in
)" + cases +
         R"(    esac
  fi
  COMPREPLY=()
  case "$paths" in
    none) ;;
    -*) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen "$paths" -- "$current") ;;
    *) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current") ;;
  esac
}
complete -F _fp4moe fp4moe
)";
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
      const std::string value = flag.type.empty() ? "" : ":" + zsh_text(flag.type) + ":" + zsh_action(flag);
      for (const std::string& name : flag.names)
        text += " \\\n      " + quoted(name + "[" + zsh_text(flag.help) + "]" + value, "'\\''");
    }
    if (const FlagInfo* argument = positional_of(subcommand))
      text += " \\\n      " + quoted("*:" + argument->positional + ":" + zsh_action(*argument), "'\\''");
    text += "\n    ;;\n";
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
    if (const FlagInfo* argument = positional_of(subcommand)) text += head + fish_values(*argument) + "\n";
    for (const FlagInfo& flag : subcommand.flags) {
      if (flag.names.empty()) continue;
      text += head;
      for (const std::string& name : flag.names)
        text += name.rfind("--", 0) == 0 ? " -l " + name.substr(2) : " -s " + name.substr(1);
      text += fish_values(flag) + " -d " + quoted(flag.help, "\\'") + "\n";
    }
  }
  return text;
}

}  // namespace fp4moe
