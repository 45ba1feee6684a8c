#include "io/json_document.h"

#include <cstdint>
#include <set>
#include <vector>

namespace fp4moe {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr int64_t kMaxValues = int64_t{1} << 24;

// Walks the text without building anything, so that a hostile file is refused before memory is spent on it.
class Checker : public nlohmann::json_sax<Json> {
 public:
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
    return keys_.back().insert(name).second || fail("key '" + name + "' appears twice in one object");
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
    return ++num_values_ <= kMaxValues || fail("more than " + std::to_string(kMaxValues) + " values");
  }
  bool open() {
    keys_.emplace_back();
    if (keys_.size() > kMaxDepth) return fail("nested deeper than " + std::to_string(kMaxDepth));
    return count();
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the objects (arrays: empty) that are open
  int64_t num_values_ = 0;
  std::string problem_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, const std::string& what) {
  Checker checker;
  if (!Json::sax_parse(text, &checker)) return data_loss(what + ": " + checker.problem());
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string json_brief(const Json& value) {
  constexpr size_t kMaxBytes = 60;
  if (value.is_structured() && value.size() > kMaxBytes)
    return std::string(value.type_name()) + " of " + std::to_string(value.size()) + " values";
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "...";
  return text;
}

}  // namespace fp4moe
