#include <algorithm>
#include <array>
#include <vector>

#include "io/config/quant_config.h"
#include "io/tokenizer/split_pattern.h"

namespace fp4moe {
namespace {

constexpr std::array<std::string_view, 4> kFusedParts = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
                                                         "kv_b_proj"};

// Matches like fnmatch, but supports only `*` (which also matches dots) and `?`.
bool glob(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string without_language_model(std::string_view name) {
  constexpr std::string_view kOuter = "language_model.", kInner = "model.language_model.";
  if (name.starts_with(kOuter)) return std::string(name.substr(kOuter.size()));
  if (name.starts_with(kInner)) return "model." + std::string(name.substr(kInner.size()));
  return std::string(name);
}

bool regex_matches(const std::string& regex, const std::string& module) {
  const Result<SplitPattern> pattern = SplitPattern::compile("\\A(?:" + regex + ")");
  std::vector<SplitPattern::Range> matches;
  return pattern.ok() && pattern->find_all(module, &matches).ok() && !matches.empty();
}

// Returns the name up to its last dot (empty if it has no dot), and the rest.
std::pair<std::string_view, std::string_view> split_last(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {{}, name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

bool is_part_of_fused(std::string_view pattern, std::string_view module) {
  const auto [pattern_parent, part] = split_last(pattern);
  const auto [module_parent, fused] = split_last(module);
  return std::find(kFusedParts.begin(), kFusedParts.end(), part) != kFusedParts.end() &&
         fused.find(part) != std::string_view::npos && glob(pattern_parent, module_parent);
}

}  // namespace

bool names_module(const std::string& pattern, std::string_view module) {
  const std::string name = without_language_model(module);
  if (pattern.starts_with("re:")) {
    const std::string regex = pattern.substr(3);
    return regex_matches(regex, name) || (name != module && regex_matches(regex, std::string(module)));
  }
  const std::string wanted = without_language_model(pattern);
  const bool is_part = wanted.find('.') == std::string::npos;
  for (size_t begin = 0, end = 0; end < name.size(); begin = end + 1) {
    end = std::min(name.find('.', begin), name.size());
    if (glob(wanted, std::string_view(name).substr(0, end))) return true;
    if (is_part && glob(wanted, std::string_view(name).substr(begin, end - begin))) return true;
  }
  return is_part_of_fused(wanted, name);
}

bool is_excluded(const QuantConfig& quant, std::string_view module) {
  const auto names = [&](const std::string& pattern) { return names_module(pattern, module); };
  if (quant.method == QuantMethod::kNone) return true;
  if (std::any_of(quant.exclude_modules.begin(), quant.exclude_modules.end(), names)) return true;
  return !quant.include_modules.empty() &&
         std::none_of(quant.include_modules.begin(), quant.include_modules.end(), names);
}

bool is_declared_fp8(const QuantConfig& quant, std::string_view module) {
  const auto names = [&](const std::string& pattern) { return names_module(pattern, module); };
  if (std::any_of(quant.exclude_modules.begin(), quant.exclude_modules.end(), names)) return false;
  if (std::any_of(quant.fp8_modules.begin(), quant.fp8_modules.end(), names)) return true;
  const auto linear = std::find(quant.fp8_modules.begin(), quant.fp8_modules.end(), "Linear");
  return linear != quant.fp8_modules.end() && module != "lm_head" && is_excluded(quant, module);
}

}  // namespace fp4moe
