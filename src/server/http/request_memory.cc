#include "server/http/request_memory.h"

#include <iterator>

namespace fp4moe {

int64_t RequestMemory::total() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_;
}

// Evicts the largest arriving requests until `bytes` more fit. If the requester is itself still arriving and
// the largest, it fails; a request that has fully arrived evicts any that has not.
bool RequestMemory::make_room(int64_t bytes, bool is_arriving) {
  while (total_ - leaving_ + bytes > limit_) {
    if (arriving_.empty() || (is_arriving && arriving_.rbegin()->first <= bytes)) return false;
    Holder* largest = arriving_.rbegin()->second;
    arriving_.erase(std::prev(arriving_.end()));
    Share& share = shares_[largest];
    share.gives_way = true;
    leaving_ += share.bytes;
    largest->give_way();
  }
  return true;
}

bool RequestMemory::set(Holder& holder, int64_t bytes, bool is_arriving) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = shares_.find(&holder);
  const Share old = at == shares_.end() ? Share{} : at->second;
  arriving_.erase({old.bytes, &holder});
  total_ -= old.bytes;
  if (old.gives_way) leaving_ -= old.bytes;
  const bool fits = bytes <= old.bytes || (!old.gives_way && make_room(bytes, is_arriving));
  const Share share{fits ? bytes : old.bytes, is_arriving, old.gives_way && is_arriving && bytes > 0};
  total_ += share.bytes;
  if (share.gives_way) leaving_ += share.bytes;
  if (share.bytes == 0) {
    shares_.erase(&holder);
  } else {
    shares_[&holder] = share;
    if (is_arriving && !share.gives_way) arriving_.insert({share.bytes, &holder});
  }
  return fits;
}

}  // namespace fp4moe
