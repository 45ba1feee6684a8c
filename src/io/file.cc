#include "io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

constexpr size_t kHugePageBytes = 2 << 20;

// RAII file descriptor.
struct Descriptor {
  explicit Descriptor(int descriptor) : fd(descriptor) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

Status system_error(const std::string& what, const std::string& path) {
  const int code = errno;
  const std::string message = what + " '" + path + "': " + std::strerror(code);
  return code == ENOENT || code == ENOTDIR ? not_found(message) : data_loss(message);
}

std::string partial(const std::string& path) { return path + NewFile::kSuffix; }

// The path that a chain of symbolic links leads to; the last link may name an absent file.
Result<std::string> follow_links(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr int kMaxLinks = 40;  // as in Linux
  fs::path target = path;
  for (int i = 0; i < kMaxLinks; ++i) {
    std::error_code error;
    const fs::path next = fs::read_symlink(target, error);
    if (error) return target.string();  // not a link
    target = target.parent_path() / next;
  }
  return data_loss("cannot create '" + path + "': too many levels of symbolic links");
}

// Returns 1 or 2 if that descriptor (stdout or stderr) refers to the file, as for /dev/stdout; -1 otherwise.
int standard_stream(const struct stat& info) {
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat open_file = {};
    if (::fstat(stream, &open_file) == 0 && open_file.st_dev == info.st_dev &&
        open_file.st_ino == info.st_ino)
      return stream;
  }
  return -1;
}

// Whether `path` still names the open file: another process may have renamed or removed it.
bool has_name(int fd, const std::string& path) {
  struct stat open_file = {}, named = {};
  return ::fstat(fd, &open_file) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

// Checks that only this process's user and root can write to `path`.
Status check_private(const struct stat& info, const std::string& path) {
  if (info.st_uid != ::geteuid() && info.st_uid != 0)
    return unsupported("'" + path + "' belongs to user " + std::to_string(info.st_uid) +
                       "; legal: " + std::to_string(::geteuid()) + " (this process's user) or 0");
  char mode[8];
  std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(info.st_mode & 07777));
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return unsupported("'" + path + "' has mode " + mode +
                       ": users other than its owner can write to it; only the owner may (run chmod go-w)");
  return {};
}

// Checked because a write that exceeds RLIMIT_FSIZE (ulimit -f) would kill the process with SIGXFSZ.
Status check_size_limit(const std::string& path, int64_t end) {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      static_cast<uint64_t>(end) <= limit.rlim_cur)
    return {};
  return does_not_fit("cannot write '" + path + "': it would have at least " + std::to_string(end) +
                      " bytes; the limit for this process is " + std::to_string(limit.rlim_cur) +
                      " (ulimit -f)");
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // don't block on a FIFO
  if (file.fd < 0) {
    const Status status = system_error("cannot open", path);
    if (status.code() != StatusCode::kNotFound || !file_exists(path)) return status;
    return not_found(status.message() +
                     " (it is a symbolic link to a missing file, as after a partial download)");
  }
  return map(file.fd, path);
}

Result<MappedFile> MappedFile::open_private(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (file.fd < 0 && errno == ELOOP) return unsupported("'" + path + "' is a symbolic link");
  struct stat info = {};
  if (file.fd < 0 || ::fstat(file.fd, &info) != 0) return system_error("cannot open", path);
  FP4MOE_RETURN_IF_ERROR(check_private(info, path));
  return map(file.fd, path);
}

Result<MappedFile> MappedFile::map(int fd, const std::string& path) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return system_error("cannot open", path);
  if (!S_ISREG(info.st_mode)) return data_loss("'" + path + "' is not a regular file");
  MappedFile mapped;
  mapped.modified_at_ = info.st_mtim.tv_sec * int64_t{1'000'000'000} + info.st_mtim.tv_nsec;
  if (info.st_size == 0) return mapped;
  const size_t num_bytes = static_cast<size_t>(info.st_size);
  void* address = ::mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (address == MAP_FAILED) return system_error("cannot map", path);
  mapped.bytes_ = {static_cast<const uint8_t*>(address), num_bytes};
  return mapped;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})), modified_at_(other.modified_at_) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(modified_at_, other.modified_at_);
  return *this;
}

