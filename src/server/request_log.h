// What --log-requests tells of a generation request.
#pragma once

#include <string>

#include "server/generation.h"

namespace fp4moe {

// Both do nothing without config.request_sink. "request.received": the ids, route and sizes; from level 1 on
// the sampling parameters, from 2 on the request's body.
void log_received(const ServerConfig& config, const HttpRequest& http, const GenerationCall& call);
// "request.finished": the ids, how each choice ended, its tokens and time; from level 2 on its text. A choice
// without a finish reason was given up, and `error` says why where that is known.
void log_finished(const ServerConfig& config, const std::vector<Choice>& choices, const std::string& error);

}  // namespace fp4moe
