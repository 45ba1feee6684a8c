// Access control: the API keys of clients and operators, with SGLang's rules.
#pragma once

#include <optional>

#include "server/http/http.h"

namespace fp4moe {

enum class Access {
  kOpen,    // probes, scrapers and preflights: no key
  kClient,  // a client key, if any are configured
  kAdmin,   // an admin key, if any are configured; else a client key
};

// kInvalidArgument for a key that a header cannot carry; the message does not contain the key.
Status check_keys(const ServerConfig& config);

// The 401 response, or nothing if access is granted. Reads "Authorization: Bearer KEY" and "x-api-key: KEY".
// The run time does not depend on where a wrong key differs.
std::optional<HttpResponse> refuse_access(const ServerConfig& config, Access access,
                                          const HttpRequest& request);

// Identifies the key that the client sent among ServerConfig::api_keys; empty if it is not one of them, or if
// there are none. The result does not contain the key.
std::string client_key(const ServerConfig& config, const HttpRequest& request);

// Identifies the client for Request::client: by its key if the key is configured, else by its address. The
// result does not contain the key.
std::string client_of(const ServerConfig& config, const HttpExchange& exchange);

}  // namespace fp4moe
