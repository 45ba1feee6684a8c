#include "server/api/response_tools.h"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>

namespace fp4moe {

namespace {

// Tools of OpenAI's servers that this server does not have. A client does not notice: only the model could
// have used them. vLLM and llama-server ignore them too.
constexpr std::array<std::string_view, 5> kIgnored = {"image_generation", "web_search",
                                                      "web_search_2025_08_26", "web_search_preview",
                                                      "web_search_preview_2025_03_11"};

bool is_ignored(const json& tool) {
  if (!tool.is_object() || !tool.contains("type") || !tool["type"].is_string()) return false;
  return std::find(kIgnored.begin(), kIgnored.end(), tool["type"].get_ref<const std::string&>()) !=
         kIgnored.end();
}

class ToolReader {
 public:
  explicit ToolReader(ResponseTools& tools) : tools_(tools) {}

  // Reads a tool at `place` in the request. `space` is its namespace; empty: it is not in one.
  void read(Fields& fields, const json& tool, const std::string& place, const std::string& space) {
    Fields inner(tool, place + ".");
    const std::string type = inner.string("type", "");
    if (inner.ok() && type == "function") {
      read_function(inner, place, space);
    } else if (inner.ok() && type == "namespace" && space.empty()) {
      read_namespace(inner, place);
    } else if (inner.ok()) {
      inner.fail("type", unsupported(shown(type) + " tools are not supported here: it must be \"function\"" +
                                     (space.empty() ? " or \"namespace\"" : "")));
    }
    fields.merge(inner);
  }

 private:
  void read_namespace(Fields& fields, const std::string& place) {
    const std::string name = fields.string("name", "");
    if (fields.ok() && name.empty()) fields.fail("name", "is missing");
    fields.find("description");  // no effect: the model sees only the functions
    const json* tools = fields.find("tools");
    if (tools == nullptr || !tools->is_array())
      return fields.fail("tools", "must be an array of function tools");
    for (size_t i = 0; i < tools->size() && fields.ok(); ++i)
      read(fields, (*tools)[i], place + ".tools[" + std::to_string(i) + "]", name);
  }

  void read_function(Fields& fields, const std::string& place, const std::string& space) {
    json function = json::object();
    for (const char* part : {"name", "description", "parameters", "strict"})
      if (const json* given = fields.find(part)) function[part] = *given;
    fields.find("defer_loading");  // no effect: the model sees all functions at once
    const std::string name = fields.string("name", "");
    if (fields.ok() && name.empty()) fields.fail("name", "is missing");
    const std::string flat = space.empty() ? name : flat_name(space, name);
    const bool is_new = names_.insert(flat).second;
    if (!is_new && (!space.empty() || tools_.namespaced.contains(flat)))
      fields.fail("name", shown(flat) + " is the name of two tools, one of them NAMESPACE__NAME");
    if (!space.empty()) {
      function["name"] = flat;
      tools_.namespaced[flat] = {space, name};
    }
    tools_.functions.push_back({{"type", "function"}, {"function", std::move(function)}});
    tools_.places.push_back(place);
  }

  ResponseTools& tools_;
  std::set<std::string> names_;
};

std::string tool_name(const json& tool) { return tool["function"].value("name", ""); }

// Reads the name of the function that a tool_choice names, and returns the name that the model sees: clients
// send a namespaced function's own name or NAMESPACE__NAME.
std::string chosen_name(Fields& choice, const ResponseTools& tools) {
  const std::string name = choice.string("name", "");
  const auto is_chosen = [&name](const json& tool) { return tool_name(tool) == name; };
  if (std::any_of(tools.functions.begin(), tools.functions.end(), is_chosen)) return name;
  std::string found;
  for (const auto& [flat, function] : tools.namespaced) {
    if (function.name != name) continue;
    if (!found.empty())
      choice.fail("name",
                  shown(name) + " is in several namespaces: send " + shown(found) + " or " + shown(flat));
    found = flat;
  }
  return found.empty() ? name : found;
}

// Removes the functions that `choice`, of type allowed_tools, does not list.
void keep_allowed(Fields& choice, ResponseTools& tools) {
  const std::string mode = choice.string("mode", "auto");
  if (mode != "auto" && mode != "required")
    choice.fail("mode", "must be \"auto\" or \"required\", got " + shown(mode));
  const json* allowed = choice.find("tools");
  if (allowed == nullptr || !allowed->is_array() || allowed->empty())
    choice.fail("tools", "must be a non-empty array of {\"type\": \"function\", \"name\": string}");
  std::set<std::string> names;
  for (size_t i = 0; choice.ok() && i < allowed->size(); ++i) {
    Fields tool((*allowed)[i], "tool_choice.tools[" + std::to_string(i) + "].");
    if (const std::string type = tool.string("type", ""); tool.ok() && type != "function")
      tool.fail("type", unsupported(shown(type) + " is not supported here: it must be \"function\""));
    const std::string name = chosen_name(tool, tools);
    if (std::none_of(tools.functions.begin(), tools.functions.end(),
                     [&name](const json& t) { return tool_name(t) == name; }))
      tool.fail("name", "is not one of the tools: " + shown(name));
    names.insert(name);
    choice.merge(tool);
  }
  json kept = json::array();
  std::vector<std::string> places;
  for (size_t i = 0; i < tools.functions.size(); ++i) {
    if (!names.contains(tool_name(tools.functions[i]))) continue;
    kept.push_back(std::move(tools.functions[i]));
    places.push_back(tools.places[i]);
  }
  tools.functions = std::move(kept);
  tools.places = std::move(places);
  tools.choice = mode;
}

void read_choice(Fields& fields, const json& choice, ResponseTools& tools) {
  if (choice == "auto" || choice == "none" || choice == "required") {
    tools.choice = choice;
    return;
  }
  if (!choice.is_object())
    return fields.fail("tool_choice",
                       "must be \"auto\", \"none\", \"required\", {\"type\": \"function\", \"name\": string} "
                       "or {\"type\": \"allowed_tools\", \"mode\": string, \"tools\": array}");
  Fields inner(choice, "tool_choice.");
  const std::string type = inner.string("type", "");
  if (inner.ok() && type == "allowed_tools") {
    keep_allowed(inner, tools);
  } else if (inner.ok() && type != "function") {
    inner.fail("type", unsupported(shown(type) +
                                   " is not supported here: it must be \"function\" or \"allowed_tools\""));
  } else {
    tools.choice = {{"type", "function"}, {"function", {{"name", chosen_name(inner, tools)}}}};
  }
  fields.merge(inner);
}

}  // namespace

std::string flat_name(const std::string& space, const std::string& name) { return space + "__" + name; }

ResponseTools read_response_tools(Fields& fields) {
  ResponseTools tools;
  ToolReader reader(tools);
  const json* given = fields.find("tools");
  const json* choice = fields.find("tool_choice");
  if (given != nullptr && !given->is_array())
    fields.fail("tools", std::string("must be an array, not ") + given->type_name());
  for (size_t i = 0; given != nullptr && fields.ok() && i < given->size(); ++i) {
    if (is_ignored((*given)[i])) continue;
    reader.read(fields, (*given)[i], "tools[" + std::to_string(i) + "]", "");
    tools.given.push_back((*given)[i]);
  }
  if (fields.ok() && choice != nullptr) read_choice(fields, *choice, tools);
  return tools;
}

}  // namespace fp4moe
