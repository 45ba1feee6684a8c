// Files are written next to their final name, by one writer at a time.
#include "io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "io/temp_folder.h"

namespace fp4moe {
namespace {

std::span<const uint8_t> bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string content(const std::string& path) { return *read_text_file(path, 1 << 20); }

TEST(MappedFile, SaysWhetherItStaysInMemory) {
  const TempFolder folder;
  const std::string path = folder.file("f"), text(8192, 'x');
  ASSERT_TRUE(write_text_file(path, text).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    const Result<MappedFile> file = MappedFile::open(path);
    const rlimit nothing = {0, 0};
    const bool refused = ::setrlimit(RLIMIT_MEMLOCK, &nothing) == 0 &&
                         (::geteuid() != 0 || ::seteuid(65534) == 0) && !file->keep_in_memory();
    const std::span<const uint8_t> read = file->bytes();
    _exit(refused && std::string(read.begin(), read.end()) == text ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(MappedFile().keep_in_memory()) << "an empty mapping has nothing to keep";
}

TEST(MappedFile, NamesALinkToAMissingFile) {
  const TempFolder folder;
  const std::string path = folder.file("link");
  std::filesystem::create_symlink("none", path);
  EXPECT_TRUE(file_exists(path)) << "it must not count as an absent optional file";
  const Status status = MappedFile::open(path).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "cannot open '" + path +
                                  "': No such file or directory (it is a symbolic link to a " +
                                  "missing file, as after a partial download)");
}

TEST(NewFile, TakesItsPlaceWhenItIsCommitted) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  ASSERT_TRUE(write_text_file(path, "old").ok());
  Result<NewFile> file = NewFile::create(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->append(bytes("-ew ")).ok());
  ASSERT_TRUE(file->append(bytes("content")).ok());
  ASSERT_TRUE(file->overwrite(0, bytes("n")).ok());
  EXPECT_EQ(file->num_bytes(), 11);
  EXPECT_EQ(content(path), "old");
  ASSERT_TRUE(file->commit().ok());
  EXPECT_EQ(content(path), "new content");
  EXPECT_FALSE(file_exists(path + ".partial"));
}

// NewFile buffers bytes and writes whole huge pages. Pieces of any length and overwrites of buffered bytes
// must work.
TEST(NewFile, AnyPiecesMakeTheSameFile) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  constexpr size_t kMiB = 1 << 20;
  std::string whole;
  Result<NewFile> file = NewFile::create(path);
  ASSERT_TRUE(file.ok());
  for (const size_t n : {size_t{1}, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB, kMiB, size_t{0}, size_t{7}, 3 * kMiB}) {
    std::string piece(n, '\0');
    for (size_t i = 0; i < n; ++i) piece[i] = static_cast<char>((whole.size() + i) * 2654435761u >> 13);
    ASSERT_TRUE(file->append(bytes(piece)).ok());
    whole += piece;
    const size_t at = whole.size() - std::min<size_t>(whole.size(), 3);
    ASSERT_TRUE(n % 2 == 0 || file->overwrite(static_cast<int64_t>(at), bytes("x")).ok());
    if (n % 2 != 0) whole[at] = 'x';
  }
  EXPECT_EQ(file->num_bytes(), std::ssize(whole));
  ASSERT_TRUE(file->commit().ok());
  EXPECT_TRUE(*read_text_file(path, 1 << 30) == whole);
}

TEST(NewFile, WhatIsNotCommittedIsRemoved) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  { ASSERT_TRUE(NewFile::create(path)->append(bytes("half")).ok()); }
  EXPECT_FALSE(file_exists(path));
  EXPECT_FALSE(file_exists(path + ".partial"));
}

TEST(NewFile, WhatAKilledProcessLeftIsDropped) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  const pid_t child = ::fork();
  if (child == 0) {
    Result<NewFile> file = NewFile::create(path);
    _exit(file.ok() && file->append(bytes(std::string(3 << 20, 'h'))).ok() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(file_exists(path + ".partial"));
  Result<NewFile> file = NewFile::create(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->append(bytes("whole")).ok());
  ASSERT_TRUE(file->commit().ok());
  EXPECT_EQ(content(path), "whole");
}

TEST(NewFile, OneWriterAtATime) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  Result<NewFile> first = NewFile::create(path);
  ASSERT_TRUE(first->append(bytes("first")).ok());
  const Status second = NewFile::create(path).status();
  EXPECT_EQ(second.code(), StatusCode::kUnavailable);
  EXPECT_EQ(second.message(), "'" + path + ".partial' is locked by another writer");
  ASSERT_TRUE(first->commit().ok());
  // The lock belonged to the file that was renamed, so a third writer can start a new file.
  Result<NewFile> third = NewFile::create(path);
  ASSERT_TRUE(third.ok()) << third.status().to_string();
  ASSERT_TRUE(third->append(bytes("third")).ok());
  EXPECT_EQ(content(path), "first");
  ASSERT_TRUE(third->commit().ok());
  EXPECT_EQ(content(path), "third");
}

