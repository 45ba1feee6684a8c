#include "engine/disagg/node_address.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

TEST(NodeAddress, NamesAndAddressesWithPorts) {
  const auto host_and_port = [](const std::string& text) {
    const auto address = parse_node_address(text);
    return address.ok() ? address->host + " " + std::to_string(address->port) : address.status().message();
  };
  EXPECT_EQ(host_and_port("prefill-1.example:8998"), "prefill-1.example 8998");
  EXPECT_EQ(host_and_port("127.0.0.1:1"), "127.0.0.1 1");
  EXPECT_EQ(host_and_port("[::1]:65535"), "::1 65535");
  EXPECT_EQ(host_and_port("[fe80::1%eth0]:80"), "fe80::1%eth0 80");
  EXPECT_EQ(host_and_port(std::string(253, 'a') + ":80"), std::string(253, 'a') + " 80");
}

TEST(NodeAddress, OthersAreRefusedWithAShortExcerpt) {
  for (const std::string& text : {std::string("nowhere"),
                                  std::string(":80"),
                                  std::string("host:"),
                                  std::string("host:0"),
                                  std::string("host:65536"),
                                  std::string("host:99999999999999999999"),
                                  std::string("host:-1"),
                                  std::string("host:8x"),
                                  std::string("::1:80"),
                                  std::string("a b:80"),
                                  std::string("a\nb:80"),
                                  std::string("a/b:80"),
                                  std::string("http://a:80"),
                                  std::string("[]:80"),
                                  std::string("\x1b[31m:80"),
                                  std::string("h\xc3\xb6st:80"),
                                  std::string("a\0b:80", 6),
                                  std::string(254, 'a') + ":80",
                                  std::string(20 << 20, 'a') + ":80",
                                  std::string(20 << 20, '\n')}) {
    const auto address = parse_node_address(text);
    ASSERT_FALSE(address.ok()) << text.substr(0, 100);
    EXPECT_EQ(address.status().code(), StatusCode::kInvalidArgument);
    EXPECT_LT(address.status().message().size(), 500u);
    EXPECT_EQ(address.status().message().find_first_of("\n\x1b"), std::string::npos);
  }
}

Status check(const std::vector<std::string>& entries, const std::string& text) {
  const auto hosts = AllowedHosts::parse(entries);
  EXPECT_TRUE(hosts.ok()) << hosts.status().to_string();
  const auto address = parse_node_address(text);
  EXPECT_TRUE(address.ok()) << address.status().to_string();
  return hosts->check(*address);
}

TEST(AllowedHosts, DefaultIsLoopbackAlone) {
  for (const std::string text :
       {"127.0.0.1:1", "127.9.8.7:2", "localhost:3", "LocalHost.:3", "[::1]:4", "[0:0:0:0:0:0:0:1]:4"})
    EXPECT_TRUE(check({}, text).ok()) << text;
  for (const std::string text : {"10.0.0.1:1", "128.0.0.1:1", "[::2]:1", "example.org:1", "0.0.0.0:1",
                                 "localhost.example.org:1", "[::ffff:10.0.0.1]:1", "2130706433:1"}) {
    const Status status = check({}, text);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("--disaggregation-allowed-hosts"), std::string::npos) << status.message();
  }
}

TEST(AllowedHosts, EntriesNameHostsAndPorts) {
  const std::vector<std::string> entries = {"Prefill-1", "prefill-2:8998", "[2001:db8::1]:80", "2001:db8::2"};
  EXPECT_TRUE(check(entries, "prefill-1:1").ok());
  EXPECT_TRUE(check(entries, "PREFILL-1.:2").ok());
  EXPECT_TRUE(check(entries, "prefill-2:8998").ok());
  EXPECT_TRUE(check(entries, "[2001:db8:0::1]:80").ok());
  EXPECT_TRUE(check(entries, "[2001:db8::2]:9").ok());
  for (const std::string text :
       {"prefill-2:8999", "prefill-3:8998", "[2001:db8::1]:81", "127.0.0.1:8998", "prefill-1.evil.example:1"})
    EXPECT_FALSE(check(entries, text).ok()) << text;
  EXPECT_TRUE(check({"*"}, "anything.example:1").ok());
}

TEST(AllowedHosts, RemoteEntriesAreKnownAndWrongOnesRefused) {
  EXPECT_EQ(AllowedHosts::parse({})->first_remote(), "");
  EXPECT_EQ(AllowedHosts::parse({"localhost", "127.0.0.1:80", "::1"})->first_remote(), "");
  EXPECT_EQ(AllowedHosts::parse({"localhost", "a.example", "b"})->first_remote(), "a.example");
  EXPECT_EQ(AllowedHosts::parse({"*"})->first_remote(), "*");
  for (const std::string& entry : {std::string(), std::string("a b"), std::string("host:0"),
                                   std::string("/x"), std::string(300, 'a'), std::string("a\n")}) {
    const Status status = AllowedHosts::parse({entry}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << entry;
    EXPECT_NE(status.message().find("--disaggregation-allowed-hosts"), std::string::npos);
  }
}

}  // namespace
}  // namespace fp4moe
