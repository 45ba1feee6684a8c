// Node responses in pieces of any size: HTTP bytes and the content of /server_info.
#include "server/router/node_response.h"

#include <gtest/gtest.h>

#include "server/router/upstream_parser.h"

namespace fp4moe {
namespace {

using std::string_literals::operator""s;

struct Parsed {
  Status status;
  std::string body;
  UpstreamHead head;
  bool is_done = false;
};

// Feeds the response to a parser in pieces of `piece` bytes, then reports the end of the connection.
Parsed parse(const std::string& bytes, size_t piece, bool is_head_request = false,
             uint64_t max_body_bytes = 0) {
  UpstreamParser parser(is_head_request, max_body_bytes);
  Parsed parsed;
  for (size_t at = 0; at < bytes.size() && parsed.status.ok() && !parser.is_done(); at += piece)
    parsed.status = parser.read(std::string_view(bytes).substr(at, piece), parsed.body);
  if (parsed.status.ok()) parsed.status = parser.read_end();
  parsed.head = parser.head();
  parsed.is_done = parser.is_done();
  return parsed;
}

constexpr size_t kPieces[] = {1, 2, 3, 7, 64, 1 << 20};

TEST(UpstreamParser, ReadsAnswersInAnyPieces) {
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nRetry-After: 3\r\n",
                    big(10000, 'x');
  const std::pair<std::string, std::string> answers[] = {
      {head + "Content-Length: 5\r\n\r\nhello", "hello"},
      {head + "Content-Length: 0\r\n\r\n", ""},
      {head + "Content-Length: 10000\r\n\r\n" + big, big},
      {head + "\r\nuntil the end", "until the end"},
      {head + "\r\n", ""},
      {head + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n", "hello!"},
      {head + "Transfer-Encoding: chunked\r\n\r\n2710\r\n" + big + "\r\n0\r\nTrailer: z\r\n\r\n", big}};
  for (const auto& [bytes, body] : answers)
    for (const size_t piece : kPieces) {
      const Parsed parsed = parse(bytes, piece);
      EXPECT_TRUE(parsed.status.ok()) << parsed.status.to_string() << " " << bytes.substr(0, 200);
      EXPECT_TRUE(parsed.is_done);
      EXPECT_EQ(parsed.body, body) << piece;
      EXPECT_EQ(parsed.head.status, 200);
      EXPECT_TRUE(parsed.head.is_event_stream());
      EXPECT_EQ(parsed.head.retry_after, "3");
    }
  EXPECT_TRUE(
      parse("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", 1, /*is_head_request=*/true).status.ok());
}

TEST(UpstreamParser, EveryTruncationIsAnError) {
  const std::string whole = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
  for (size_t n = 0; n < whole.size(); ++n)
    for (const size_t piece : kPieces) {
      const Parsed parsed = parse(whole.substr(0, n), piece);
      EXPECT_EQ(parsed.status.code(), StatusCode::kUnavailable) << n;
      EXPECT_FALSE(parsed.is_done);
    }
}

TEST(UpstreamParser, LimitsHoldInAnyPieces) {
  const std::string chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", many(20000, 'y');
  const std::pair<std::string, const char*> answers[] = {
      {"HTTP/1.1 200 OK\r\nX: " + many, "a header of its response has more than 16384 bytes"},
      {chunked + "1;" + many, "a header of its response has more than 16384 bytes"},
      {chunked + "0\r\nX: " + many, "a header of its response has more than 16384 bytes"},
      {chunked + "4e20\r\n" + many, "its response has more than 1000 bytes"},
      {"HTTP/1.1 200 OK\r\n\r\n" + many, "its response has more than 1000 bytes"},
      {"HTTP/1.1 101 Switching\r\n\r\n", "its response has status 101; it must be 200 to 599"}};
  for (const auto& [bytes, reason] : answers)
    for (const size_t piece : kPieces) {
      const Parsed parsed = parse(bytes, piece, false, 1000);
      EXPECT_EQ(parsed.status.code(), StatusCode::kDataLoss);
      EXPECT_NE(parsed.status.message().find(reason), std::string::npos) << parsed.status.message();
    }
}

TEST(NodeInfo, IsReadWithTypes) {
  const Result<NodeInfo> info =
      read_node_info(R"({"disaggregation_mode":"prefill","disaggregation_bootstrap_port":1,"more":[{}]})");
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->mode, "prefill");
  EXPECT_EQ(info->bootstrap_port, 1);
  EXPECT_TRUE(check_node_info(*info, "prefill", false).ok());
  EXPECT_EQ(check_node_info(*info, "decode", false).message(),
            "it runs with --disaggregation-mode prefill but is configured as --decode");
  EXPECT_EQ(read_node_info("{}")->mode, "null");
  EXPECT_TRUE(check_node_info({"prefill", 0}, "prefill", /*knows_port=*/true).ok());
  EXPECT_FALSE(check_node_info({"prefill", 0}, "prefill", /*knows_port=*/false).ok());
  EXPECT_TRUE(check_node_info({"decode", 0}, "decode", false).ok());
}

}  // namespace
}  // namespace fp4moe
