// X-Request-Id: the header with which clients and proxies name a request, and with which the server returns
// the name.
#pragma once

#include <string>
#include <string_view>

namespace fp4moe {

// Whether the text has 1 to 256 characters, all of them visible ASCII.
bool is_request_id(std::string_view text);

// The response's header line; empty if the header cannot carry this id.
std::string request_id_header(const std::string& id);

}  // namespace fp4moe
