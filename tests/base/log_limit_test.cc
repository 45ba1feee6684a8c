#include "base/log_limit.h"

#include <gtest/gtest.h>

#include <vector>

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

struct Lines {
  Lines() {
    set_log_sink([this](LogLevel, const std::string& line) { seen.push_back(line); });
  }
  ~Lines() { set_log_sink({}); }
  std::vector<std::string> seen;
};

TEST(LogLimit, ABurstPassesThenOneLineAnInterval) {
  Lines lines;
  LogLimit limit(3, 1s);
  const auto start = LogLimit::Clock::now();
  for (int i = 0; i < 1000; ++i) limit.log(LogLevel::kInfo, "line " + std::to_string(i), start);
  EXPECT_EQ(lines.seen, (std::vector<std::string>{"line 0", "line 1", "line 2"}));
  limit.log(LogLevel::kInfo, "later", start + 999ms);
  EXPECT_EQ(lines.seen.size(), 3u);
  limit.log(LogLevel::kInfo, "in time", start + 1s);
  ASSERT_EQ(lines.seen.size(), 5u);
  EXPECT_EQ(lines.seen[3], "998 log lines like the next one were suppressed");
  EXPECT_EQ(lines.seen[4], "in time");
  limit.log(LogLevel::kInfo, "too early", start + 1s);
  EXPECT_EQ(lines.seen.size(), 5u);
}

TEST(LogLimit, TheBurstIsAvailableAgainAfterAPause) {
  Lines lines;
  LogLimit limit(2, 1s);
  const auto start = LogLimit::Clock::now();
  for (const auto at : {0s, 0s, 0s, 10s, 10s, 10s}) limit.log(LogLevel::kInfo, "x", start + at);
  EXPECT_EQ(lines.seen.size(), 5u);  // two lines, one about suppressed lines, two lines
}

}  // namespace
}  // namespace fp4moe