TEST(NewFile, AFileSizeLimitDoesNotFit) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  const pid_t child = ::fork();  // the limit is per process
  if (child == 0) {
    const rlimit limit = {2 << 20, 2 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    Result<NewFile> file = NewFile::create(path);
    const std::string page(2 << 20, 'x');
    const bool first = file->append(bytes(page)).ok();
    const Status second = file->append(bytes(page));
    const bool held = file->append(bytes("x")).ok();  // buffered until a huge page is full
    const Status last = file->commit();
    const auto does_not_fit = StatusCode::kDoesNotFit;
    _exit(first && second.code() == does_not_fit && held && last.code() == does_not_fit ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(file_exists(path));
}

TEST(NewFile, FollowsSymbolicLinks) {
  const TempFolder folder;
  ASSERT_TRUE(std::filesystem::create_directory(folder.file("d")));
  ASSERT_TRUE(write_text_file(folder.file("d/f"), "old").ok());
  std::filesystem::create_symlink("d/f", folder.file("relative"));
  std::filesystem::create_symlink(folder.file("relative"), folder.file("chain"));
  std::filesystem::create_symlink("d/new", folder.file("dangling"));
  std::filesystem::create_symlink("loop", folder.file("loop"));
  ASSERT_TRUE(write_text_file(folder.file("chain"), "new").ok());
  ASSERT_TRUE(write_text_file(folder.file("dangling"), "made").ok());
  EXPECT_EQ(content(folder.file("d/f")), "new");
  EXPECT_EQ(content(folder.file("d/new")), "made");
  for (const char* name : {"relative", "chain", "dangling"})
    EXPECT_TRUE(std::filesystem::is_symlink(folder.file(name))) << name;
  EXPECT_EQ(write_text_file(folder.file("loop"), "").message(),
            "cannot create '" + folder.file("loop") + "': too many levels of symbolic links");
}

TEST(NewFile, WritesDirectlyIntoAPipe) {
  const TempFolder folder;
  const std::string path = folder.file("p"), text(3 << 20, 'x');
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] {
    std::ifstream pipe(path);
    received.assign(std::istreambuf_iterator<char>(pipe), {});
  });
  const Status status = write_text_file(path, text);
  reader.join();
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(received == text);
  EXPECT_TRUE(std::filesystem::is_fifo(path));
}

// Private device nodes, so that a failure destroys no node of the system.
TEST(NewFile, WritesDirectlyIntoADevice) {
  const TempFolder folder;
  const std::string null = folder.file("null"), full = folder.file("full");
  if (::mknod(null.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0 ||
      ::mknod(full.c_str(), S_IFCHR | 0666, makedev(1, 7)) != 0)
    GTEST_SKIP() << "device nodes cannot be created";
  const Status status = write_text_file(null, "text");
  if (!status.ok() && status.message().find("Permission denied") != std::string::npos)
    GTEST_SKIP() << "device nodes cannot be opened here";
  EXPECT_TRUE(status.ok()) << status.to_string();
  const Status no_space = write_text_file(full, "text");
  EXPECT_EQ(no_space.code(), StatusCode::kDoesNotFit);
  EXPECT_NE(no_space.message().find("'" + full + "'"), std::string::npos) << no_space.message();
  EXPECT_TRUE(std::filesystem::is_character_file(null) && std::filesystem::is_character_file(full));
  Result<NewFile> file = NewFile::create(null);
  ASSERT_TRUE(file.ok() && file->append(bytes("text")).ok());
  EXPECT_EQ(file->overwrite(0, bytes("x")).code(), StatusCode::kUnsupported);
}

// "--output /dev/stdout >file" must not replace the file that the shell has opened.
TEST(NewFile, WritesIntoTheFileThatStdoutNames) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  const pid_t child = ::fork();
  if (child == 0) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT, 0600);
    const bool ok = fd >= 0 && ::dup2(fd, STDOUT_FILENO) >= 0 && ::write(STDOUT_FILENO, "a", 1) == 1 &&
                    write_text_file("/dev/stdout", "b").ok() && ::write(STDOUT_FILENO, "c", 1) == 1;
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(content(path), "abc");
}

TEST(NewFile, RefusesAFolder) {
  const TempFolder folder;
  EXPECT_EQ(write_text_file(folder.path(), "").message(),
            "cannot create '" + folder.path() + "': it is a folder");
  EXPECT_FALSE(file_exists(folder.path() + ".partial"));
}

TEST(CheckWritable, RefusesWhatCannotBeWrittenAndChangesNothing) {
  const TempFolder folder;
  ASSERT_TRUE(write_text_file(folder.file("f"), "old").ok());
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  for (const char* name : {"f", "new", "pipe"})
    EXPECT_TRUE(check_writable("--out", folder.file(name)).ok()) << name;
  EXPECT_EQ(content(folder.file("f")), "old");
  EXPECT_FALSE(file_exists(folder.file("new")) || file_exists(folder.file("new.partial")));
  for (const std::string& path : {folder.path(), folder.file("none/f"), folder.file("f/g")}) {
    const Status status = check_writable("--out", path);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().find("--out: cannot create '" + path), 0) << status.message();
  }
}

TEST(NewFile, NamesTheFolderThatIsNone) {
  const TempFolder folder;
  ASSERT_TRUE(write_text_file(folder.file("f"), "").ok());
  const Status status = NewFile::create(folder.file("f/g")).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("cannot create '" + folder.file("f/g.partial")), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
