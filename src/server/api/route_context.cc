#include "server/api/route_context.h"

#include <algorithm>

namespace fp4moe {

namespace {

constexpr size_t kMaxShownModel = 80;  // bytes shown of a name that a client sent

}  // namespace

HttpResponse json_response(const json& value) {
  HttpResponse response;
  response.body = to_text(value);
  return response;
}

std::vector<std::string> served_names(const ModelInfo& info) {
  std::vector<std::string> names = {info.name};
  for (const std::string& alias : info.aliases)
    if (std::find(names.begin(), names.end(), alias) == names.end()) names.push_back(alias);
  return names;
}

Status unknown_model(const ModelInfo& info, const std::string& name) {
  const std::vector<std::string> names = served_names(info);
  std::string list;
  for (const std::string& served : names) list += (list.empty() ? "\"" : ", \"") + served + "\"";
  return not_found("\"" + name.substr(0, kMaxShownModel) + "\" is not served here; " +
                   (names.size() == 1 ? "the served model is " : "the served models are ") + list);
}

void check_model(const ModelInfo& info, const ServerConfig& config, Fields& fields) {
  const std::string model = fields.string("model", "");
  if (config.accept_any_model_name || model.empty() || model == info.path || model == "default") return;
  const std::vector<std::string> names = served_names(info);
  if (std::find(names.begin(), names.end(), model) == names.end())
    fields.fail("model", unknown_model(info, model));
}

}  // namespace fp4moe
