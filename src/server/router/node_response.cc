#include "server/router/node_response.h"

#include "server/http/excerpt.h"
#include "server/json.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxPort = 65535;
constexpr size_t kMaxShown = 80;  // characters of a wrong value

Status wrong_field(const std::string& name, const json& value, const std::string& legal) {
  const bool is_short =
      !value.is_structured() && (!value.is_string() || value.get_ref<const std::string&>().size() < 1024);
  return data_loss(
      "its /server_info has " + name + " " +
      (is_short ? excerpt(to_text(value), kMaxShown) : "of type " + std::string(value.type_name())) +
      "; it must be " + legal);
}

// The named member; nullptr if it is absent or null.
const json* find(const json& object, const std::string& name) {
  const auto at = object.find(name);
  return at == object.end() || at->is_null() ? nullptr : &*at;
}

}  // namespace

Result<NodeInfo> read_node_info(std::string_view body) {
  const Result<json> info = parse_json(body);
  if (!info.ok() || !info->is_object())
    return data_loss("its /server_info is not a JSON object: \"" + excerpt(body, kMaxShown) + "\"");
  NodeInfo read{"null", 0};
  if (const json* mode = find(*info, "disaggregation_mode")) {
    if (!mode->is_string())
      return wrong_field("disaggregation_mode", *mode, "\"null\", \"prefill\" or \"decode\"");
    read.mode = excerpt(mode->get_ref<const std::string&>(), kMaxShown);
  }
  if (const json* port = find(*info, "disaggregation_bootstrap_port")) {
    if (!port->is_number_unsigned() || port->get<uint64_t>() > uint64_t{kMaxPort})
      return wrong_field("disaggregation_bootstrap_port", *port, "an integer in 0..65535 (0: none)");
    read.bootstrap_port = static_cast<int>(port->get<uint64_t>());
  }
  return read;
}

Status check_node_info(const NodeInfo& info, const std::string& role, bool knows_port) {
  if (info.mode != role)
    return unsupported("it runs with --disaggregation-mode " + info.mode + " but is configured as --" + role);
  if (role == "prefill" && !knows_port && info.bootstrap_port == 0)
    return unsupported(
        "its /server_info has no disaggregation_bootstrap_port; configure the port with "
        "--prefill URL BOOTSTRAP_PORT");
  return {};
}

}  // namespace fp4moe
