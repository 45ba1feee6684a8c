// Checks of the numbers in flags. Their messages print integers without decimals, and only real limits.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>

namespace fp4moe {

// A number from `least` to `most`.
template <class T>
CLI::Validator in_range(T least, T most) {
  const auto check = [least, most](std::string& text) {
    T value{};
    const bool is_inside = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
    return is_inside ? std::string() : fmt::format("Value {} not in range {} to {}", text, least, most);
  };
  return CLI::Validator(check, "");
}

// A number that is at least 0.
CLI::Validator not_negative();

// Lets every flag of type INT or UINT accept only decimal integers, as SGLang does: CLI11 would read 010 as 8
// and 0x10 as 16. To be called when all flags of `app` and its subcommands are there.
void require_decimal_integers(CLI::App& app);

}  // namespace fp4moe
