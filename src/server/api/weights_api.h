// POST /update_weights_from_disk, with SGLang's fields and response.
#pragma once

#include "fp4moe/engine.h"
#include "server/http/http.h"

namespace fp4moe {

// Blocks until the weights have been replaced or refused. 400: a field, the checkpoint or the configuration
// is refused, and the old weights serve on; 503: the engine drains or has failed.
HttpResponse update_weights_response(Engine& engine, const HttpRequest& request);

// 409, for a request while another one is being handled.
HttpResponse update_in_progress_response();

}  // namespace fp4moe
