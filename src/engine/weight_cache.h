// WeightCache: the file that keeps a rank's packed weights, so that only the first start packs them. Later
// ones map it: processes share its pages, and what is never used is never read.
//
// weight_file.h is the format. The key is everything that the weights depend on. A file whose key is another
// one, that is not whole or whose bytes are not those that were written is refused with its reason, and
// written anew; so is a symbolic link, and a file that another user owns or can write. All of a file is read
// and checked before anything of it is used.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "base/weight_store.h"
#include "engine/weight_file.h"
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
  // Maps the file and checks it, or begins one; checksums are computed by `pool`. Whatever keeps it from
  // either is a warning: weights are then packed and not kept.
  WeightCache(WeightCachePlace place, ThreadPool& pool);

  // kDataLoss: the file holds other weights than the model asks for.
  Result<Buffer> next(int64_t num_bytes, const PackFn& pack) override;
  void enter_part(const std::string& name) override;
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
  ThreadPool& pool_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  MappedFile file_;
  bool is_mapped_ = false, is_locked_ = false;
  std::optional<NewFile> new_file_;
  WeightFileIndex index_;  // of the mapped file, or of what was appended
  size_t num_taken_ = 0;
  int64_t at_ = 0;           // of the next mapped weight
  int64_t total_bytes_ = 0;  // taken
  double write_seconds_ = 0, check_seconds_ = 0;
  std::string why_not_;  // kept
};

}  // namespace fp4moe
