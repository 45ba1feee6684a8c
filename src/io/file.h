// Files: mapped read-only, read whole, or written so that a reader sees the old content or the new one.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

// A regular file's bytes, mapped read-only. Movable, not copyable; an empty file maps to an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  // kNotFound, or kDataLoss where it is no regular file or cannot be mapped; messages name the path.
  static Result<MappedFile> open(const std::string& path);
  // The same for a file that only this user and root can have written: kUnsupported, naming the problem, if
  // it is a symbolic link, belongs to another user, or is writable by group or others.
  static Result<MappedFile> open_private(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const uint8_t> bytes() const { return bytes_; }
  // Tells the system that all of it will be read soon, and that what has been read is to stay in memory;
  // whether it agrees to the latter (RLIMIT_MEMLOCK).
  bool keep_in_memory() const;
  // Of its content, in nanoseconds since 1970.
  int64_t modified_at() const { return modified_at_; }

 private:
  static Result<MappedFile> map(int fd, const std::string& path);

  std::span<const uint8_t> bytes_;
  int64_t modified_at_ = 0;
};

bool file_exists(const std::string& path);
// Creates the folder, with mode 700, and its parents if they are absent. kUnsupported, naming the problem, if
// a user other than this process's and root could add or remove files. kDataLoss: it cannot be created.
Status make_private_folder(const std::string& folder);
// The whole file; kNotFound, or kDataLoss if it is longer than max_bytes.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);

// A file that is written beside `path` and takes its place once it is whole. Movable, not copyable.
class NewFile {
 public:
  // Begins `path`.partial, of which whatever an earlier process left is dropped. kUnavailable: somebody is
  // writing it. kNotFound, kDataLoss: it cannot be created, or is a symbolic link.
  static Result<NewFile> create(const std::string& path);
  ~NewFile();  // removes what was not committed
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&& other) noexcept;

  // At the end. kDoesNotFit where no space is left, which may show only later, and past RLIMIT_FSIZE.
  Status append(std::span<const uint8_t> bytes);
  // Over what was appended.
  Status overwrite(int64_t offset, std::span<const uint8_t> bytes);
  int64_t num_bytes() const { return num_bytes_; }
  // The file under its name, synced. Nothing may follow. Read-only: by its owner alone, so that a file that
  // is mapped is replaced one day, but not opened for writing and truncated.
  enum class Access { kDefault, kReadOnly };
  Status commit(Access access = Access::kDefault);

 private:
  NewFile() = default;
  Status write_at(int64_t offset, std::span<const uint8_t> bytes);
  Status write_tail();
  Status write_end(std::span<const uint8_t> bytes);

  std::string path_;
  int fd_ = -1;  // of the partial file, locked
  int64_t num_bytes_ = 0;
  std::vector<uint8_t> tail_;  // the last of them, not yet written: less than a huge page
};

// Takes the next bytes of a file that is being written.
using ByteSink = std::function<Status(std::span<const uint8_t>)>;
// Creates or replaces `path` with what `fill` pushes: written beside it, synced, then renamed. If anything
// fails, `path` stays as it was and the partial file is removed.
Status write_file(const std::string& path, const std::function<Status(const ByteSink&)>& fill);
Status write_text_file(const std::string& path, std::string_view text);

}  // namespace fp4moe
