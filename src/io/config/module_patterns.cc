#include <algorithm>
#include <array>
#include <vector>

#include "io/config/module_patterns.h"
#include "io/config/quant_config.h"
#include "io/config/tensor_names.h"
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
  const std::string name = text_model_name(module);
  if (pattern.starts_with("re:")) {
    const std::string regex = pattern.substr(3);
    return regex_matches(regex, name) || (name != module && regex_matches(regex, std::string(module)));
  }
  const std::string wanted = text_model_name(pattern);
  const bool is_part = wanted.find('.') == std::string::npos;
  const auto matches = [&](std::string_view full) {
    for (size_t begin = 0, end = 0; end < full.size(); begin = end + 1) {
      end = std::min(full.find('.', begin), full.size());
      if (glob(wanted, full.substr(0, end))) return true;
      if (is_part && glob(wanted, full.substr(begin, end - begin))) return true;
    }
    return false;
  };
  return matches(name) || (name != module && matches(module)) || is_part_of_fused(wanted, name);
}

void ModulePatterns::push_back(std::string pattern) {
  const bool has_special = pattern.starts_with("re:") || pattern.find_first_of("*?") != std::string::npos;
  const std::string name = text_model_name(pattern);
  const std::string_view part = split_last(name).second;
  const bool is_full = !has_special && name.find('.') != std::string::npos &&
                       std::find(kFusedParts.begin(), kFusedParts.end(), part) == kFusedParts.end();
  if (is_full)
    full_names_.insert(name);
  else
    others_.push_back(pattern);
  all_.push_back(std::move(pattern));
}

// Looks for the module and its parents.
bool ModulePatterns::has_full_name(std::string_view module) const {
  for (size_t end = module.size(); end != std::string_view::npos && end > 0; end = module.rfind('.', end - 1))
    if (full_names_.contains(std::string(module.substr(0, end)))) return true;
  return false;
}

bool ModulePatterns::name(std::string_view stored) const {
  if (!full_names_.empty()) {
    const std::string of_text_model = text_model_name(stored);
    if (has_full_name(of_text_model) || (of_text_model != stored && has_full_name(stored))) return true;
  }
  return std::ranges::any_of(others_,
                             [&](const std::string& pattern) { return names_module(pattern, stored); });
}

bool is_excluded(const QuantConfig& quant, std::string_view module) {
  if (quant.method == QuantMethod::kNone) return true;
  const std::string stored = stored_name(quant.text_prefix, module, quant.mtp_layer);
  return quant.exclude_modules.name(stored) ||
         (!quant.include_modules.empty() && !quant.include_modules.name(stored));
}

bool is_declared_fp4(const QuantConfig& quant, std::string_view module) {
  return !quant.include_modules.empty() && !is_excluded(quant, module);
}

bool is_declared_fp8(const QuantConfig& quant, std::string_view module) {
  const std::string stored = stored_name(quant.text_prefix, module, quant.mtp_layer);
  if (quant.exclude_modules.name(stored)) return false;
  if (quant.fp8_modules.name(stored)) return true;
  const std::vector<std::string>& fp8 = quant.fp8_modules.all();
  return std::find(fp8.begin(), fp8.end(), "Linear") != fp8.end() && module != "lm_head" &&
         is_excluded(quant, module);
}

}  // namespace fp4moe