bool MappedFile::keep_in_memory() const {
  if (bytes_.empty()) return true;
  ::madvise(const_cast<uint8_t*>(bytes_.data()), bytes_.size(), MADV_HUGEPAGE);  // for pages not read yet
  ::madvise(const_cast<uint8_t*>(bytes_.data()), bytes_.size(), MADV_WILLNEED);
  return ::mlock2(bytes_.data(), bytes_.size(), MLOCK_ONFAULT) == 0;
}

bool file_exists(const std::string& path) {
  struct stat info = {};
  return ::lstat(path.c_str(), &info) == 0;
}

Status make_private_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (const fs::path parent = fs::path(folder).parent_path(); !parent.empty())
    fs::create_directories(parent, error);
  if (::mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    const int code = errno;
    return data_loss("cannot create folder '" + folder + "': " + std::strerror(code));
  }
  struct stat info = {};
  if (::stat(folder.c_str(), &info) != 0) return system_error("cannot open folder", folder);
  if (!S_ISDIR(info.st_mode)) return data_loss("'" + folder + "' is not a folder");
  return check_private(info, folder);
}

Result<std::string> read_text_file(const std::string& path, int64_t max_bytes) {
  FP4MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const std::span<const uint8_t> bytes = file.bytes();
  if (static_cast<int64_t>(bytes.size()) > max_bytes)
    return data_loss("'" + path + "' has " + std::to_string(bytes.size()) + " bytes; at most " +
                     std::to_string(max_bytes) + " are allowed");
  return std::string(bytes.begin(), bytes.end());
}

Result<NewFile> NewFile::create(const std::string& path, Existing existing) {
  if (existing == Existing::kReplaceAnything) return create_beside(path);
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) return data_loss("cannot create '" + path + "': it is a folder");
    const int stream = standard_stream(info);
    if (stream >= 0 || !S_ISREG(info.st_mode)) return open_direct(path, stream);
  }
  FP4MOE_ASSIGN_OR_RETURN(const std::string target, follow_links(path));
  return create_beside(target);
}

Result<NewFile> NewFile::open_direct(const std::string& path, int stream) {
  NewFile file;
  file.is_direct_ = true;
  file.path_ = path;
  file.fd_ = stream >= 0 ? ::fcntl(stream, F_DUPFD_CLOEXEC, 0)
                         : ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (file.fd_ < 0) return system_error("cannot open", path);
  return file;
}

Result<NewFile> NewFile::create_beside(const std::string& path) {
  const std::string name = partial(path);
  for (;;) {
    NewFile file;
    file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file.fd_ < 0 && errno == ELOOP)
      return data_loss("cannot create '" + name + "': it is a symbolic link, which is not followed");
    if (file.fd_ < 0) return system_error("cannot create", name);
    if (::flock(file.fd_, LOCK_EX | LOCK_NB) != 0)
      return errno == EWOULDBLOCK ? unavailable("'" + name + "' is locked by another writer")
                                  : system_error("cannot lock", name);
    if (!has_name(file.fd_, name)) continue;  // its previous writer has just renamed or removed it
    file.path_ = path;
    if (::ftruncate(file.fd_, 0) != 0) return system_error("cannot truncate", name);
    return file;
  }
}

NewFile::~NewFile() {
  if (!path_.empty() && !is_direct_) ::unlink(partial(path_).c_str());
  if (fd_ >= 0) ::close(fd_);
}

NewFile::NewFile(NewFile&& other) noexcept
    : path_(std::exchange(other.path_, {})),
      fd_(std::exchange(other.fd_, -1)),
      is_direct_(other.is_direct_),
      num_bytes_(std::exchange(other.num_bytes_, 0)),
      tail_(std::move(other.tail_)) {}

NewFile& NewFile::operator=(NewFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(is_direct_, other.is_direct_);
  std::swap(num_bytes_, other.num_bytes_);
  std::swap(tail_, other.tail_);
  return *this;
}

