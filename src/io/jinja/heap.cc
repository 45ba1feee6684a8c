#include "io/jinja/heap.h"

#include <cstring>
#include <string>

namespace fp4moe::jinja {

namespace {

[[noreturn]] void out_of_memory(size_t bytes, size_t left) {
  limit("the template needs " + std::to_string(bytes) + " more bytes of memory, but only " +
        std::to_string(left) + " are left");
}

}  // namespace

void* BudgetedMemory::do_allocate(size_t bytes, size_t alignment) {
  if (bytes > left_) out_of_memory(bytes, left_);
  void* block = std::pmr::new_delete_resource()->allocate(bytes, alignment);
  left_ -= bytes;
  return block;
}

void BudgetedMemory::do_deallocate(void* block, size_t bytes, size_t alignment) {
  std::pmr::new_delete_resource()->deallocate(block, bytes, alignment);
  left_ += bytes;
}

std::string_view Heap::text(std::string_view value) {
  if (value.empty()) return {};
  char* copy = static_cast<char*>(arena_.allocate(value.size(), 1));
  std::memcpy(copy, value.data(), value.size());
  return {copy, value.size()};
}

size_t Heap::checked_bytes(size_t count, size_t size) const {
  size_t bytes = 0;
  if (__builtin_mul_overflow(count, size, &bytes)) limit("the template needs more than 2^64 bytes");
  if (bytes > budget_.left()) out_of_memory(bytes, budget_.left());
  return bytes;
}

void Heap::out_of_steps() const {
  limit("the template took more than " + std::to_string(limits_.steps) + " steps");
}

void Heap::out_of_depth() const {
  limit("the template nests more than " + std::to_string(limits_.depth) + " levels deep");
}

}  // namespace fp4moe::jinja
