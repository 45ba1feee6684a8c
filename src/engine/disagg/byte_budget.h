// ByteBudget: limits the memory of messages being received over all connections of a node. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace fp4moe {

class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // A share of the budget in bytes, returned on destruction; movable, empty by default.
  class Lease {
   public:
    Lease() = default;
    ~Lease() { clear(); }
    Lease(Lease&& other) noexcept
        : budget_(std::move(other.budget_)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}
    Lease& operator=(Lease&& other) noexcept {
      clear();
      budget_ = std::move(other.budget_);
      num_bytes_ = std::exchange(other.num_bytes_, 0);
      return *this;
    }
    int64_t num_bytes() const { return num_bytes_; }
    void clear() {
      if (budget_ != nullptr) budget_->used_.fetch_sub(num_bytes_);
      budget_ = nullptr;
      num_bytes_ = 0;
    }

   private:
    friend class ByteBudget;
    std::shared_ptr<ByteBudget> budget_;
    int64_t num_bytes_ = 0;
  };

  static std::shared_ptr<ByteBudget> make(int64_t num_bytes) {
    return std::shared_ptr<ByteBudget>(new ByteBudget(num_bytes));
  }
  int64_t num_bytes() const { return num_bytes_; }
  int64_t used() const { return used_.load(); }
  // Raises the lease to num_bytes. Returns false and changes nothing if the budget is exhausted.
  bool raise(Lease& lease, int64_t num_bytes) {
    const int64_t more = num_bytes - lease.num_bytes_;
    if (more <= 0) return true;
    if (used_.fetch_add(more) + more > num_bytes_) {
      used_.fetch_sub(more);
      return false;
    }
    lease.budget_ = shared_from_this();
    lease.num_bytes_ = num_bytes;
    return true;
  }

 private:
  explicit ByteBudget(int64_t num_bytes) : num_bytes_(num_bytes) {}
  const int64_t num_bytes_;
  std::atomic<int64_t> used_{0};
};

}  // namespace fp4moe
