// Status and Result: how fp4moe reports errors. No exception crosses this interface.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace fp4moe {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // a value is invalid; the message names it and the legal values
  kNotFound,         // a file, tensor, model or id does not exist
  kDataLoss,         // a file or message is truncated, corrupt or inconsistent
  kUnsupported,      // valid, but not supported here; the message names the nearest legal choice
  kDoesNotFit,       // memory, context or capacity is exhausted; the message states the need and the limit
  kCancelled,        // the caller cancelled the operation
  kUnavailable,      // not ready yet, draining, or the queue is full: try again later
  kDeadline,         // an operation exceeded its deadline
  kInternal,         // a bug in fp4moe, or an unexpected failure
};

// Returns a stable lower-case name, such as "invalid_argument".
const char* status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // Returns "invalid_argument: top_k=9 exceeds num_experts=8", or "ok".
  std::string to_string() const;
  // Returns the same error with `context` and ": " prepended to its message; OK stays OK.
  Status with_context(const std::string& context) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status invalid_argument(std::string m) { return {StatusCode::kInvalidArgument, std::move(m)}; }
inline Status not_found(std::string m) { return {StatusCode::kNotFound, std::move(m)}; }
inline Status data_loss(std::string m) { return {StatusCode::kDataLoss, std::move(m)}; }
inline Status unsupported(std::string m) { return {StatusCode::kUnsupported, std::move(m)}; }
inline Status does_not_fit(std::string m) { return {StatusCode::kDoesNotFit, std::move(m)}; }
inline Status cancelled(std::string m) { return {StatusCode::kCancelled, std::move(m)}; }
inline Status unavailable(std::string m) { return {StatusCode::kUnavailable, std::move(m)}; }
inline Status internal_error(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

// A value, or the error that prevented it.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // Precondition of all functions below: ok().
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;  // ok iff value_ holds a value
};

}  // namespace fp4moe
