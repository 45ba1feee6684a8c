// Runs one request and streams its text.
#pragma once

#include <functional>
#include <string>

#include "fp4moe/engine.h"

namespace fp4moe {

// Returns the last delta. `on_text` receives each piece of text on the engine's thread. Once `is_stopped`,
// which is polled on this thread, returns true, the request is cancelled and ends with kAbort. Errors: those
// of Engine::submit, and that of a request that ends with kError.
Result<Delta> stream_output(Engine& engine, Request request,
                            const std::function<void(const std::string&)>& on_text,
                            const std::function<bool()>& is_stopped);

}  // namespace fp4moe
