#include "engine/disagg/node_link.h"

#include <utility>

#include "base/check.h"
#include "engine/disagg/kv_resolve.h"

namespace fp4moe {
namespace {

constexpr const char* kNeedsSecret =
    "without --disaggregation-secret-file, any machine that reaches the port would be trusted; nearest legal "
    "choices: a secret file, or ";

// Checks every address that the host resolves to: the listener binds one of them.
Status check_listener(const std::string& host) {
  KvAddresses addresses;
  FP4MOE_RETURN_IF_ERROR(
      addresses.resolve(host, 0, AI_PASSIVE).with_context("disaggregation bootstrap port"));
  for (const addrinfo* a = addresses.first(); a != nullptr; a = a->ai_next)
    if (!is_loopback(*a->ai_addr))
      return unsupported("--disaggregation-mode prefill with --host " + host + ": " + kNeedsSecret +
                         "--host 127.0.0.1");
  return {};
}

}  // namespace

Result<NodeLinkOptions> node_link_options(const EngineConfig& config) {
  NodeLinkOptions options{.max_connections = config.disaggregation_max_connections,
                          .timeout_seconds = config.disaggregation_io_timeout};
  const std::string& mode = config.disaggregation_mode;
  if (mode == "null") return options;
  if (options.max_connections < 1)
    return invalid_argument("--disaggregation-max-connections is " + std::to_string(options.max_connections) +
                            "; it must be at least 1");
  if (!(options.timeout_seconds >= 0.1 && options.timeout_seconds <= 1e6))
    return invalid_argument("--disaggregation-io-timeout is " + std::to_string(options.timeout_seconds) +
                            "; it must be between 0.1 and 1e6 seconds");
  if (const int port = config.disaggregation_bootstrap_port; port < 0 || port > 65535)
    return invalid_argument("--disaggregation-bootstrap-port is " + std::to_string(port) +
                            "; it must be between 0 and 65535");
  if (!(config.disaggregation_timeout >= 0 && config.disaggregation_timeout <= 1e9))
    return invalid_argument("--disaggregation-timeout is " + std::to_string(config.disaggregation_timeout) +
                            "; it must be between 0 (no limit) and 1e9 seconds");
  if (!config.disaggregation_secret_file.empty()) {
    Result<NodeSecret> secret = NodeSecret::load(config.disaggregation_secret_file);
    if (!secret.ok()) return secret.status().with_context("--disaggregation-secret-file");
    options.secret = std::make_shared<const NodeSecret>(std::move(secret).value());
  }
  FP4MOE_ASSIGN_OR_RETURN(options.allowed_hosts, AllowedHosts::parse(config.disaggregation_allowed_hosts));
  if (options.secret->is_set()) return options;
  if (mode == "prefill") FP4MOE_RETURN_IF_ERROR(check_listener(config.disaggregation_bootstrap_host));
  if (const std::string& remote = options.allowed_hosts.first_remote(); mode == "decode" && !remote.empty())
    return unsupported("--disaggregation-mode decode with --disaggregation-allowed-hosts " + remote + ": " +
                       kNeedsSecret + "loopback hosts");
  return options;
}

}  // namespace fp4moe
