#include "engine/disagg/kv_lease.h"

#include <string>

#include "base/check.h"

namespace fp4moe {

KvLease::KvLease(Executor& executor, KvPlace place, int64_t num_tokens) : KvLease(executor, num_tokens) {
  open_all(std::move(place));
}

KvPageShape KvLease::shape() const {
  return {.num_tokens = num_tokens_,
          .token_bytes = executor_.kv_token_bytes(),
          .page_size = executor_.page_size(),
          .window_token_bytes = executor_.window_token_bytes(),
          .first_window_page = executor_.window().first_page(num_tokens_),
          .state_bytes = executor_.state_bytes()};
}

int64_t KvLease::num_together(int64_t first) const {
  const KvPageShape of = shape();
  const int64_t most_bytes = executor_.page_batch_bytes();
  int64_t count = 1;
  for (int64_t bytes = of.bytes_of(first); of.is_page(first + count); ++count) {
    bytes += of.bytes_of(first + count);
    if (bytes > most_bytes) break;
  }
  return count;
}

// ---- the engine's thread --------------------------------------------------------------------------

void KvLease::stage(KvPlace place, int64_t num_parts) {
  const KvPageShape of = shape();
  FP4MOE_CHECK(place.tables.first_window <= of.first_window_page,
               "window page " + std::to_string(of.first_window_page) + " has been released");
  FP4MOE_CHECK(
      (place.slot != 0) == (of.state_bytes > 0),
      "slot " + std::to_string(place.slot) + " for a state of " + std::to_string(of.state_bytes) + " bytes");
  std::lock_guard lock(mutex_);
  staged_ = std::move(place);
  num_staged_ = num_parts;
}

void KvLease::open_staged() {
  {
    std::lock_guard lock(mutex_);
    if (num_staged_ <= num_open_ || ended_) return;
    place_ = std::exchange(staged_, {});
    num_open_ = std::exchange(num_staged_, 0);
  }
  notify();
}

void KvLease::withdraw() {
  {
    std::lock_guard lock(mutex_);
    num_open_ = num_staged_ = 0;
  }
  std::lock_guard wait(copying_);
}

void KvLease::fail(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    status_ = status;
  }
  notify();
}

void KvLease::end() {
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
  }
  { std::lock_guard wait(copying_); }
  notify();
}

void KvLease::notify() {
  std::function<void()> on_change;
  {
    std::lock_guard lock(mutex_);
    on_change = on_change_;
  }
  if (on_change) on_change();
}

// ---- other threads --------------------------------------------------------------------------------

void KvLease::watch(std::function<void()> on_change) {
  std::lock_guard lock(mutex_);
  on_change_ = std::move(on_change);
}

std::optional<int64_t> KvLease::num_open() const {
  std::lock_guard lock(mutex_);
  if (ended_ || !status_.ok()) return std::nullopt;
  return num_open_;
}

bool KvLease::has_ended() const {
  std::lock_guard lock(mutex_);
  return ended_;
}

// Whether the parts before `end` can be copied.
Status KvLease::check(int64_t end) const {
  if (ended_) return cancelled("the lease has ended");
  FP4MOE_RETURN_IF_ERROR(status_);
  if (end > num_open_)
    return cancelled(std::to_string(num_open_) + " parts are open, not " + std::to_string(end));
  return {};
}

// Returns the pages of each group of layers, one part after the other.
template <class PageCopy, class Bytes>
std::vector<PageCopy> KvLease::pages_of(int64_t first, std::span<const Bytes> parts) const {
  const KvPageShape of = shape();
  std::vector<PageCopy> pages;
  for (const Bytes& part : parts) {
    const int64_t index = first++, num_tokens = of.tokens_of(index);
    const auto page = static_cast<size_t>(index), full = static_cast<size_t>(num_tokens * of.token_bytes);
    pages.push_back({place_.tables.full[page], num_tokens, part.first(full)});
    if (of.has_window_page(index))
      pages.push_back({{place_.tables.window[page], KvLayers::kWindow}, num_tokens, part.subspan(full)});
  }
  return pages;
}

template <class PageCopy, class Bytes>
Result<KvLease::Located<PageCopy>> KvLease::locate(int64_t first, std::span<const Bytes> parts) const {
  std::lock_guard lock(mutex_);
  FP4MOE_RETURN_IF_ERROR(check(first + std::ssize(parts)));
  const KvPageShape of = shape();
  Located<PageCopy> found{.group = place_.group, .slot = place_.slot};
  if (of.is_page(first))
    found.pages = pages_of<PageCopy>(first, parts);
  else
    found.state_offset = of.state_offset(first);
  return found;
}

Status KvLease::read(int64_t first, std::span<const std::span<uint8_t>> parts) {
  std::lock_guard copying(copying_);
  FP4MOE_ASSIGN_OR_RETURN(const Located<PageRead> found, locate<PageRead>(first, parts));
  if (!found.pages.empty()) return executor_.read_pages(found.group, found.pages);
  return executor_.read_state(found.group, found.slot, found.state_offset, parts[0]);
}

Status KvLease::write(int64_t first, std::span<const std::span<const uint8_t>> parts) {
  std::lock_guard copying(copying_);
  FP4MOE_ASSIGN_OR_RETURN(const Located<PageWrite> found, locate<PageWrite>(first, parts));
  if (!found.pages.empty()) return executor_.write_pages(found.group, found.pages);
  return executor_.write_state(found.group, found.slot, found.state_offset, parts[0]);
}

}  // namespace fp4moe
