// Text to token ids and back, and the chat template alone.
#pragma once

#include "server/api/route_context.h"

namespace fp4moe {

// POST /tokenize: "prompt" (vLLM's and SGLang's field), "content" (llama-server's) or "messages", whose ids
// are those that /v1/chat/completions submits.
HttpResponse tokenize_response(const RouteContext& context, const HttpRequest& request);
// POST /detokenize: "tokens", "ids" or "prompt".
HttpResponse detokenize_response(const RouteContext& context, const HttpRequest& request);
// POST /apply-template, llama-server's: the prompt of "messages", as text.
HttpResponse apply_template_response(const RouteContext& context, const HttpRequest& request);

}  // namespace fp4moe
