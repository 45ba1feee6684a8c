#include "base/printable.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

TEST(Printable, KeepsAsciiAndEscapesTheRest) {
  EXPECT_EQ(printable("prefill-1.example:8998 ~"), "prefill-1.example:8998 ~");
  EXPECT_EQ(printable("a\nb\r\t"), "a\\x0ab\\x0d\\x09");
  EXPECT_EQ(printable("\x1b[31mred"), "\\x1b[31mred");
  EXPECT_EQ(printable("caf\xc3\xa9\xff\x7f"), "caf\\xc3\\xa9\\xff\\x7f");
  EXPECT_EQ(printable(std::string("\0x", 2)), "\\x00x");
  EXPECT_EQ(printable(""), "");
}

TEST(Printable, CutsLongTextsAndSaysTheirLength) {
  EXPECT_EQ(printable("abcdef", 6), "abcdef");
  EXPECT_EQ(printable("abcdefg", 6), "abcdef... (7 bytes)");
  const std::string huge(20 << 20, '\x1b');
  const std::string shown = printable(huge, 100);
  EXPECT_EQ(shown.size(), 4 * 100 + std::string("... (20971520 bytes)").size());
}

// Each byte value alone: the result is one line of printable ASCII.
TEST(Printable, EveryByteGivesPrintableAscii) {
  for (int byte = 0; byte < 256; ++byte)
    for (const char c : printable(std::string(1, static_cast<char>(byte))))
      EXPECT_TRUE(c >= 0x20 && c < 0x7f) << byte;
}

}  // namespace
}  // namespace fp4moe
