#include "io/json_document.h"

#include <cstdint>
#include <set>
#include <vector>

#include "base/printable.h"

namespace fp4moe {
namespace {

constexpr size_t kShownBytes = 60;

// Scans the text without building anything, so that a hostile file is refused before it uses memory.
class Checker : public nlohmann::json_sax<Json> {
 public:
  explicit Checker(const JsonLimits& limits) : limits_(limits) {}
  const std::string& problem() const { return problem_; }

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool binary(binary_t&) override { return fail("binary value"); }
  bool start_object(size_t) override { return open(); }
  bool start_array(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (++num_keys_ > limits_.max_keys)
      return fail("more than " + std::to_string(limits_.max_keys) + " keys");
    return keys_.back().insert(name).second ||
           fail("key '" + printable(name, kShownBytes) + "' appears twice in one object");
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail("not valid JSON at byte " + std::to_string(position));
  }

 private:
  bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool count() {
    return ++num_values_ <= limits_.max_values ||
           fail("more than " + std::to_string(limits_.max_values) + " values");
  }
  bool open() {
    if (++num_containers_ > limits_.max_containers)
      return fail("more than " + std::to_string(limits_.max_containers) + " arrays and objects");
    keys_.emplace_back();
    if (keys_.size() > limits_.max_depth)
      return fail("nested deeper than " + std::to_string(limits_.max_depth));
    return count();
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // keys of the open objects (empty sets for arrays)
  const JsonLimits limits_;
  int64_t num_values_ = 0, num_containers_ = 0, num_keys_ = 0;
  std::string problem_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, const std::string& what, const JsonLimits& limits) {
  Checker checker(limits);
  if (!Json::sax_parse(text, &checker)) return data_loss(what + ": " + checker.problem());
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string json_brief(const Json& value) {
  if (value.is_structured() && value.size() > kShownBytes)
    return std::string(value.type_name()) + " of " + std::to_string(value.size()) + " values";
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return text;
}

}  // namespace fp4moe
