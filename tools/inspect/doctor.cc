// fp4moe doctor: reports problems with this machine, and with serving a model on it, and suggests fixes.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "flag_checks.h"
#include "inspect/doctor_checks.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

struct DoctorFlags {
  std::string model;
  int port = 30000;
  bool json = false;
};

nlohmann::ordered_json to_json(const std::vector<Check>& checks) {
  auto list = nlohmann::ordered_json::array();
  for (const Check& c : checks)
    list.push_back({{"name", c.name}, {"level", level_name(c.level)}, {"detail", c.detail}, {"fix", c.fix}});
  return {{"version", FP4MOE_VERSION}, {"checks", list}};
}

void print(const std::vector<Check>& checks) {
  for (const Check& c : checks) {
    std::printf("%-4s  %-13s  %s\n", level_name(c.level), c.name.c_str(), c.detail.c_str());
    if (!c.fix.empty()) std::printf("%21s  fix: %s\n", "", c.fix.c_str());
  }
}

int run_doctor(const DoctorFlags& flags) {
  std::vector<Check> checks = judge(gather_facts(flags.port));
  if (!flags.model.empty())
    for (Check& check : check_model(flags.model)) checks.push_back(std::move(check));
  if (flags.json)
    std::printf("%s\n",
                to_json(checks).dump(1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  else
    print(checks);
  for (const Check& check : checks)
    if (check.level == CheckLevel::kFail) return 1;
  return kExitOk;
}

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  CLI::App& subcommand =
      *app.add_subcommand("doctor", "Check this machine, and optionally a model on it, and suggest fixes");
  const auto flags = std::make_shared<DoctorFlags>();
  subcommand.add_option("--model", flags->model, "checkpoint folder to check, or a repository id")
      ->type_name("FOLDER");
  add_revision_flag(subcommand, flags->model, nullptr);
  subcommand.add_option("--port", flags->port, "port that the server would listen on")
      ->check(in_range(1, 65535))
      ->capture_default_str();
  subcommand.add_flag("--json", flags->json, "print JSON, for programs and bug reports");
  subcommand.callback([flags, &exit_code] { exit_code = run_doctor(*flags); });
}

}  // namespace fp4moe
