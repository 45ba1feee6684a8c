// The log lines of --log-requests.
#pragma once

#include <string>

#include "server/api/generation.h"

namespace fp4moe {

// Both do nothing without config.request_sink. "request.received": the ids, route and sizes; from level 1 the
// sampling parameters, from level 2 the request's body.
void log_received(const ServerConfig& config, const HttpRequest& http, const GenerationCall& call);
// "request.finished": the ids, each choice's finish reason, tokens and seconds; from level 2 its text. A
// choice without a finish reason was abandoned; `error` is the reason, if known.
void log_finished(const ServerConfig& config, const std::vector<Choice>& choices, const std::string& error);

}  // namespace fp4moe
