// Checks for bugs in fp4moe. Invalid input is not a bug: functions return a Status for it.
#pragma once

#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// Prints the failed condition, its source location and the message to stderr, and aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& message);

}  // namespace fp4moe

// The message is evaluated only on failure; it should contain the compared values.
#define FP4MOE_CHECK(condition, message)                                 \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::fp4moe::check_failed(__FILE__, __LINE__, #condition, (message)); \
  } while (0)

#ifdef NDEBUG
#define FP4MOE_DCHECK(condition, message) ((void)0)
#else
#define FP4MOE_DCHECK(condition, message) FP4MOE_CHECK(condition, message)
#endif

// Returns from the enclosing function if `expression`, a Status, is an error.
#define FP4MOE_RETURN_IF_ERROR(expression)                                                           \
  do {                                                                                               \
    if (::fp4moe::Status fp4moe_status_ = (expression); !fp4moe_status_.ok()) return fp4moe_status_; \
  } while (0)

// FP4MOE_ASSIGN_OR_RETURN(auto x, f()): x = *f(), or returns f's error.
#define FP4MOE_CONCAT_(a, b) a##b
#define FP4MOE_CONCAT(a, b) FP4MOE_CONCAT_(a, b)
#define FP4MOE_ASSIGN_OR_RETURN(declaration, expression) \
  FP4MOE_ASSIGN_OR_RETURN_(FP4MOE_CONCAT(fp4moe_result_, __LINE__), declaration, expression)
#define FP4MOE_ASSIGN_OR_RETURN_(result, declaration, expression) \
  auto result = (expression);                                     \
  if (!result.ok()) return result.status();                       \
  declaration = std::move(result).value()
