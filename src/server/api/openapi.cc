#include "server/api/openapi.h"

#include <cmath>
#include <functional>

#include "server/api/apis.h"
#include "server/api/responses_api.h"

namespace fp4moe {

extern const char kOpenapiText[];

namespace {

constexpr double kMostExact = 9007199254740992.0;  // 2^53: larger JSON numbers are not exact

// A field's schema; null selects its default.
json schema_of(const FieldNote& note) {
  const json id = {{"type", "integer"}, {"minimum", 0}, {"maximum", 2147483647}};
  const json text = {{"type", "string"}};
  switch (note.kind) {
    case FieldNote::Kind::kAny:
      return json::object();
    case FieldNote::Kind::kBoolean:
      return {{"type", {"boolean", "null"}}};
    case FieldNote::Kind::kString:
      return {{"type", {"string", "null"}}};
    case FieldNote::Kind::kStrings:
      return {{"anyOf", {{{"type", "null"}}, text, {{"type", "array"}, {"items", text}}}}};
    case FieldNote::Kind::kIds:
      return {{"anyOf", {{{"type", "null"}}, id, {{"type", "array"}, {"items", id}}}}};
    case FieldNote::Kind::kInteger:
    case FieldNote::Kind::kNumber:
      break;
  }
  const bool whole = note.kind == FieldNote::Kind::kInteger;
  json schema = {{"type", {whole ? "integer" : "number", "null"}}};
  const auto bound = [whole](double value) {
    return whole ? json(static_cast<int64_t>(value)) : json(value);
  };
  if (std::abs(note.least) < kMostExact)
    schema[note.open_least ? "exclusiveMinimum" : "minimum"] = bound(note.least);
  if (std::abs(note.most) < kMostExact) schema["maximum"] = bound(note.most);
  return schema;
}

// The field's description in openapi.json takes precedence; "a.b" is property b of object a.
void add_field(json& schema, const FieldNote& note) {
  json* at = &schema;
  std::string name = note.name;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
    at = &(*at)["properties"][name.substr(0, dot)];
    if (!at->contains("type")) (*at)["type"] = {"object", "null"};
    name.erase(0, dot + 1);
  }
  json& field = (*at)["properties"][name];
  if (field.is_null()) field = json::object();
  if (field.contains("type") || field.contains("anyOf") || field.contains("$ref")) return;
  field.update(schema_of(note));
}

}  // namespace

json openapi_document(const Engine& engine) {
  ResponseStore no_responses(0);
  const ResponseAccess access{no_responses, "", [](int64_t) { return true; }};
  const struct {
    const char* schema;
    std::function<void(const Engine&, Fields&)> parse;
    json body;  // makes the parser read every field
  } requests[] = {
      {"ChatRequest",
       parse_chat,
       {{"messages", {{{"role", "user"}, {"content", "a"}}}}, {"stream_options", json::object()}}},
      {"ResponsesRequest",
       [&access](const Engine& e, Fields& fields) { parse_responses(e, access, fields); },
       {{"input", "a"},
        {"text", json::object()},
        {"reasoning", json::object()},
        {"stream_options", json::object()}}},
      {"CompletionRequest", parse_completion, {{"prompt", "a"}, {"stream_options", json::object()}}},
      {"MessagesRequest",
       parse_messages,
       {{"messages", {{{"role", "user"}, {"content", "a"}}}},
        {"max_tokens", 1},
        {"thinking", {{"type", "disabled"}}},
        {"tool_choice", {{"type", "auto"}}},
        {"output_config", json::object()}}},
      {"GenerateRequest", parse_generate, {{"text", "a"}, {"sampling_params", json::object()}}},
  };
  json document = json::parse(kOpenapiText);
  document["info"]["version"] = FP4MOE_VERSION;
  for (const auto& request : requests) {
    Fields fields(request.body);
    request.parse(engine, fields);
    json& schema = document["components"]["schemas"][request.schema];
    schema["properties"]["model"]["type"] = {"string", "null"};  // read outside the parsers, for all routes
    for (const FieldNote& note : fields.notes()) add_field(schema, note);
  }
  return document;
}

}  // namespace fp4moe
