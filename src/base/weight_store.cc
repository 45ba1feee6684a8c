#include "base/weight_store.h"

#include <utility>

#include "base/check.h"

namespace fp4moe {
namespace {

thread_local WeightStore* current_store = nullptr;

}  // namespace

WeightStoreScope::WeightStoreScope(WeightStore& store) : outer_(std::exchange(current_store, &store)) {}
WeightStoreScope::~WeightStoreScope() { current_store = outer_; }

Result<Buffer> packed_weights(int64_t num_bytes, const PackFn& pack) {
  if (num_bytes == 0) return Buffer();
  if (current_store != nullptr) return current_store->next(num_bytes, pack);
  FP4MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::make(num_bytes));
  FP4MOE_RETURN_IF_ERROR(pack(buffer.data()));
  return buffer;
}

bool packs_weights() { return current_store == nullptr || current_store->packs(); }

void enter_weights_part(const std::string& name) {
  if (current_store != nullptr) current_store->enter_part(name);
}

}  // namespace fp4moe
