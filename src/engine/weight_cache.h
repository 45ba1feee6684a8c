// WeightCache: the file that keeps a rank's packed weights, so that only the first start packs them. Later
// ones map it: processes share its pages, and what is never used is never read.
//
//   0     header: magic, version, sizes, hashes of itself and of the index (weight_cache.cc)
//   4096  the weights in the order of loading, each from a multiple of 4096 bytes on
//   then  the index: the key, the bytes of each weight (u64)
//
// The key is everything that the weights depend on. A file whose key is another one, or that is not whole, is
// refused with its reason and written anew. Headers and index are hashed, the weights are not: they are as
// safe as the checkpoint's own, which nobody hashes either.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/weight_store.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "model/plan_model.h"
#include "moe/rank_layout.h"

namespace fp4moe {

// Where a rank's weights are kept, or why they are not.
struct WeightCachePlace {
  std::string path;     // empty: nowhere
  std::string why_not;  // then
  std::string key;      // lines
};
WeightCachePlace weight_cache_place(const Checkpoint& checkpoint, const ModelPlan& plan,
                                    const RankLayout& layout);

class WeightCache final : public WeightStore {
 public:
  static constexpr uint32_t kVersion = 1;

  // Maps the file, or begins one. Whatever keeps it from either is a warning: weights are then packed and not
  // kept.
  explicit WeightCache(WeightCachePlace place);

  // kDataLoss: the file holds other weights than the model asks for.
  Result<Buffer> next(int64_t num_bytes, const PackFn& pack) override;
  bool packs() const override { return !is_mapped_; }
  // All weights were taken: what was begun takes its place. Says what has become of them.
  Status finish();

 private:
  Status map();
  Status append(const Buffer& weights);
  Status write_index();
  void give_up(const Status& status);
  Status wrong_weights(const std::string& what) const;

  const WeightCachePlace place_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  MappedFile file_;
  bool is_mapped_ = false, is_locked_ = false;
  std::optional<NewFile> new_file_;
  std::vector<uint64_t> sizes_;  // of all weights, or of those appended
  size_t num_taken_ = 0;
  int64_t at_ = 0;           // of the next mapped weight
  int64_t total_bytes_ = 0;  // taken
  double write_seconds_ = 0;
  std::string why_not_;  // kept
};

}  // namespace fp4moe
