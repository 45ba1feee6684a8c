// guarded(): runs the work of a thread, connection or rank so that an exception fails that work instead of
// the process.
#pragma once

#include <new>
#include <system_error>

#include "base/printable.h"
#include "fp4moe/status.h"

namespace fp4moe {

// Returns f()'s Status; `exhausted` for std::bad_alloc and std::system_error (no memory, no thread),
// kInternal for any other exception.
template <class F>
Status guarded(const F& f, StatusCode exhausted = StatusCode::kUnavailable) noexcept {
  const Status no_memory(exhausted, "no memory");  // short enough not to allocate
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return no_memory;
  } catch (const std::exception& error) {
    const bool is_of_system = dynamic_cast<const std::system_error*>(&error) != nullptr;
    try {
      return {is_of_system ? exhausted : StatusCode::kInternal, printable(error.what())};
    } catch (const std::bad_alloc&) {
      return no_memory;
    }
  }
}

}  // namespace fp4moe
