// Python's str operations on UTF-8. Every string_view here holds valid UTF-8; positions count code points.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fp4moe::jinja {

bool is_valid_utf8(std::string_view bytes);
void append_utf8(std::string& out, char32_t point);
// Returns the code point at bytes[at] and advances `at` past it.
char32_t next_point(std::string_view bytes, size_t& at);
size_t num_points(std::string_view bytes);
// Returns the byte offset of the code point with index `points`, or the size if there are fewer.
size_t byte_position(std::string_view bytes, size_t points);
std::vector<std::string_view> points(std::string_view bytes);

bool is_space(char32_t point);
enum class Sides { kBoth, kLeft, kRight };
std::string_view strip(std::string_view bytes, Sides sides);                          // strips white space
std::string_view strip(std::string_view bytes, Sides sides, std::string_view chars);  // strips code points

// Splits at runs of white space, or at `separator` (not empty); at most max_splits times unless that
// is negative.
std::vector<std::string_view> split(std::string_view bytes, int64_t max_splits, bool from_right);
std::vector<std::string_view> split(std::string_view bytes, std::string_view separator, int64_t max_splits,
                                    bool from_right);
std::vector<std::string_view> split_lines(std::string_view bytes, bool keep_ends);

std::string to_upper(std::string_view bytes);
std::string to_lower(std::string_view bytes);
std::string capitalize(std::string_view bytes);
std::string title(std::string_view bytes);         // str.title(): words are runs of letters
std::string title_filter(std::string_view bytes);  // Jinja's title filter: words start after space, - ( { [ <
// Python's str.isalpha(), str.isdigit() and so on.
enum class CharClass { kAlpha, kDigit, kAlnum, kSpace, kUpper, kLower };
bool all_of(std::string_view bytes, CharClass char_class);

std::string quoted(std::string_view bytes);       // repr()
std::string escape_html(std::string_view bytes);  // like MarkupSafe
std::string replace(std::string_view bytes, std::string_view from, std::string_view to, int64_t max_count);
int64_t count(std::string_view bytes, std::string_view part);

}  // namespace fp4moe::jinja
