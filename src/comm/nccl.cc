#include "comm/nccl.h"

#include <cstdlib>

#include "device/library.h"

namespace fp4moe {
namespace {

Status bind_all(const Library& library, Nccl& nccl) {
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclGetErrorString", nccl.error_string));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclGetLastError", nccl.last_error));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclGetUniqueId", nccl.unique_id));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommInitRankConfig", nccl.init_rank));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommInitAll", nccl.init_all));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommGetAsyncError", nccl.async_error));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommAbort", nccl.abort));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommDestroy", nccl.destroy));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclGroupStart", nccl.group_start));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclGroupEnd", nccl.group_end));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclSend", nccl.send));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclRecv", nccl.receive));
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclAllReduce", nccl.all_reduce));
  return library.bind("ncclAllGather", nccl.all_gather);
}

}  // namespace

// Up to 2.8 the major number counts thousands.
std::string nccl_version_text(int version) {
  const int unit = version < 10000 ? 1000 : 10000;
  return std::to_string(version / unit) + "." + std::to_string(version % unit / 100) + "." +
         std::to_string(version % 100);
}

// The version comes first: an older library may lack functions, and its version explains why.
Result<Nccl> Nccl::open() {
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  FP4MOE_ASSIGN_OR_RETURN(const Library library, Library::open(LibraryId::kNccl));
  Nccl nccl;
  nccl.path = library.path();
  NcclResult (*get_version)(int*) = nullptr;
  FP4MOE_RETURN_IF_ERROR(library.bind("ncclGetVersion", get_version));
  const NcclResult result = get_version(&nccl.version);
  if (result != NcclResult::kSuccess || nccl.version < kLeastNcclVersion)
    return unsupported("NCCL at " + nccl.path + " has version " + nccl_version_text(nccl.version) +
                       "; needed: " + nccl_version_text(kLeastNcclVersion) + " or newer");
  FP4MOE_RETURN_IF_ERROR(bind_all(library, nccl));
  return nccl;
}

Status Nccl::check(const char* function, NcclResult result) const {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return {};
  std::string text = std::string(function) + ": " + error_string(result);
  if (const char* const details = last_error(nullptr); details != nullptr && *details != '\0')
    text += std::string(" (") + details + ")";
  return internal_error(text);
}

}  // namespace fp4moe
