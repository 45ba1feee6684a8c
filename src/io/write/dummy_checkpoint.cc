#include "io/write/dummy_checkpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "base/hash.h"
#include "io/file.h"
#include "io/write/make_tiny_files.h"
#include "io/write/make_tiny_tensors.h"

namespace fp4moe {
namespace {

constexpr int64_t kPage = int64_t{64} << 10;  // a multiple of any system's page size
constexpr int64_t kLargestPool = int64_t{16} << 20;
constexpr int64_t kOffsetStep = 256;

constexpr int64_t whole_pages(int64_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

Status refused(const char* what) {
  return does_not_fit(std::string("the system refused ") + what +
                      " for dummy weights: " + std::strerror(errno));
}

// A pool of random bytes, mapped repeatedly into one contiguous address range.
class RandomPool {
 public:
  RandomPool() = default;
  RandomPool(const RandomPool&) = delete;
  RandomPool& operator=(const RandomPool&) = delete;
  ~RandomPool() {
    if (begin_ != nullptr) ::munmap(begin_, static_cast<size_t>(range_bytes_));
  }

  // Allocates a pool for tensors like `kind` with at most `largest` bytes each.
  Status make(const TinyTensor& kind, int64_t largest) {
    pool_bytes_ = std::min(whole_pages(4 * largest), kLargestPool);
    range_bytes_ = (largest + 2 * pool_bytes_ - 1) / pool_bytes_ * pool_bytes_;
    const int file = ::memfd_create("fp4moe dummy weights", MFD_CLOEXEC);
    if (file < 0) return refused("a memory file");
    Status status = fill(file, kind);
    if (status.ok()) status = map(file);
    ::close(file);
    return status;
  }
  const uint8_t* at(uint64_t hash) const {
    return begin_ +
           static_cast<int64_t>(hash % static_cast<uint64_t>(pool_bytes_ / kOffsetStep)) * kOffsetStep;
  }

 private:
  Status fill(int file, TinyTensor kind) {
    kind.spec.name = "dummy";
    kind.spec.shape = {pool_bytes_ * 8 / dtype_bits(kind.spec.dtype)};
    return fill_tiny_tensor(kind, 0, [file](std::span<const uint8_t> bytes) -> Status {
      while (!bytes.empty()) {
        const ssize_t written = ::write(file, bytes.data(), bytes.size());
        if (written <= 0) return refused("memory");
        bytes = bytes.subspan(static_cast<size_t>(written));
      }
      return {};
    });
  }
  Status map(int file) {
    void* range = ::mmap(nullptr, static_cast<size_t>(range_bytes_), PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return refused("address space");
    begin_ = static_cast<uint8_t*>(range);
    for (int64_t at = 0; at < range_bytes_; at += pool_bytes_)
      if (::mmap(begin_ + at, static_cast<size_t>(pool_bytes_), PROT_READ, MAP_SHARED | MAP_FIXED, file, 0) ==
          MAP_FAILED)
        return refused("address space");
    return {};
  }

  int64_t pool_bytes_ = 0, range_bytes_ = 0;
  uint8_t* begin_ = nullptr;
};

// Tensors of one kind differ only in name and shape.
using Kind = std::tuple<TinyContent, DType, float>;
Kind kind_of(const TinyTensor& tensor) { return {tensor.content, tensor.spec.dtype, tensor.level}; }

}  // namespace

Result<Checkpoint> dummy_checkpoint(const ModelConfig& config, const std::string& folder) {
  std::vector<TinyTensor> tensors = list_tiny_tensors(config);
  std::map<Kind, int64_t> largest;
  for (const TinyTensor& tensor : tensors) {
    FP4MOE_ASSIGN_OR_RETURN(const int64_t num_bytes, tensor_bytes(tensor.spec));
    int64_t& most = largest[kind_of(tensor)];
    most = std::max(most, num_bytes);
  }
  auto pools = std::make_shared<std::map<Kind, RandomPool>>();
  for (const TinyTensor& tensor : tensors) {
    const auto [pool, is_new] = pools->try_emplace(kind_of(tensor));
    if (is_new) FP4MOE_RETURN_IF_ERROR(pool->second.make(tensor, largest[kind_of(tensor)]));
  }
  std::vector<TensorEntry> entries;
  int64_t offset = 0;
  for (TinyTensor& tensor : tensors) {
    const std::string& name = tensor.spec.name;
    const uint64_t hash = hash64(name.data(), static_cast<int64_t>(name.size()), 0);
    TensorView view{.data = pools->at(kind_of(tensor)).at(hash),
                    .dtype = tensor.spec.dtype,
                    .shape = std::move(tensor.spec.shape)};
    const int64_t num_bytes = view.num_bytes();
    entries.push_back({std::move(tensor.spec.name), std::move(view), "dummy weights", offset});
    offset += num_bytes;
  }
  return Checkpoint::in_memory(folder, std::move(entries), std::move(pools));
}

Result<Checkpoint> open_weights(const std::string& folder, const std::string& load_format,
                                const ModelConfig& config) {
  return load_format == "dummy" ? dummy_checkpoint(config, folder) : Checkpoint::open(folder);
}

Result<Tokenizer> open_tokenizer(const std::string& path, const std::string& load_format) {
  if (load_format != "dummy" || file_exists(tokenizer_file(path))) return Tokenizer::load(path);
  FP4MOE_ASSIGN_OR_RETURN(const MakeTinyFiles files, make_tiny_files({}));
  return Tokenizer::parse(files.tokenizer.dump());
}

}  // namespace fp4moe
