#include "bench/nccl_peer.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "comm/nccl.h"

namespace fp4moe {
namespace {

class NcclRanks final : public NcclPeer {
 public:
  explicit NcclRanks(const Nccl& nccl) : nccl_(nccl) {}
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;
  ~NcclRanks() override {
    for (NcclHandle comm : comms_) nccl_.destroy(comm);
  }
  Status open(std::span<const int> ordinals) {
    std::vector<NcclHandle> comms(ordinals.size());
    FP4MOE_RETURN_IF_ERROR(nccl_.check(
        "ncclCommInitAll", nccl_.init_all(comms.data(), static_cast<int>(ordinals.size()), ordinals.data())));
    comms_ = std::move(comms);
    return {};
  }

  Status all_reduce(int rank, float* data, int64_t n, StreamHandle stream) const override {
    return nccl_.check("ncclAllReduce",
                       nccl_.all_reduce(data, data, static_cast<size_t>(n), NcclType::kFloat32, NcclSum::kSum,
                                        comm(rank), stream));
  }
  Status all_gather(int rank, const void* mine, int64_t num_bytes, void* out,
                    StreamHandle stream) const override {
    return nccl_.check("ncclAllGather", nccl_.all_gather(mine, out, static_cast<size_t>(num_bytes),
                                                         NcclType::kUint8, comm(rank), stream));
  }
  Status begin() const override { return nccl_.check("ncclGroupStart", nccl_.group_start()); }
  Status end() const override { return nccl_.check("ncclGroupEnd", nccl_.group_end()); }

 private:
  NcclHandle comm(int rank) const { return comms_[static_cast<size_t>(rank)]; }

  Nccl nccl_;
  std::vector<NcclHandle> comms_;
};

}  // namespace

Result<std::unique_ptr<NcclPeer>> NcclPeer::make(std::span<const int> ordinals) {
  if (std::set<int>(ordinals.begin(), ordinals.end()).size() != ordinals.size())
    return unsupported("NCCL does not support two ranks on one GPU");
  FP4MOE_ASSIGN_OR_RETURN(const Nccl nccl, Nccl::open());
  auto ranks = std::make_unique<NcclRanks>(nccl);
  FP4MOE_RETURN_IF_ERROR(ranks->open(ordinals));
  return std::unique_ptr<NcclPeer>(std::move(ranks));
}

}  // namespace fp4moe
