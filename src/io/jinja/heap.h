// Heap: owns all values of one rendering, frees them together, and enforces budgets on runaway templates.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "io/jinja/error.h"

namespace fp4moe::jinja {

struct Limits {
  uint64_t steps = 20'000'000;        // evaluated nodes, visited items, and one per 64 scanned bytes
  size_t memory = size_t{512} << 20;  // bytes of values created during one rendering
  size_t output = size_t{64} << 20;   // bytes of rendered text
  int depth = 1000;                   // nesting of evaluations, values and JSON together
};

// Memory resource that throws when its budget is exceeded.
class BudgetedMemory final : public std::pmr::memory_resource {
 public:
  explicit BudgetedMemory(size_t budget) : left_(budget) {}
  size_t left() const { return left_; }

 private:
  void* do_allocate(size_t bytes, size_t alignment) override;
  void do_deallocate(void* block, size_t bytes, size_t alignment) override;
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  size_t left_;
};

class Heap {
 public:
  explicit Heap(const Limits& limits) : limits_(limits), steps_left_(limits.steps), budget_(limits.memory) {}

  const Limits& limits() const { return limits_; }
  std::pmr::memory_resource* memory() { return &arena_; }

  // Returns a copy that lives as long as the heap.
  std::string_view text(std::string_view value);
  template <class T>
  std::span<const T> items(const std::vector<T>& values) {
    if (values.empty()) return {};
    T* block = static_cast<T*>(arena_.allocate(checked_bytes(values.size(), sizeof(T)), alignof(T)));
    std::uninitialized_copy(values.begin(), values.end(), block);
    return {block, values.size()};
  }
  // Makes an object that lives as long as the heap; its destructor never runs.
  template <class T, class... Args>
  T* make(Args&&... args) {
    return new (arena_.allocate(sizeof(T), alignof(T))) T{std::forward<Args>(args)...};
  }

  void step(uint64_t count = 1) {
    if (count > steps_left_) out_of_steps();
    steps_left_ -= count;
  }
  void scan(size_t bytes) { step(bytes / 64); }
  // Returns count * size; throws if that many bytes exceed the budget. Call it before building a large value.
  size_t checked_bytes(size_t count, size_t size) const;

  // RAII nesting level.
  class Level {
   public:
    explicit Level(Heap& heap) : heap_(heap) {
      if (++heap_.depth_ > heap_.limits_.depth) {
        --heap_.depth_;
        heap_.out_of_depth();
      }
    }
    ~Level() { --heap_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Heap& heap_;
  };

 private:
  [[noreturn]] void out_of_steps() const;
  [[noreturn]] void out_of_depth() const;

  Limits limits_;
  uint64_t steps_left_;
  int depth_ = 0;
  BudgetedMemory budget_;
  std::pmr::monotonic_buffer_resource arena_{&budget_};
};

}  // namespace fp4moe::jinja
