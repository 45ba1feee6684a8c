#include "base/log.h"

#include <gtest/gtest.h>

#include <memory>
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

TEST(LogRegistration, TheNewestLivingSinkGetsTheLines) {
  std::string a, b;
  const auto into = [](std::string& text) {
    return [&text](LogLevel, const std::string& line) { text += line; };
  };
  auto first = std::make_unique<LogRegistration>(into(a));
  log_info("1");
  auto second = std::make_unique<LogRegistration>(into(b));
  const LogRegistration without_sink{LogSink()};
  log_info("2");
  LogRegistration moved(std::move(*second));
  second.reset();
  log_info("3");
  first.reset();
  log_info("4");
  EXPECT_EQ(a + "/" + b, "1/234");
}

TEST(Log, WhatASinkThrowsIsIgnored) {
  const LogRegistration throws([](LogLevel, const std::string&) { throw 1; });
  EXPECT_NO_THROW(log_info("lost"));
}

}  // namespace
}  // namespace fp4moe
