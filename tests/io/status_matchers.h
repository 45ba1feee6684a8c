// Assertions on Status and Result.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

inline const Status& status_of(const Status& status) { return status; }
template <class T>
const Status& status_of(const Result<T>& result) {
  return result.status();
}

// Passes if `value` is an error with this code and its message contains all `parts`.
template <class T>
testing::AssertionResult fails_with(const T& value, StatusCode code,
                                    std::initializer_list<std::string> parts) {
  const Status& status = status_of(value);
  if (status.code() != code)
    return testing::AssertionFailure()
           << "got " << status.to_string() << ", expected " << status_code_name(code);
  for (const std::string& part : parts)
    if (status.message().find(part) == std::string::npos)
      return testing::AssertionFailure() << "'" << status.message() << "' lacks '" << part << "'";
  return testing::AssertionSuccess();
}

template <class T>
testing::AssertionResult is_ok(const T& value) {
  const Status& status = status_of(value);
  return status.ok() ? testing::AssertionSuccess() : testing::AssertionFailure() << status.to_string();
}

}  // namespace fp4moe
