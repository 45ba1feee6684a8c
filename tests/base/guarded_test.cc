#include "base/guarded.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace fp4moe {
namespace {

TEST(Guarded, ReturnsTheStatus) {
  EXPECT_TRUE(guarded([] { return Status(); }).ok());
  EXPECT_EQ(guarded([] { return data_loss("a frame of 3 bytes"); }).to_string(),
            "data_loss: a frame of 3 bytes");
}

TEST(Guarded, TurnsExceptionsIntoStatuses) {
  const auto no_memory = []() -> Status { throw std::bad_alloc(); };
  EXPECT_EQ(guarded(no_memory).to_string(), "unavailable: no memory");
  EXPECT_EQ(guarded(no_memory, StatusCode::kDoesNotFit).to_string(), "does_not_fit: no memory");
  const auto no_thread = []() -> Status {
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again), "thread");
  };
  EXPECT_EQ(guarded(no_thread).code(), StatusCode::kUnavailable);
  EXPECT_EQ(guarded(no_thread, StatusCode::kDoesNotFit).code(), StatusCode::kDoesNotFit);
  const auto bug = []() -> Status { throw std::out_of_range("index\n7"); };
  EXPECT_EQ(guarded(bug, StatusCode::kDoesNotFit).to_string(), "internal: index\\x0a7");
}

}  // namespace
}  // namespace fp4moe
