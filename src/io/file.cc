#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

// A file descriptor that closes itself.
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

Status write_all(int fd, const std::string& path, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == ENOSPC)
      return does_not_fit("cannot write '" + path + "': no space left for " + std::to_string(bytes.size()) +
                          " bytes");
    if (n < 0) return system_error("cannot write", path);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

Status write_synced(const std::string& path, const std::function<Status(const ByteSink&)>& fill) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.fd < 0) return system_error("cannot create", path);
  FP4MOE_RETURN_IF_ERROR(
      fill([&](std::span<const uint8_t> bytes) { return write_all(file.fd, path, bytes); }));
  if (::fsync(file.fd) != 0) return system_error("cannot sync", path);
  return {};
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO must not block us
  struct stat info = {};
  if (file.fd < 0 || ::fstat(file.fd, &info) != 0) return system_error("cannot open", path);
  if (!S_ISREG(info.st_mode)) return data_loss("'" + path + "' is not a regular file");
  MappedFile mapped;
  if (info.st_size == 0) return mapped;
  const size_t num_bytes = static_cast<size_t>(info.st_size);
  void* address = ::mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (address == MAP_FAILED) return system_error("cannot map", path);
  mapped.bytes_ = {static_cast<const uint8_t*>(address), num_bytes};
  return mapped;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

Result<std::string> read_text_file(const std::string& path, int64_t max_bytes) {
  FP4MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const std::span<const uint8_t> bytes = file.bytes();
  if (static_cast<int64_t>(bytes.size()) > max_bytes)
    return data_loss("'" + path + "' has " + std::to_string(bytes.size()) + " bytes; at most " +
                     std::to_string(max_bytes) + " are legal");
  return std::string(bytes.begin(), bytes.end());
}

Status write_file(const std::string& path, const std::function<Status(const ByteSink&)>& fill) {
  const std::string partial = path + ".partial";
  Status status = write_synced(partial, fill);
  if (status.ok() && ::rename(partial.c_str(), path.c_str()) != 0)
    status = system_error("cannot create", path);
  if (!status.ok()) ::unlink(partial.c_str());
  return status;
}

Status write_text_file(const std::string& path, std::string_view text) {
  return write_file(path, [&](const ByteSink& sink) {
    return sink({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  });
}

}  // namespace fp4moe
