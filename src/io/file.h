// Maps files read-only, reads them whole, or replaces them atomically, so that a reader sees either the old
// content or the new content.
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
  // kNotFound, or kDataLoss if it is not a regular file or cannot be mapped; messages name the path.
  static Result<MappedFile> open(const std::string& path);
  // The same for a file that only this user and root can write: kUnsupported, naming the problem, if it is a
  // symbolic link, belongs to another user, or is writable by group or others.
  static Result<MappedFile> open_private(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const uint8_t> bytes() const { return bytes_; }
  // Prefetches the whole file and locks pages in memory once they are read. Returns false if the lock is
  // refused (RLIMIT_MEMLOCK).
  bool keep_in_memory() const;
  // Modification time of the content in nanoseconds since 1970.
  int64_t modified_at() const { return modified_at_; }

 private:
  static Result<MappedFile> map(int fd, const std::string& path);

  std::span<const uint8_t> bytes_;
  int64_t modified_at_ = 0;
};

// True for a symbolic link to a missing file too: reading it then fails with the path instead of silently
// being skipped.
bool file_exists(const std::string& path);
// Creates the folder, with mode 700, and its parents if they are absent. kUnsupported, naming the problem, if
// a user other than this process's user and root can add or remove files. kDataLoss: it cannot be created.
Status make_private_folder(const std::string& folder);
// Reads the whole file; kNotFound, or kDataLoss if it is longer than max_bytes.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);

// A file written beside `path` that replaces it on commit(). If `path` is a symbolic link, the file that it
// names is replaced. A device, pipe or socket, and what stdout or stderr refers to, is written directly.
// Movable, not copyable.
class NewFile {
 public:
  static constexpr const char* kSuffix = ".partial";  // of the file until commit()
  // Creates or truncates `path`.partial, which an earlier process may have left. kUnavailable: another
  // process is writing it. kNotFound, kDataLoss: it cannot be created, or is a symbolic link, or `path` is a
  // folder.
  // kReplaceAnything: for files in a private folder; even a link or a device is replaced.
  enum class Existing { kFollow, kReplaceAnything };
  static Result<NewFile> create(const std::string& path, Existing existing = Existing::kFollow);
  ~NewFile();  // removes the partial file unless committed
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&& other) noexcept;

  // Appends the bytes. kDoesNotFit if the disk is full (a later call may report it) or past RLIMIT_FSIZE.
  Status append(std::span<const uint8_t> bytes);
  // Replaces bytes that were appended before. kUnsupported: `path` is written directly.
  Status overwrite(int64_t offset, std::span<const uint8_t> bytes);
  int64_t num_bytes() const { return num_bytes_; }
  // Syncs the file and renames it to `path`; call no other function afterwards. kReadOnly: mode 400, so
  // that the file, which others may have mapped, can be replaced but not opened for writing and truncated.
  enum class Access { kDefault, kReadOnly };
  Status commit(Access access = Access::kDefault);

 private:
  NewFile() = default;
  static Result<NewFile> create_beside(const std::string& path);
  static Result<NewFile> open_direct(const std::string& path, int stream);
  Status write_at(int64_t offset, std::span<const uint8_t> bytes);
  Status write_tail();
  Status write_end(std::span<const uint8_t> bytes);

  std::string path_;
  int fd_ = -1;             // the locked partial file, or `path_` itself
  bool is_direct_ = false;  // `path_` is no regular file: bytes go to it at once, in order
  int64_t num_bytes_ = 0;
  std::vector<uint8_t> tail_;  // the last bytes, not written yet; fewer than a huge page
};

// Consumes the next bytes of a file being written.
using ByteSink = std::function<Status(std::span<const uint8_t>)>;
// Creates or replaces `path` with the bytes that `fill` pushes: written beside it, synced, then renamed. On
// any error `path` stays unchanged and the partial file is removed. Devices and pipes: see NewFile.
Status write_file(const std::string& path, const std::function<Status(const ByteSink&)>& fill);
Status write_text_file(const std::string& path, std::string_view text);
// Checks, before long work whose result NewFile will write to `path`, that it can be written; changes
// nothing. kInvalidArgument: it cannot; the message begins with `what`, such as a flag.
Status check_writable(const std::string& what, const std::string& path);

}  // namespace fp4moe
