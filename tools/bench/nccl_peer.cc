#include "bench/nccl_peer.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "device/library.h"

namespace fp4moe {
namespace {

// nccl.h, "Communicator creation" and "Collective communication": stable since 2.0.
using Comm = void*;
constexpr int kSuccess = 0, kUint8 = 1, kFloat32 = 7, kSum = 0;
constexpr int kLeastVersion = 21800;

struct Nccl {
  int (*version)(int*);
  int (*init_all)(Comm*, int, const int*);
  int (*destroy)(Comm);
  int (*all_reduce)(const void*, void*, size_t, int, int, Comm, StreamHandle);
  int (*all_gather)(const void*, void*, size_t, int, Comm, StreamHandle);
  int (*group_start)();
  int (*group_end)();
  const char* (*error)(int);

  static Result<Nccl> load() {
    FP4MOE_ASSIGN_OR_RETURN(const Library library, Library::open(LibraryId::kNccl));
    Nccl nccl{};
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclGetVersion", nccl.version));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommInitAll", nccl.init_all));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclCommDestroy", nccl.destroy));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclAllReduce", nccl.all_reduce));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclAllGather", nccl.all_gather));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclGroupStart", nccl.group_start));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclGroupEnd", nccl.group_end));
    FP4MOE_RETURN_IF_ERROR(library.bind("ncclGetErrorString", nccl.error));
    return nccl;
  }
};

class NcclRanks final : public NcclPeer {
 public:
  explicit NcclRanks(const Nccl& nccl) : nccl_(nccl) {}
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;
  ~NcclRanks() override {
    for (Comm comm : comms_) nccl_.destroy(comm);
  }
  Status open(std::span<const int> ordinals) {
    std::vector<Comm> comms(ordinals.size());
    FP4MOE_RETURN_IF_ERROR(check(
        "ncclCommInitAll", nccl_.init_all(comms.data(), static_cast<int>(ordinals.size()), ordinals.data())));
    comms_ = std::move(comms);
    return {};
  }

  Status all_reduce(int rank, float* data, int64_t n, StreamHandle stream) const override {
    return check("ncclAllReduce",
                 nccl_.all_reduce(data, data, static_cast<size_t>(n), kFloat32, kSum, comm(rank), stream));
  }
  Status all_gather(int rank, const void* mine, int64_t num_bytes, void* out,
                    StreamHandle stream) const override {
    return check("ncclAllGather",
                 nccl_.all_gather(mine, out, static_cast<size_t>(num_bytes), kUint8, comm(rank), stream));
  }
  Status begin() const override { return check("ncclGroupStart", nccl_.group_start()); }
  Status end() const override { return check("ncclGroupEnd", nccl_.group_end()); }

 private:
  Comm comm(int rank) const { return comms_[static_cast<size_t>(rank)]; }
  Status check(const char* what, int result) const {
    if (result == kSuccess) return {};
    return internal_error(std::string(what) + ": " + nccl_.error(result));
  }

  Nccl nccl_;
  std::vector<Comm> comms_;
};

}  // namespace

Result<std::unique_ptr<NcclPeer>> NcclPeer::make(std::span<const int> ordinals) {
  if (std::set<int>(ordinals.begin(), ordinals.end()).size() != ordinals.size())
    return unsupported("NCCL does not support two ranks on one GPU");
  FP4MOE_ASSIGN_OR_RETURN(const Nccl nccl, Nccl::load());
  int version = 0;
  if (nccl.version(&version) != kSuccess || version < kLeastVersion)
    return unsupported("NCCL version " + std::to_string(version) + " is too old; it must be at least " +
                       std::to_string(kLeastVersion));
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);  // do not use multicast
  auto ranks = std::make_unique<NcclRanks>(nccl);
  FP4MOE_RETURN_IF_ERROR(ranks->open(ordinals));
  return std::unique_ptr<NcclPeer>(std::move(ranks));
}

}  // namespace fp4moe
