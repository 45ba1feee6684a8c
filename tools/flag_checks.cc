#include "flag_checks.h"

#include <algorithm>
#include <cctype>

namespace fp4moe {

namespace {

// Removes leading zeros, which CLI11 takes for the sign of an octal number.
std::string to_decimal(std::string& text) {
  const bool has_sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  const std::string digits = text.substr(has_sign ? 1 : 0);
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  if (digits.empty() || !std::all_of(digits.begin(), digits.end(), is_digit))
    return "'" + text + "' must be a decimal integer";
  const size_t first = std::min(digits.find_first_not_of('0'), digits.size() - 1);
  text = (text[0] == '-' ? "-" : "") + digits.substr(first);
  return "";
}

}  // namespace

CLI::Validator not_negative() {
  const auto check = [](std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value);
    return is_number && value >= 0 ? std::string() : "Value " + text + " must be at least 0";
  };
  return CLI::Validator(check, "");
}

void require_decimal_integers(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type.starts_with("INT") || type.starts_with("UINT"))
      option->transform(CLI::Validator(to_decimal, ""));  // before the other checks
  }
  for (CLI::App* subcommand : app.get_subcommands({})) require_decimal_integers(*subcommand);
}

}  // namespace fp4moe
