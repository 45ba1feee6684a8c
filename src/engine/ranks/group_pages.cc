#include "engine/ranks/group_pages.h"

#include <algorithm>
#include <string>

#include "base/check.h"

namespace fp4moe {

// Calls start(rank) -> Status for the ranks until one fails. Then waits for all ranks, also after an error or
// an exception, because they use the staging buffer.
template <class Start>
Status GroupPages::copy(const char* what, const Start& start) {
  Status status;
  const auto keep = [&](const Status& of_rank, size_t index) {
    if (!status.ok() || of_rank.ok()) return;
    const std::string rank = "rank " + std::to_string(first_rank_ + static_cast<int>(index));
    status = ranks_.size() == 1 ? of_rank : of_rank.with_context(rank);
  };
  const auto finish = [&] {
    for (size_t i = 0; i < ranks_.size(); ++i) keep(ranks_[i]->finish_copies(what), i);
  };
  try {
    for (size_t i = 0; i < ranks_.size() && status.ok(); ++i) keep(start(*ranks_[i]), i);
  } catch (...) {
    finish();
    throw;
  }
  finish();
  return status;
}

// Calls copy_staged(pages, their places) for as many pages at a time as fit into the staging buffer.
template <class PageCopy, class CopyStaged>
Status GroupPages::for_batches(std::span<const PageCopy> pages, const CopyStaged& copy_staged) const {
  std::vector<StagedPage> staged;
  for (size_t first = 0; first < pages.size(); first += staged.size()) {
    staged.clear();
    for (int64_t used = 0; first + staged.size() < pages.size();) {
      const PageCopy& page = pages[first + staged.size()];
      const int64_t num_bytes = std::ssize(page.canonical);
      FP4MOE_CHECK(num_bytes <= staging_bytes(), "a page of " + std::to_string(num_bytes) +
                                                     " bytes for a staging buffer of " +
                                                     std::to_string(staging_bytes()));
      if (used + num_bytes > staging_bytes()) break;
      staged.push_back({page.page, page.num_tokens, used});
      used += Arena::padded(num_bytes);
    }
    FP4MOE_RETURN_IF_ERROR(copy_staged(pages.subspan(first, staged.size()), staged));
  }
  return {};
}

Status GroupPages::read_pages(std::span<const PageRead> pages) {
  std::lock_guard lock(mutex_);
  const auto read = [&](std::span<const PageRead> batch, std::span<const StagedPage> staged) -> Status {
    FP4MOE_RETURN_IF_ERROR(copy("reading a KV page", [&](PageCopier& rank) {
      return rank.start_pages(staged, staging_.data(), CopyDirection::kFromRank);
    }));
    for (size_t i = 0; i < batch.size(); ++i)
      std::copy_n(staging_.data() + staged[i].offset, batch[i].canonical.size(), batch[i].canonical.data());
    return {};
  };
  return for_batches(pages, read);
}

Status GroupPages::write_pages(std::span<const PageWrite> pages) {
  std::lock_guard lock(mutex_);
  return for_batches(pages, [&](std::span<const PageWrite> batch, std::span<const StagedPage> staged) {
    for (size_t i = 0; i < batch.size(); ++i)  // not ranges::copy, which GCC 12 makes a loop of single bytes
      std::copy_n(batch[i].canonical.data(), batch[i].canonical.size(), staging_.data() + staged[i].offset);
    return copy("writing a KV page", [&](PageCopier& rank) {
      return rank.start_pages(staged, staging_.data(), CopyDirection::kToRank);
    });
  });
}

// Calls copy_piece(offset, staging of its bytes) for pieces that fit into the staging buffer.
template <class CopyPiece>
Status GroupPages::for_pieces(int64_t num_bytes, const CopyPiece& copy_piece) const {
  const std::span<uint8_t> staging(staging_.data(), static_cast<size_t>(staging_.num_bytes()));
  for (int64_t offset = 0; offset < num_bytes; offset += staging_.num_bytes()) {
    const int64_t count = std::min(staging_.num_bytes(), num_bytes - offset);
    FP4MOE_RETURN_IF_ERROR(copy_piece(offset, staging.first(static_cast<size_t>(count))));
  }
  return {};
}

Status GroupPages::read_state(int32_t slot, int64_t first, std::span<uint8_t> canonical) {
  std::lock_guard lock(mutex_);
  return for_pieces(std::ssize(canonical), [&](int64_t offset, std::span<uint8_t> piece) -> Status {
    FP4MOE_RETURN_IF_ERROR(copy("reading a state", [&](PageCopier& rank) {
      return rank.start_state(slot, first + offset, piece, CopyDirection::kFromRank);
    }));
    std::copy_n(piece.data(), piece.size(), canonical.data() + offset);
    return {};
  });
}

Status GroupPages::write_state(int32_t slot, int64_t first, std::span<const uint8_t> canonical) {
  std::lock_guard lock(mutex_);
  return for_pieces(std::ssize(canonical), [&](int64_t offset, std::span<uint8_t> piece) {
    std::copy_n(canonical.data() + offset, piece.size(), piece.data());
    return copy("writing a state", [&](PageCopier& rank) {
      return rank.start_state(slot, first + offset, piece, CopyDirection::kToRank);
    });
  });
}

}  // namespace fp4moe
