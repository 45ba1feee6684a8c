#include "serve/log_writer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string_view>

namespace fp4moe {

namespace {

using json = nlohmann::ordered_json;

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "info";
}

std::string local_time() {
  return fmt::format("[{:%Y-%m-%d %H:%M:%S}] ", fmt::localtime(std::time(nullptr)));
}

json json_head(LogLevel level) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  return {{"timestamp", fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(ms / 1000), ms % 1000)},
          {"level", name_of(level)}};
}

// Returns the length in bytes of the first UTF-8 character of `text`, or 0 if it is invalid.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const unsigned lead = byte(0);
  const size_t size = lead < 0x80   ? 1
                      : lead < 0xC2 ? 0
                      : lead < 0xE0 ? 2
                      : lead < 0xF0 ? 3
                      : lead < 0xF5 ? 4
                                    : 0;
  for (size_t i = 1; i < size; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  return size;
}

// Returns whether a terminal or a line reader could interpret the character: controls (C0 except tab, DEL,
// C1), line and paragraph separators, and characters that change the writing direction.
bool is_control(std::string_view character) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return (byte(0) < 0x20 && character != "\t") || byte(0) == 0x7F;
  if (character.size() == 2) return byte(0) == 0xC2 && byte(1) < 0xA0;
  if (character.size() != 3 || byte(0) != 0xE2) return false;
  return (byte(1) == 0x80 && byte(2) >= 0xA8 && byte(2) <= 0xAE) ||  // U+2028 to U+202E
         (byte(1) == 0x81 && byte(2) >= 0xA6 && byte(2) <= 0xA9);    // U+2066 to U+2069
}

// Escapes control characters: a line can contain names that clients supply, which must not start new lines or
// send escape sequences to a terminal.
std::string without_controls(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t size = character_bytes(text.substr(i));
    const std::string_view character = text.substr(i, std::max<size_t>(size, 1));
    if (size == 0 || is_control(character)) {
      for (const char c : character) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += character;
    }
    i += character.size();
  }
  return out;
}

// Serializes JSON and also escapes the control characters beyond C0, which JSON allows unescaped in strings.
std::string print(const json& object) {
  const std::string text = object.dump(-1, ' ', false, json::error_handler_t::replace);
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = std::string_view(text).substr(i);
    const std::string_view character = rest.substr(0, std::max<size_t>(character_bytes(rest), 1));
    if (is_control(character)) {
      const std::string escaped = json(character).dump(-1, ' ', /*ensure_ascii=*/true);
      out += escaped.substr(1, escaped.size() - 2);
    } else {
      out += character;
    }
    i += character.size();
  }
  return out + "\n";
}

}  // namespace

void LogWriter::line(LogLevel level, const std::string& line) {
  if (level < least_) return;
  if (format_ == Format::kText)
    return write(local_time() + (level >= LogLevel::kWarning ? name_of(level) + std::string(": ") : "") +
                 without_controls(line) + "\n");
  json object = json_head(level);
  object["message"] = line;
  write(print(object));
}

void LogWriter::event(const std::string& name, const std::string& text, const std::string& fields) {
  if (LogLevel::kInfo < least_) return;
  if (format_ == Format::kText) return write(local_time() + without_controls(text) + "\n");
  json object = json_head(LogLevel::kInfo);
  object["event"] = name;
  object.update(json::parse(fields));
  write(print(object));
}

void LogWriter::write(std::string bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (lost_ > 0) {
    const std::string message = std::to_string(lost_) + " log lines before this one could not be written";
    json object = json_head(LogLevel::kWarning);
    object["message"] = message;
    bytes.insert(0, format_ == Format::kText ? local_time() + "warning: " + message + "\n" : print(object));
  }
  lost_ = write_all(bytes) ? 0 : lost_ + 1;
}

bool LogWriter::write_all(const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t written = ::write(STDOUT_FILENO, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

}  // namespace fp4moe
