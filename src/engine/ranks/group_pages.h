// GroupPages: the KV pages and states of a data-parallel group whose ranks are on GPUs, read and written by
// other threads than the engine's in the canonical form of the whole group.
//
//   read    rank 0 -> heads 0, 1 |                 write    canonical -> staging -> rank 0: heads 0, 1
//           rank 1 -> heads 2, 3 | staging -> canonical                          -> rank 1: heads 2, 3
//
// Every rank copies its heads between its GPU and their places in one staging buffer, at the same time as the
// other ranks and beside the steps. If several ranks have the same heads, the first of them sends them, and
// all of them receive them. Many pages are copied at a time, because a GPU that other processes use too can
// take milliseconds to start a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "engine/ranks/page_copy.h"
#include "fp4moe/status.h"

namespace fp4moe {

enum class CopyDirection : uint8_t { kFromRank, kToRank };

// A page's first num_tokens tokens, whose canonical form is in the staging buffer from `offset` on.
struct StagedPage {
  PageId page;
  int64_t num_tokens = 0, offset = 0;
};

// One rank's copies. A copy that has been started uses the staging buffer until finish_copies() returns.
class PageCopier {
 public:
  virtual ~PageCopier() = default;
  // Starts to copy this rank's heads of the pages. kFromRank: nothing if a lower rank of the group sends
  // them.
  virtual Status start_pages(std::span<const StagedPage> pages, uint8_t* staging,
                             CopyDirection direction) = 0;
  // Starts to copy this rank's bytes among those from `first` on of a state.
  virtual Status start_state(int32_t slot, int64_t first, std::span<uint8_t> staging,
                             CopyDirection direction) = 0;
  // Waits for all copies that have been started. `what` names them in errors.
  virtual Status finish_copies(const char* what) = 0;
};

// Thread-safe: one copy at a time. Errors are those of the copiers, which name the rank if there are several.
class GroupPages {
 public:
  // `ranks`: the copiers of ranks first_rank, first_rank + 1, ..., which are the group's; borrowed.
  // `staging`: room for any page, and for as many pages and as much of a state as are to be copied at a time.
  GroupPages(std::vector<PageCopier*> ranks, int first_rank, Buffer staging)
      : ranks_(std::move(ranks)), first_rank_(first_rank), staging_(std::move(staging)) {}

  // As in Executor (executor.h), with all bytes of each page's first num_tokens tokens, or of a part of a
  // state.
  Status read_pages(std::span<const PageRead> pages);
  Status write_pages(std::span<const PageWrite> pages);
  Status read_state(int32_t slot, int64_t first, std::span<uint8_t> canonical);
  Status write_state(int32_t slot, int64_t first, std::span<const uint8_t> canonical);

 private:
  template <class Start>
  Status copy(const char* what, const Start& start);
  template <class CopyPiece>
  Status for_pieces(int64_t num_bytes, const CopyPiece& copy_piece) const;
  template <class PageCopy, class CopyStaged>
  Status for_batches(std::span<const PageCopy> pages, const CopyStaged& copy_staged) const;

  int64_t staging_bytes() const { return staging_.num_bytes(); }

  const std::vector<PageCopier*> ranks_;
  const int first_rank_;
  std::mutex mutex_;
  Buffer staging_;  // guarded by mutex_
};

}  // namespace fp4moe
