// fp4moe completion SHELL, and the hidden fp4moe manual, which writes the man pages and completion scripts
// that an installation contains, or prints docs/flags.md.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include "command_tree.h"
#include "subcommand.h"

namespace fp4moe {

namespace {

std::string script(const std::string& shell, const std::vector<SubcommandInfo>& tree) {
  return shell == "bash"  ? bash_completion(tree)
         : shell == "zsh" ? zsh_completion(tree)
                          : fish_completion(tree);
}

Status write_file(const std::filesystem::path& path, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  std::ofstream file(path);
  file << text << std::flush;
  return file ? Status() : unavailable(path.string() + " cannot be written");
}

// Writes man pages and completion scripts into subfolders laid out as in /usr/share.
Status write_all(const std::filesystem::path& folder, const std::vector<SubcommandInfo>& tree) {
  std::vector<std::pair<std::string, std::string>> files = {
      {"bash-completion/completions/fp4moe", bash_completion(tree)},
      {"zsh/site-functions/_fp4moe", zsh_completion(tree)},
      {"fish/vendor_completions.d/fp4moe.fish", fish_completion(tree)}};
  for (const SubcommandInfo& subcommand : tree) {
    std::string name = subcommand.path.empty() ? "fp4moe" : "fp4moe-" + subcommand.path;
    std::replace(name.begin(), name.end(), ' ', '-');
    files.emplace_back("man/man1/" + name + ".1", man_page(tree, subcommand));
  }
  for (const auto& [name, text] : files) {
    if (Status status = write_file(folder / name, text); !status.ok()) return status;
  }
  return {};
}

}  // namespace

void add_completion(CLI::App& app, int& exit_code) {
  auto argument = std::make_shared<std::string>();
  CLI::App* subcommand = app.add_subcommand("completion", "Print a shell's completion script");
  subcommand
      ->add_option("shell", *argument,
                   "the shell; to use the script in bash: source <(fp4moe completion bash)")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  subcommand->callback(
      [&app, argument] { std::fputs(script(*argument, command_tree(app)).c_str(), stdout); });
  CLI::App* manual = app.add_subcommand("manual", "Write man pages and completion scripts")->group("");
  auto markdown = std::make_shared<bool>(false);
  CLI::Option* folder =
      manual->add_option("folder", *argument, "folder to write to, laid out like /usr/share")
          ->type_name("FOLDER");
  manual->add_flag("--markdown", *markdown, "print docs/flags.md instead")->excludes(folder);
  manual->require_option(1);
  manual->callback([&app, argument, markdown, &exit_code] {
    if (*markdown) {
      std::fputs(flags_document(command_tree(app)).c_str(), stdout);
      return;
    }
    const Status status = write_all(*argument, command_tree(app));
    if (!status.ok()) exit_code = report_error(status);
  });
}

}  // namespace fp4moe
