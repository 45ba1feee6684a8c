// WeightStore: a source of packed weights other than the checkpoint, such as a cache.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/buffer.h"

namespace fp4moe {

// Writes all bytes of a packed weight.
using PackFn = std::function<Status(uint8_t* to)>;

// A model's packed weights are requested one after the other, always in the same order.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  // The next weight: `num_bytes` that the store already has, or that pack() writes now. The buffer may borrow
  // the store's memory.
  virtual Result<Buffer> next(int64_t num_bytes, const PackFn& pack) = 0;
  // Names the part of the model to which the next weights belong ("layer 3"), for messages. One line.
  virtual void enter_part(const std::string& name) = 0;
  // Whether next() calls pack(). If not, a weight's source need not be read.
  virtual bool packs() const = 0;
};

// Thread-local: during the scope's lifetime packed_weights() on this thread uses `store`.
class WeightStoreScope {
 public:
  explicit WeightStoreScope(WeightStore& store);
  ~WeightStoreScope();
  WeightStoreScope(const WeightStoreScope&) = delete;
  WeightStoreScope& operator=(const WeightStoreScope&) = delete;

 private:
  WeightStore* const outer_;
};

// Returns num_bytes in host memory, from the thread's store or, without a store, written by pack().
Result<Buffer> packed_weights(int64_t num_bytes, const PackFn& pack);
// Whether packed_weights() would call pack().
bool packs_weights();
// Calls enter_part() of the thread's store, if there is one.
void enter_weights_part(const std::string& name);

}  // namespace fp4moe
