// The tools of /v1/responses: functions and namespaces of functions, as the functions of a chat completion.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "server/json.h"

namespace fp4moe {

// A function in a namespace.
struct NamespacedFunction {
  std::string space, name;
};

struct ResponseTools {
  json given = json::array();       // as in the request, without the tools that are ignored
  json functions = json::array();   // as the tools of a chat completion
  std::vector<std::string> places;  // for each function, its place in the request: "tools[1].tools[0]"
  json choice;                      // as the tool_choice of a chat completion; null: absent
  std::map<std::string, NamespacedFunction> namespaced;  // by flat_name()
};

// The name that the model sees instead of a function's name and namespace: SPACE__NAME, as in vLLM.
std::string flat_name(const std::string& space, const std::string& name);

// Reads "tools" and "tool_choice".
ResponseTools read_response_tools(Fields& fields);

}  // namespace fp4moe
