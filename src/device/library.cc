#include "device/library.h"

#include <dlfcn.h>
#include <glob.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace fp4moe {
namespace {

struct LibraryNames {
  const char* name;
  const char* sonames[2];  // for CUDA 13 and for CUDA 12; null: as for CUDA 13
  const char* package;     // Python package
};

const LibraryNames& names_of(LibraryId id) {
  static constexpr LibraryNames kNames[] = {
      {"cuBLASLt", {"libcublasLt.so.13", "libcublasLt.so.12"}, "nvidia-cublas"},
      {"cuDNN", {"libcudnn.so.9", nullptr}, "nvidia-cudnn-cu13"},
      {"NCCL", {"libnccl.so.2", nullptr}, "nvidia-nccl-cu13"},
  };
  return kNames[static_cast<size_t>(id)];
}

// Returns the directories that match `pattern`, sorted.
std::vector<std::string> matching_directories(const std::string& pattern) {
  std::vector<std::string> found;
  glob_t result{};
  if (glob(pattern.c_str(), GLOB_ONLYDIR, nullptr, &result) == 0)
    for (size_t i = 0; i < result.gl_pathc; ++i) found.emplace_back(result.gl_pathv[i]);
  globfree(&result);
  return found;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

LibrarySearch library_search() {
  LibrarySearch search{
      .directories = environment("FP4MOE_CUDA_LIBS"), .toolkit = "/usr/local/cuda", .prefixes = {}};
  std::error_code error;
  const std::filesystem::path binary = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {  // build/<preset>/bin/fp4moe -> build
    const std::filesystem::path build = binary.parent_path().parent_path().parent_path();
    search.prefixes.push_back(build.string());
    search.prefixes.push_back((build / "venv").string());
  }
  if (const std::string venv = environment("VIRTUAL_ENV"); !venv.empty()) search.prefixes.push_back(venv);
  for (const char* prefix : {"/usr/local", "/usr"}) search.prefixes.emplace_back(prefix);
  return search;
}

std::vector<std::string> library_candidates(LibraryId id, const LibrarySearch& search) {
  std::vector<std::string> directories = split(search.directories, ':');
  directories.emplace_back();  // empty: the loader's path
  directories.push_back(search.toolkit + "/lib64");
  for (const std::string& prefix : search.prefixes) {
    for (const char* pattern :
         {"/cuda-toolkit/lib64", "/cuda-toolkit/lib", "/lib/python3*/site-packages/nvidia/*/lib",
          "/lib/python3*/dist-packages/nvidia/*/lib"})
      for (std::string& directory : matching_directories(prefix + pattern))
        directories.push_back(std::move(directory));
  }
  std::vector<std::string> candidates;
  for (const std::string& directory : directories)
    for (const char* soname : names_of(id).sonames)
      if (soname != nullptr) candidates.push_back(directory.empty() ? soname : directory + "/" + soname);
  return candidates;
}

std::string library_missing(LibraryId id, const std::vector<std::string>& tried) {
  const LibraryNames& names = names_of(id);
  std::string text = std::string(names.name) + " (" + names.sonames[0] + ") was not found; tried";
  for (const std::string& candidate : tried) text += " " + candidate + ",";
  text.back() = ';';
  return text + " install it with scripts/setup --cuda or pip install " + names.package +
         ", or set FP4MOE_CUDA_LIBS to its folder";
}

Result<Library> Library::open(LibraryId id) {
  std::vector<std::string> tried;
  for (const std::string& path : library_candidates(id, library_search())) {
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); handle != nullptr)
      return Library(id, path, handle);
    const char* reason = dlerror();
    tried.push_back(reason != nullptr && std::filesystem::exists(path) ? reason : path);  // `reason` names it
  }
  return unsupported(library_missing(id, tried));
}

Status Library::find(const char* symbol, void*& address) const {
  address = dlsym(handle_, symbol);
  if (address != nullptr) return {};
  return unsupported(std::string(names_of(id_).name) + " at " + path_ + " has no " + symbol +
                     ": it is too old or damaged");
}

}  // namespace fp4moe
