// ModulePatterns: patterns of module names (names_module() in quant_config.h).
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fp4moe {

// A declaration can list each of tens of thousands of modules. Full names are found by hash, and only other
// patterns are matched one by one.
class ModulePatterns {
 public:
  ModulePatterns() = default;
  ModulePatterns(std::initializer_list<std::string> patterns) {
    for (const std::string& pattern : patterns) push_back(pattern);
  }
  void push_back(std::string pattern);
  void append(std::span<const std::string> patterns) {
    for (const std::string& pattern : patterns) push_back(pattern);
  }
  void clear() { *this = {}; }

  bool empty() const { return all_.empty(); }
  const std::vector<std::string>& all() const { return all_; }  // in the order of the declaration
  // Whether names_module() holds for any of them; `stored`: the module's stored name.
  bool name(std::string_view stored) const;

 private:
  bool has_full_name(std::string_view module) const;
  std::vector<std::string> all_, others_;       // others_: those that are not in full_names_
  std::unordered_set<std::string> full_names_;  // text_model_name() of patterns without special characters
};

}  // namespace fp4moe
