// CUDA libraries that are opened on demand (dlopen). Nothing links against them, so the binary runs on
// machines that lack them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

enum class LibraryId : uint8_t { kCublasLt, kCudnn, kNccl };

// An open library. It is never closed, so its functions stay valid until the process ends.
class Library {
 public:
  // Opens the first of library_candidates() that can be loaded. kUnsupported if there is none: the message
  // gives the library's name, the paths tried, and how to install the library.
  static Result<Library> open(LibraryId id);

  const std::string& path() const { return path_; }  // as passed to dlopen()
  // Sets `out` to the function `symbol`. kUnsupported if this version of the library lacks it.
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

// The places where libraries are searched for, in addition to the loader's path.
struct LibrarySearch {
  std::string directories;            // FP4MOE_CUDA_LIBS: separated by ':', tried first
  std::string toolkit;                // "/usr/local/cuda"
  std::vector<std::string> prefixes;  // may contain cuda-toolkit/ and Python's site-packages
};
// Returns the places for this process, from the environment, the build folder (scripts/setup --cuda) and
// Python's prefixes.
LibrarySearch library_search();

// Returns the file names to try, in order: in every directory, the name for CUDA 13 and then the one for
// CUDA 12. Reads directories.
std::vector<std::string> library_candidates(LibraryId id, const LibrarySearch& search);
// Returns open()'s error message for the case that no candidate could be loaded.
std::string library_missing(LibraryId id, const std::vector<std::string>& tried);

}  // namespace fp4moe
