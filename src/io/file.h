// Files: mapped read-only, read whole, or written so that a reader sees the old content or the new one.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "fp4moe/status.h"

namespace fp4moe {

// A regular file's bytes, mapped read-only. Movable, not copyable; an empty file maps to an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  // kNotFound, or kDataLoss where it is no regular file or cannot be mapped; messages name the path.
  static Result<MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const uint8_t> bytes() const { return bytes_; }

 private:
  std::span<const uint8_t> bytes_;
};

bool file_exists(const std::string& path);
// The whole file; kNotFound, or kDataLoss if it is longer than max_bytes.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);

// Takes the next bytes of a file that is being written.
using ByteSink = std::function<Status(std::span<const uint8_t>)>;
// Creates or replaces `path` with what `fill` pushes: written beside it, synced, then renamed. If anything
// fails, `path` stays as it was and the partial file is removed.
Status write_file(const std::string& path, const std::function<Status(const ByteSink&)>& fill);
Status write_text_file(const std::string& path, std::string_view text);

}  // namespace fp4moe
