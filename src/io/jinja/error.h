// The error thrown inside the template engine; ChatTemplate turns it into a Status.
#pragma once

#include <string>
#include <utility>

namespace fp4moe::jinja {

enum class ErrorKind {
  kSyntax,   // the template cannot be parsed
  kRuntime,  // an error that Jinja2 would report while rendering, including raise_exception
  kLimit,    // a limit on steps, depth, memory or output is exceeded
};

struct Error {
  ErrorKind kind;
  std::string message;
  int line = 0;  // 1-based; 0 until the parser or the interpreter knows it
};

[[noreturn]] inline void fail(std::string message) { throw Error{ErrorKind::kRuntime, std::move(message)}; }
[[noreturn]] inline void limit(std::string message) { throw Error{ErrorKind::kLimit, std::move(message)}; }

}  // namespace fp4moe::jinja
