#include "base/log.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace fp4moe {
namespace {

TEST(Log, GoesToTheSinkInOrderAndNowhereWithoutOne) {
  std::vector<std::pair<LogLevel, std::string>> lines;
  log_info("dropped");
  set_log_sink([&](LogLevel level, const std::string& line) { lines.emplace_back(level, line); });
  log_info("a");
  log_warning("b");
  log_error("c");
  set_log_sink({});
  log_info("dropped");
  const std::vector<std::pair<LogLevel, std::string>> expected = {
      {LogLevel::kInfo, "a"}, {LogLevel::kWarning, "b"}, {LogLevel::kError, "c"}};
  EXPECT_EQ(lines, expected);
}

}  // namespace
}  // namespace fp4moe
