// CUDA libraries that are opened when something needs them. Nothing links against them, so the binary runs on
// machines that lack them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

enum class LibraryId : uint8_t { kCublasLt, kCudnn, kNccl };

// An opened library. It stays open until the process ends: what it gives out may be called at any time.
class Library {
 public:
  // The first of library_candidates() that the system's loader takes. kUnsupported if it takes none: the
  // message has the library's name, what was tried, and how to get it.
  static Result<Library> open(LibraryId id);

  const std::string& path() const { return path_; }  // as it was opened
  // `out` = the function `symbol`. kUnsupported if this version of the library lacks it.
  template <class Function>
  Status bind(const char* symbol, Function*& out) const {
    void* address = nullptr;
    Status status = find(symbol, address);
    out = reinterpret_cast<Function*>(address);
    return status;
  }

 private:
  Library(LibraryId id, std::string path, void* handle) : id_(id), path_(std::move(path)), handle_(handle) {}
  Status find(const char* symbol, void*& address) const;

  LibraryId id_;
  std::string path_;
  void* handle_;
};

// Where libraries are looked for besides the loader's own path.
struct LibrarySearch {
  std::string directories;            // FP4MOE_CUDA_LIBS: separated by ':', tried first
  std::string toolkit;                // "/usr/local/cuda"
  std::vector<std::string> prefixes;  // cuda-toolkit/ and Python's site-packages may be under these
};
// Of this process: the environment, what scripts/setup --cuda made beside the binary, Python's prefixes.
LibrarySearch library_search();

// File names to try, in order: every directory with the name of CUDA 13 and that of 12. Reads directories.
std::vector<std::string> library_candidates(LibraryId id, const LibrarySearch& search);
// What open() says when it found none.
std::string library_missing(LibraryId id, const std::vector<std::string>& tried);

}  // namespace fp4moe
