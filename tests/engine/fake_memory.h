// The pages and slots of a fake executor, and their exchange with other engines.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/ranks/executor.h"
#include "model/kv_cache.h"

namespace fp4moe {

// Each group has its own; they do not depend on ranks.
class FakeMemory : public Executor {
 public:
  int num_groups() const override { return static_cast<int>(kv_.size()); }
  int64_t num_kv_pages() const override { return kv_[0].num_pages(); }
  int64_t num_window_pages() const override { return kv_[0].num_pages(KvLayers::kWindow); }
  int page_size() const override { return kv_[0].page_size(); }
  int64_t num_slots() const override { return kv_[0].state_cache().num_slots(); }

  int64_t kv_token_bytes() const override { return kv_[0].token_bytes(); }
  int64_t window_token_bytes() const override { return kv_[0].token_bytes(KvLayers::kWindow); }
  Status read_page(int group, PageId page, int64_t num_tokens, uint8_t* canonical) override {
    if (!page_failure.ok()) return page_failure;
    kv_[static_cast<size_t>(group)].read_page(page, num_tokens, canonical);
    return {};
  }
  Status write_page(int group, PageId page, int64_t num_tokens, const uint8_t* canonical) override {
    if (!page_failure.ok()) return page_failure;
    kv_[static_cast<size_t>(group)].write_page(page, num_tokens, canonical);
    return {};
  }
  Status read_state(int group, int32_t slot, int64_t first, std::span<uint8_t> canonical) override {
    if (before_state_copy) before_state_copy();
    if (!state_failure.ok()) return state_failure;
    states(group).read_slot(slot, first, canonical);
    return {};
  }
  Status write_state(int group, int32_t slot, int64_t first, std::span<const uint8_t> canonical) override {
    if (before_state_copy) before_state_copy();
    if (!state_failure.ok()) return state_failure;
    states(group).write_slot(slot, first, canonical);
    return {};
  }
  Status copy_states(int group, std::span<const StateCopy> copies) override {
    states(group).copy_slots(copies);
    num_early_copies += static_cast<int>(copies.size());
    return {};
  }
  int64_t page_batch_bytes() const override { return batch_bytes; }
  const StateCache& states(int group) const { return kv_[static_cast<size_t>(group)].state_cache(); }
  int64_t batch_bytes = 0;                  // set before the first request
  std::atomic<int> num_early_copies = 0;    // by copy_states()
  Status page_failure, state_failure;       // set before the first request
  std::function<void()> before_state_copy;  // the same; called on the nodes' threads

 protected:
  std::vector<KvCache> kv_;
};

}  // namespace fp4moe
