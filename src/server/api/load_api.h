// GET /expert_load and /expert_load.svg: ?window=SECONDS (at most 60, the default) or ?window=all.
#pragma once

#include "server/http/http.h"
#include "server/observe/load_history.h"

namespace fp4moe {

enum class LoadForm { kJson, kSvg };
HttpResponse expert_load_response(const LoadWatch& watch, const ModelInfo& info, const HttpRequest& request,
                                  LoadForm form);

}  // namespace fp4moe