Status NewFile::write_at(int64_t offset, std::span<const uint8_t> bytes) {
  if (!is_direct_) FP4MOE_RETURN_IF_ERROR(check_size_limit(path_, offset + std::ssize(bytes)));
  while (!bytes.empty()) {
    const ssize_t n = is_direct_ ? ::write(fd_, bytes.data(), bytes.size())
                                 : ::pwrite(fd_, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
      return does_not_fit("cannot write '" + path_ + "': no space left for " + std::to_string(bytes.size()) +
                          " bytes (" + std::strerror(errno) + ")");
    if (n < 0) return system_error("cannot write", path_);
    offset += n;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

// Writes whole huge pages at aligned offsets, so that the page cache holds them as huge pages and mappings of
// the file need few TLB entries.
Status NewFile::append(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const size_t room = kHugePageBytes - static_cast<size_t>(num_bytes_) % kHugePageBytes;
    const bool is_whole = room == kHugePageBytes && bytes.size() >= room;
    const size_t n = is_whole ? bytes.size() - bytes.size() % room : std::min(bytes.size(), room);
    if (is_whole) {
      FP4MOE_RETURN_IF_ERROR(write_end(bytes.first(n)));
    } else {
      tail_.insert(tail_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
    }
    num_bytes_ += static_cast<int64_t>(n);
    bytes = bytes.subspan(n);
    if (!is_whole && n == room) FP4MOE_RETURN_IF_ERROR(write_tail());
  }
  return {};
}

Status NewFile::write_tail() {
  num_bytes_ -= std::ssize(tail_);
  const Status status = write_end(tail_);
  num_bytes_ += std::ssize(tail_);
  tail_.clear();
  return status;
}

// Writes at num_bytes_ without advancing it.
Status NewFile::write_end(std::span<const uint8_t> bytes) {
  FP4MOE_RETURN_IF_ERROR(write_at(num_bytes_, bytes));
  if (is_direct_) return {};
  ::sync_file_range(fd_, num_bytes_, std::ssize(bytes), SYNC_FILE_RANGE_WRITE);  // commit() waits for it
  return {};
}

Status NewFile::overwrite(int64_t offset, std::span<const uint8_t> bytes) {
  FP4MOE_CHECK(offset >= 0 && offset + std::ssize(bytes) <= num_bytes_, "bytes past the end");
  if (is_direct_) return unsupported("'" + path_ + "' is not a file, but this output needs one");
  FP4MOE_RETURN_IF_ERROR(write_tail());
  return write_at(offset, bytes);
}

Status NewFile::commit(Access access) {
  FP4MOE_RETURN_IF_ERROR(write_tail());
  if (is_direct_) return {};
  if (::fsync(fd_) != 0) return system_error("cannot sync", partial(path_));
  if (::rename(partial(path_).c_str(), path_.c_str()) != 0) return system_error("cannot create", path_);
  // Not earlier: the partial file that a killed process leaves must stay writable for the next process.
  if (access == Access::kReadOnly) ::fchmod(fd_, S_IRUSR);
  path_.clear();
  return {};
}

Status write_file(const std::string& path, const std::function<Status(const ByteSink&)>& fill) {
  FP4MOE_ASSIGN_OR_RETURN(NewFile file, NewFile::create(path));
  FP4MOE_RETURN_IF_ERROR(fill([&](std::span<const uint8_t> bytes) { return file.append(bytes); }));
  return file.commit();
}

Status write_text_file(const std::string& path, std::string_view text) {
  return write_file(path, [&](const ByteSink& sink) {
    return sink({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  });
}

Status check_writable(const std::string& what, const std::string& path) {
  Status status;
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode) || S_ISDIR(info.st_mode)) {
    status = NewFile::create(path).status();
  } else if (::access(path.c_str(), W_OK) != 0) {  // opening a pipe would block, or end its reader's input
    status = system_error("cannot open", path);
  }
  if (status.ok() || status.code() == StatusCode::kUnavailable)
    return {};  // another process may check it too
  return invalid_argument(what + ": " + status.message());
}

}  // namespace fp4moe
