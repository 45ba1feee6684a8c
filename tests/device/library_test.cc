// Tests the search for libraries and the error if a library is not found.
#include "device/library.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

namespace fp4moe {
namespace {

std::string made_directory(const std::string& path) {
  std::filesystem::create_directories(path);
  return path;
}

TEST(Library, CandidatesInOrder) {
  const std::string root = testing::TempDir() + "library_test";
  const std::string pip = made_directory(root + "/lib/python3.11/site-packages/nvidia/cublas/lib");
  const std::string toolkit = made_directory(root + "/cuda-toolkit/lib");
  const LibrarySearch search{.directories = "/first:/second", .toolkit = "/toolkit", .prefixes = {root}};
  const std::vector<std::string> expected = {"/first/libcublasLt.so.13",
                                             "/first/libcublasLt.so.12",
                                             "/second/libcublasLt.so.13",
                                             "/second/libcublasLt.so.12",
                                             "libcublasLt.so.13",
                                             "libcublasLt.so.12",
                                             "/toolkit/lib64/libcublasLt.so.13",
                                             "/toolkit/lib64/libcublasLt.so.12",
                                             toolkit + "/libcublasLt.so.13",
                                             toolkit + "/libcublasLt.so.12",
                                             pip + "/libcublasLt.so.13",
                                             pip + "/libcublasLt.so.12"};
  EXPECT_EQ(library_candidates(LibraryId::kCublasLt, search), expected);
  std::filesystem::remove_all(root);
}

TEST(Library, OneNameForAllVersionsIsTriedOnce) {
  const std::vector<std::string> expected = {"libnccl.so.2", "/toolkit/lib64/libnccl.so.2"};
  EXPECT_EQ(library_candidates(LibraryId::kNccl, {.directories = "", .toolkit = "/toolkit", .prefixes = {}}),
            expected);
}

TEST(Library, TheEnvironmentComesFirst) {
  ASSERT_EQ(setenv("FP4MOE_CUDA_LIBS", "/of/the/user", 1), 0);
  EXPECT_EQ(library_candidates(LibraryId::kCudnn, library_search())[0], "/of/the/user/libcudnn.so.9");
  unsetenv("FP4MOE_CUDA_LIBS");
}

TEST(Library, TheMessageSaysWhatWasTriedAndWhatHelps) {
  EXPECT_EQ(library_missing(LibraryId::kCudnn, {"libcudnn.so.9", "/a/libcudnn.so.9: wrong ELF class"}),
            "cuDNN (libcudnn.so.9) was not found; tried libcudnn.so.9, /a/libcudnn.so.9: wrong ELF class; "
            "install it with scripts/setup --cuda or pip install nvidia-cudnn-cu13, or set FP4MOE_CUDA_LIBS "
            "to its folder");
}

}  // namespace
}  // namespace fp4moe
