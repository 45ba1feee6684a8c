// WeightCache: a file with a rank's packed weights, so that only the first start packs them. Later starts map
// the file, and processes share its pages.
//
// weight_file.h describes the format. The key contains everything that the weights depend on. A file is
// refused with a reason and rewritten if its key differs, it is incomplete or its bytes are not those that
// were written; also if it is a symbolic link or is owned or writable by another user. The whole file is read
// and checked before any of it is used.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "base/weight_store.h"
#include "engine/startup/weight_file.h"
#include "io/checkpoint/checkpoint.h"
#include "io/file.h"
#include "model/plan_model.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

// Path of a rank's packed weights, or why they are not cached.
struct WeightCachePlace {
  std::string path;     // empty: not cached
  std::string why_not;  // set if path is empty
  std::string key;      // lines of text
};
// `draft`: the speculative algorithm whose draft model the weights are; empty: a target's.
WeightCachePlace weight_cache_place(const Checkpoint& checkpoint, const ModelPlan& plan,
                                    const RankLayout& layout, const std::string& draft = "");

class WeightCache final : public WeightStore {
 public:
  // Maps the file and checks it, or starts a new one; `pool` computes checksums. If neither is possible, logs
  // a warning: weights are then packed but not cached.
  WeightCache(WeightCachePlace place, ThreadPool& pool);

  // kDataLoss: the file's weights are not those that the model requests.
  Result<Buffer> next(int64_t num_bytes, const PackFn& pack) override;
  void enter_part(const std::string& name) override;
  bool packs() const override { return !is_mapped_; }
  // Call after all weights have been taken. Completes a new file and moves it into place. Logs the outcome.
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
  WeightFileIndex index_;  // of the mapped file, or of the weights appended so far
  size_t num_taken_ = 0;
  int64_t at_ = 0;           // offset of the next mapped weight
  int64_t total_bytes_ = 0;  // of the weights taken
  double write_seconds_ = 0, check_seconds_ = 0;
  std::string why_not_;  // why the weights are not cached
};

}  // namespace fp4moe
