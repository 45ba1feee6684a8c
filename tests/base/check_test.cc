#include "base/check.h"

#include <gtest/gtest.h>

#include <memory>

namespace fp4moe {
namespace {

Status fail_if(bool fail) { return fail ? invalid_argument("no") : Status(); }

Result<int> half_of(int x) {
  FP4MOE_RETURN_IF_ERROR(fail_if(x % 2 != 0));
  return x / 2;
}

Result<int> quarter_of(int x) {
  FP4MOE_ASSIGN_OR_RETURN(const int half, half_of(x));
  FP4MOE_ASSIGN_OR_RETURN(const int quarter, half_of(half));
  return quarter;
}

TEST(Status, NamesEveryCodeOnce) {
  const char* names[] = {"ok",           "invalid_argument", "not_found",   "data_loss", "unsupported",
                         "does_not_fit", "cancelled",        "unavailable", "deadline",  "internal"};
  for (int code = 0; code < 10; ++code)
    EXPECT_STREQ(status_code_name(static_cast<StatusCode>(code)), names[code]);
}

TEST(Status, PrintsAndTakesContext) {
  EXPECT_EQ(Status().to_string(), "ok");
  const Status status = invalid_argument("top_k=9").with_context("config.json");
  EXPECT_EQ(status.to_string(), "invalid_argument: config.json: top_k=9");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Status().with_context("x").ok());
}

TEST(Status, MacrosPassErrorsOn) {
  EXPECT_EQ(*quarter_of(12), 3);
  EXPECT_EQ(quarter_of(6).status().message(), "no");
  EXPECT_EQ(quarter_of(1).status().message(), "no");
}

TEST(Result, HoldsMoveOnlyValues) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(3);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(*std::move(result).value(), 3);
}

TEST(CheckDeathTest, SaysWhereAndWhy) {
  FP4MOE_CHECK(true, "not printed");
  EXPECT_DEATH(FP4MOE_CHECK(1 > 2, "1 and " + std::to_string(2)),
               "check_test.cc:.*CHECK.1 > 2. failed: 1 and 2");
}

}  // namespace
}  // namespace fp4moe
