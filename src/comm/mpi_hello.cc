#include "comm/mpi_hello.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

struct WireHello {
  int32_t process, num_processes, num_ranks;
  uint32_t first_signal;
  int64_t heap_bytes;
  uint64_t pid_space;
  int64_t pid;
  int64_t version_bytes, config_bytes, data_bytes;  // of the texts that follow
};
static_assert(sizeof(WireHello) == 64);

// Removes the next line and its newline from the text and returns the line.
std::string_view take_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

// For a message: the line in quotes, or "nothing" at the end of the text.
std::string quoted(std::string_view line, bool is_end) {
  return is_end ? "nothing" : "'" + std::string(line.substr(0, 200)) + "'";
}

// Returns the first pair of lines that differ; for equal texts {"nothing", "nothing"}.
std::pair<std::string, std::string> first_difference(std::string_view a, std::string_view b) {
  while (true) {
    const bool a_ends = a.empty(), b_ends = b.empty();
    const std::string_view line_a = take_line(a), line_b = take_line(b);
    if (line_a != line_b || a_ends != b_ends || a_ends)
      return {quoted(line_a, a_ends), quoted(line_b, b_ends)};
  }
}

Status differ(const Hello& mine, const Hello& theirs, const std::string& what, const std::string& my_value,
              const std::string& their_value) {
  return invalid_argument("processes " + std::to_string(mine.process) + " and " +
                          std::to_string(theirs.process) + " of the job disagree on " + what + ": " +
                          my_value + " on process " + std::to_string(mine.process) + ", " + their_value +
                          " on process " + std::to_string(theirs.process));
}

}  // namespace

std::vector<uint8_t> encode_hello(const Hello& h) {
  for (const std::string* text : {&h.version, &h.config, &h.data})
    FP4MOE_CHECK(static_cast<int64_t>(text->size()) <= kMaxHelloText,
                 "a hello with a text of " + std::to_string(text->size()) + " bytes");
  const WireHello wire = {h.process,
                          h.num_processes,
                          h.num_ranks,
                          h.first_signal,
                          h.heap_bytes,
                          h.pid_space,
                          h.pid,
                          static_cast<int64_t>(h.version.size()),
                          static_cast<int64_t>(h.config.size()),
                          static_cast<int64_t>(h.data.size())};
  std::vector<uint8_t> bytes(sizeof wire);
  std::memcpy(bytes.data(), &wire, sizeof wire);
  for (const std::string* text : {&h.version, &h.config, &h.data})
    bytes.insert(bytes.end(), text->begin(), text->end());
  return bytes;
}

Result<Hello> decode_hello(std::span<const uint8_t> bytes) {
  WireHello wire;
  const auto legal = [](int64_t n) { return n >= 0 && n <= kMaxHelloText; };
  if (bytes.size() < sizeof wire)
    return data_loss("hello of " + std::to_string(bytes.size()) + " bytes is too short");
  std::memcpy(&wire, bytes.data(), sizeof wire);
  if (!legal(wire.version_bytes) || !legal(wire.config_bytes) || !legal(wire.data_bytes) ||
      static_cast<int64_t>(bytes.size() - sizeof wire) !=
          wire.version_bytes + wire.config_bytes + wire.data_bytes)
    return data_loss("hello of " + std::to_string(bytes.size()) + " bytes does not match its text lengths, " +
                     std::to_string(wire.version_bytes) + ", " + std::to_string(wire.config_bytes) + " and " +
                     std::to_string(wire.data_bytes));
  const char* text = reinterpret_cast<const char*>(bytes.data() + sizeof wire);
  const auto take = [&text](int64_t num_bytes) {
    const std::string taken(text, static_cast<size_t>(num_bytes));
    text += num_bytes;
    return taken;
  };
  return Hello{wire.process,
               wire.num_processes,
               wire.num_ranks,
               wire.first_signal,
               wire.heap_bytes,
               wire.pid_space,
               wire.pid,
               take(wire.version_bytes),
               take(wire.config_bytes),
               take(wire.data_bytes)};
}

Status check_same(const Hello& mine, const Hello& theirs) {
  if (mine.version != theirs.version)
    return differ(mine, theirs, "the version", mine.version, theirs.version);
  const struct {
    const char* what;
    int64_t mine, theirs;
  } numbers[] = {{"num_processes", mine.num_processes, theirs.num_processes},
                 {"num_ranks", mine.num_ranks, theirs.num_ranks},
                 {"first_signal", mine.first_signal, theirs.first_signal}};
  for (const auto& n : numbers)
    if (n.mine != n.theirs)
      return differ(mine, theirs, n.what, std::to_string(n.mine), std::to_string(n.theirs));
  if (mine.config != theirs.config) {
    const auto [my_line, their_line] = first_difference(mine.config, theirs.config);
    return differ(mine, theirs, "the configuration", my_line, their_line);
  }
  if (mine.heap_bytes != theirs.heap_bytes)
    return differ(mine, theirs, "heap_bytes", std::to_string(mine.heap_bytes),
                  std::to_string(theirs.heap_bytes));
  return {};
}

}  // namespace fp4moe
