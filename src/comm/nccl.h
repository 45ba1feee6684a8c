// NCCL's host functions, opened on first use (device/library.h). No header of NCCL is compiled in, so one
// binary serves every version from kLeastNcclVersion on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "device/stream.h"
#include "fp4moe/status.h"

namespace fp4moe {

constexpr int kLeastNcclVersion = 22803;  // 10000 major + 100 minor + patch
// Returns "2.28.9" for 22809.
std::string nccl_version_text(int version);

// The declarations below are those of nccl.h 2.28; none of them has changed since 2.14.
enum class NcclResult : int {
  kSuccess = 0,
  kRemoteError = 6,
  kInProgress = 7
};                                                       // ncclResult_t; others: errors
enum class NcclType : int { kUint8 = 1, kFloat32 = 7 };  // ncclDataType_t
enum class NcclSum : int { kSum = 0 };                   // ncclRedOp_t
using NcclHandle = struct ncclComm*;                     // ncclComm_t
struct NcclId {                                          // ncclUniqueId
  std::array<char, 128> bytes{};
  bool operator==(const NcclId&) const = default;
};
// The first members of ncclConfig_t. NCCL reads `size` bytes, and uses its defaults for members that are
// newer than `version`.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  uint32_t magic = 0xcafebeef;
  uint32_t version = 21400;
  int blocking = 0;
};
static_assert(sizeof(NcclConfig) == 24);

// The functions that fp4moe uses. Those of a communicator may be called by one thread at a time.
struct Nccl {
  std::string path;  // of the library
  int version = 0;

  const char* (*error_string)(NcclResult) = nullptr;
  const char* (*last_error)(NcclHandle) = nullptr;
  NcclResult (*unique_id)(NcclId*) = nullptr;
  NcclResult (*init_rank)(NcclHandle*, int num_ranks, NcclId, int rank, NcclConfig*) = nullptr;
  NcclResult (*init_all)(NcclHandle*, int num_gpus, const int* ordinals) = nullptr;
  NcclResult (*async_error)(NcclHandle, NcclResult*) = nullptr;
  NcclResult (*abort)(NcclHandle) = nullptr;
  NcclResult (*destroy)(NcclHandle) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*send)(const void*, size_t count, NcclType, int peer, NcclHandle, StreamHandle) = nullptr;
  NcclResult (*receive)(void*, size_t count, NcclType, int peer, NcclHandle, StreamHandle) = nullptr;
  NcclResult (*all_reduce)(const void*, void*, size_t count, NcclType, NcclSum, NcclHandle,
                           StreamHandle) = nullptr;
  NcclResult (*all_gather)(const void*, void*, size_t count, NcclType, NcclHandle, StreamHandle) = nullptr;

  // Sets NCCL_NVLS_ENABLE=0 unless the environment has a value, because multicast is not used, and opens the
  // library. kUnsupported: it is missing, lacks a function, or is older than kLeastNcclVersion; the message
  // names the library's path, its version and the version needed.
  static Result<Nccl> open();

  // Returns OK for kSuccess and kInProgress; otherwise kInternal with the function's name and NCCL's
  // description of the error.
  Status check(const char* function, NcclResult result) const;
};

}  // namespace fp4moe
