// The routes that report the model, the server and its load.
#pragma once

#include "server/api/route_context.h"

namespace fp4moe {

HttpResponse models_response(const RouteContext& context, const HttpRequest& request);  // GET /v1/models
HttpResponse model_response(const RouteContext& context, const HttpRequest& request);   // GET /v1/models/ID

// GET /model_info, SGLang's shape.
HttpResponse model_info_response(const RouteContext& context, const HttpRequest& request);
// GET /version, vLLM's shape.
HttpResponse version_response(const RouteContext& context, const HttpRequest& request);
// GET /get_load and GET /v1/loads, SGLang's shapes. The engine's counters are sums over the data-parallel
// groups, so there is one entry, with dp_rank 0.
HttpResponse load_response(const RouteContext& context, const HttpRequest& request);
HttpResponse loads_response(const RouteContext& context, const HttpRequest& request);
// GET /props, llama-server's shape.
HttpResponse props_response(const RouteContext& context, const HttpRequest& request);
// GET /slots: 404, because this server has no slots.
HttpResponse slots_response(const RouteContext& context, const HttpRequest& request);

}  // namespace fp4moe
