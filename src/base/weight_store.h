// WeightStore: where packed weights come from, if not from the checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/buffer.h"

namespace fp4moe {

// Writes all bytes of a packed weight.
using PackFn = std::function<Status(uint8_t* to)>;

// Loading a model asks for its packed weights one after the other, always in the same order.
class WeightStore {
 public:
  virtual ~WeightStore() = default;
  // The next ones: `num_bytes` that are there already, or new ones that pack() writes. They may be borrowed
  // from the store.
  virtual Result<Buffer> next(int64_t num_bytes, const PackFn& pack) = 0;
  // What is loaded next belongs to this part of the model ("layer 3"); for messages about it. One line.
  virtual void enter_part(const std::string& name) = 0;
  // Whether next() calls pack(): nothing else of a weight's source needs to be read if not.
  virtual bool packs() const = 0;
};

// While it lives, what this thread packs comes from or goes to the store.
class WeightStoreScope {
 public:
  explicit WeightStoreScope(WeightStore& store);
  ~WeightStoreScope();
  WeightStoreScope(const WeightStoreScope&) = delete;
  WeightStoreScope& operator=(const WeightStoreScope&) = delete;

 private:
  WeightStore* const outer_;
};

// num_bytes of the host's memory that pack() wrote, now or for the thread's store.
Result<Buffer> packed_weights(int64_t num_bytes, const PackFn& pack);
// Whether it would call pack() now.
bool packs_weights();
// Tells the thread's store, if there is one, which part of the model comes next.
void enter_weights_part(const std::string& name);

}  // namespace fp4moe
