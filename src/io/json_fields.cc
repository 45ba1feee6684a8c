#include "io/json_fields.h"

#include <cmath>
#include <utility>

namespace fp4moe {
namespace {

std::string number_text(double x) { return Json(x).dump(); }

std::string range_text(JsonFields::IntRange legal) {
  return "whole numbers from " + std::to_string(legal.min) + " to " + std::to_string(legal.max);
}

bool is_int_in(const Json& value, JsonFields::IntRange legal) {
  if (value.is_number_unsigned())
    return value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX) && value.get<int64_t>() >= legal.min &&
           value.get<int64_t>() <= legal.max;
  return value.is_number_integer() && value.get<int64_t>() >= legal.min && value.get<int64_t>() <= legal.max;
}

}  // namespace

JsonFields::JsonFields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
  require(object.is_object(), "is not a JSON object");
}

const Json* JsonFields::find(const char* key) const {
  if (!object_.is_object()) return nullptr;
  const auto at = object_.find(key);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

void JsonFields::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

void JsonFields::require(bool condition, const std::string& problem) {
  if (!condition) fail(invalid_argument(where_ + ": " + problem));
}

void JsonFields::wrong(const char* key, const Json& value, const std::string& legal) {
  fail(invalid_argument(where_ + ": " + key + " = " + json_brief(value) + "; legal: " + legal));
}

void JsonFields::read_int(const char* key, int64_t& value, IntRange legal) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return;
  if (!is_int_in(*json, legal)) return wrong(key, *json, range_text(legal));
  value = json->get<int64_t>();
}

void JsonFields::read_ints(const char* key, std::vector<int64_t>& values, IntRange legal) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return;
  const Json list = json->is_array() ? *json : Json::array({*json});
  values.clear();
  for (const Json& value : list) {
    if (!is_int_in(value, legal)) return wrong(key, value, range_text(legal));
    values.push_back(value.get<int64_t>());
  }
}

void JsonFields::read_real(const char* key, double& value, RealRange legal) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return;
  const double number = json->is_number() ? json->get<double>() : NAN;
  if (!(number >= legal.min && number <= legal.max))  // also rejects NaN
    return wrong(key, *json, "numbers from " + number_text(legal.min) + " to " + number_text(legal.max));
  value = number;
}

void JsonFields::read_bool(const char* key, bool& value) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return;
  if (!json->is_boolean()) return wrong(key, *json, "true, false");
  value = json->get<bool>();
}

void JsonFields::read_string(const char* key, std::string& value) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return;
  if (!json->is_string()) return wrong(key, *json, "a string");
  value = json->get_ref<const std::string&>();
}

void JsonFields::read_strings(const char* key, std::vector<std::string>& values) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return;
  if (!json->is_array()) return wrong(key, *json, "an array of strings");
  values.clear();
  for (const Json& value : *json) {
    if (!value.is_string()) return wrong(key, value, "an array of strings");
    values.push_back(value.get_ref<const std::string&>());
  }
}

const Json* JsonFields::object(const char* key) {
  const Json* json = find(key);
  if (json == nullptr || !status_.ok()) return nullptr;
  if (json->is_object()) return json;
  wrong(key, *json, "an object");
  return nullptr;
}

}  // namespace fp4moe
