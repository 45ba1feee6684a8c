// Pieces that parsers of tool calls share. Only for this folder's .cc files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/chat/output_parser.h"

namespace fp4moe {

inline constexpr std::string_view kCallSpace = " \t\r\n";

// `text` without white space at both ends.
std::string_view trimmed(std::string_view text);
// Whether `name` can be a function's name: letters, digits, '_', '-' and '.'.
bool is_function_name(std::string_view name);

// The content around calls; white space before and after a call is dropped.
class ContentBesideCalls {
 public:
  void push(std::string_view text, OutputParts& parts);
  void begin_call();
  void finish(OutputParts& parts);

 private:
  std::string held_;  // white space
  bool skips_space_ = false;
};

// Text that arrives in pieces and is cut at markers.
class MarkedText {
 public:
  void push(std::string_view text) { held_ += text; }
  // Moves the text up to the next of `markers` to `text`, drops the marker and returns its index; -1: none
  // found, and `text` is the part that cannot belong to a marker.
  int next(const std::vector<std::string_view>& markers, std::string& text);
  // Returns and forgets the rest, which is the beginning of a marker or empty.
  std::string take_rest();

 private:
  std::string held_;
};

}  // namespace fp4moe
