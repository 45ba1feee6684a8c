// Who may ask what: the keys of clients and operators, with SGLang's rules.
#pragma once

#include <optional>

#include "server/http.h"

namespace fp4moe {

enum class Access {
  kOpen,    // probes, scrapers and preflights: no key
  kClient,  // a client's key, where such keys are set
  kAdmin,   // an operator's key, where such keys are set; else a client's
};

// kInvalidArgument for a key that no header can carry; the message does not show the key.
Status check_keys(const ServerConfig& config);

// The refusal (401), or nothing where the request may go on. A key comes as "Authorization: Bearer KEY" or as
// "x-api-key: KEY". The time taken does not depend on where a wrong key differs.
std::optional<HttpResponse> refuse_access(const ServerConfig& config, Access access,
                                          const HttpRequest& request);

// Whose request it is (Request::client): the client with that key, where the request has one of the
// configured ones, else the client at that address. Does not hold the key.
std::string client_of(const ServerConfig& config, const HttpExchange& exchange);

}  // namespace fp4moe
