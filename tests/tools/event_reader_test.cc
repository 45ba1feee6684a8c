#include "bench/event_reader.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

using Events = std::vector<std::string>;

constexpr std::string_view kStream =
    ": a comment\ndata: {\"a\": 1}\n\n"
    "event: news\r\ndata:two\r\ndata:  lines\r\n\r\n"
    "id: 7\n\n"        // no data, so no event
    "data\ndata:\n\n"  // an event with an empty line
    "data: é\r\rdata: [DONE]\n\n";
const Events kEvents = {"{\"a\": 1}", "two\n lines", "", "é", "[DONE]"};

Events read_in_pieces(const std::vector<std::string_view>& pieces) {
  EventReader reader;
  Events events;
  for (const std::string_view piece : pieces) {
    for (std::string& event : reader.read(piece)) events.push_back(std::move(event));
  }
  return events;
}

TEST(EventReader, TwoPiecesAtAnyByte) {
  for (size_t at = 0; at <= kStream.size(); ++at)
    EXPECT_EQ(read_in_pieces({kStream.substr(0, at), kStream.substr(at)}), kEvents) << at;
}

TEST(EventReader, BytePerByte) {
  std::vector<std::string_view> pieces;
  for (size_t at = 0; at < kStream.size(); ++at) pieces.push_back(kStream.substr(at, 1));
  EXPECT_EQ(read_in_pieces(pieces), kEvents);
}

TEST(EventReader, AnEventEndsWithAnEmptyLine) {
  EXPECT_EQ(read_in_pieces({"data: 1\n"}), Events{});
  EXPECT_EQ(read_in_pieces({"data: 1\n", "\n"}), Events{"1"});
  EXPECT_EQ(read_in_pieces({"data: 1\r\n\r"}), Events{"1"});
}

}  // namespace
}  // namespace fp4moe
