#include "log_writer.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>

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

std::string print(const json& object) {
  return object.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace

void LogWriter::line(LogLevel level, const std::string& line) {
  if (level < least_) return;
  if (format_ == Format::kText)
    return write(local_time() + (level >= LogLevel::kWarning ? name_of(level) + std::string(": ") : "") +
                 line + "\n");
  json object = json_head(level);
  object["message"] = line;
  write(print(object));
}

void LogWriter::event(const std::string& name, const std::string& text, const std::string& fields) {
  if (LogLevel::kInfo < least_) return;
  if (format_ == Format::kText) return write(local_time() + text + "\n");
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
