// Server URLs are parsed strictly, and messages quote a peer's text safely.
#include "server/http/server_url.h"

#include <gtest/gtest.h>

#include "server/http/excerpt.h"

namespace fp4moe {
namespace {

using std::string_literals::operator""s;

TEST(ServerUrl, IsHostPortAndPrefix) {
  const auto parsed = [](const std::string& text) {
    const Result<ServerUrl> url = parse_server_url(text);
    return url.ok() ? url->host + "|" + url->port + "|" + url->prefix + "|" + url->text()
                    : url.status().message();
  };
  EXPECT_EQ(parsed("http://a"), "a|80||http://a:80");
  EXPECT_EQ(parsed("http://a-b.c_d:1/"), "a-b.c_d|1||http://a-b.c_d:1");
  EXPECT_EQ(parsed("http://10.0.0.1:65535/v1/"), "10.0.0.1|65535||http://10.0.0.1:65535");
  EXPECT_EQ(parsed("http://a:30000/x/v1"), "a|30000|/x/v1|http://a:30000/x/v1");
  EXPECT_EQ(parsed("http://[::1]:30000/x"), "::1|30000|/x|http://[::1]:30000/x");
  EXPECT_EQ(parsed("http://[fe80::1%eth0]"), "fe80::1%eth0|80||http://[fe80::1%eth0]:80");
}

TEST(ServerUrl, OnlyAddressesOfVersionSixGetBrackets) {
  EXPECT_EQ(url_host("::1"), "[::1]");
  EXPECT_EQ(url_host("[::1]"), "[::1]");
  EXPECT_EQ(url_host("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(url_host("a-b.c"), "a-b.c");
}

TEST(ServerUrl, WhatCannotBeOneIsRefused) {
  for (const std::string& text : {""s,
                                  "a:1"s,
                                  "https://a"s,
                                  "http://"s,
                                  "http://:1"s,
                                  "http://a:"s,
                                  "http://a:0"s,
                                  "http://a:65536"s,
                                  "http://a:http"s,
                                  "http://a:1:2"s,
                                  "http://a:-1"s,
                                  "http://a:99999999999999999999"s,
                                  "http://u@a:1"s,
                                  "http://a b:1"s,
                                  "http://[::1"s,
                                  "http://[]:1"s,
                                  "http://[::1]1"s,
                                  "http://[::1]x:1"s,
                                  "http://a:1/x y"s,
                                  "http://a:1/?q"s,
                                  "http://a:1/#f"s,
                                  "http://a:1/\r\nX: y"s,
                                  "http://a\n:1"s,
                                  "http://a:1/\x80"s,
                                  "http://a:1/\""s,
                                  "http://" + std::string(300, 'a')}) {
    const Status status = parse_server_url(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("must look like http://host:port"), std::string::npos);
    EXPECT_EQ(status.message().find('\n'), std::string::npos);
  }
}

TEST(Excerpt, IsOneBoundedLineOfAscii) {
  EXPECT_EQ(excerpt("plain text"), "plain text");
  EXPECT_EQ(excerpt("a\nb\r\tc\\"), R"(a\nb\r\tc\\)");
  EXPECT_EQ(excerpt("\x1b[31m\x7f\0z"s), R"(\x1b[31m\x7f\x00z)");
  EXPECT_EQ(excerpt("\xc2\x9b\xff"), R"(\xc2\x9b\xff)");
  EXPECT_EQ(excerpt("12345", 5), "12345");
  EXPECT_EQ(excerpt("123456", 5), "12345...");
  EXPECT_EQ(excerpt(""), "");
}

}  // namespace
}  // namespace fp4moe
