#include "kernels/cuda/layout/tile_uploader.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "device/device_memory.h"
#include "kernels/cuda/layout/fp8_tile_layout.h"
#include "kernels/cuda/layout/tile_layout.h"

namespace fp4moe {

namespace {

constexpr int64_t kSlotBytes = int64_t{32} << 20;
constexpr size_t kMaxJobs = 256;
// Bytes for the jobs, at the start of each slot.
constexpr int64_t kJobBytes = static_cast<int64_t>(kMaxJobs * sizeof(TilePackJob) + 255) / 256 * 256;
constexpr int64_t kGatherBytes = int64_t{512} << 10;  // gathered by one thread at a time

constexpr int64_t padded(int64_t num_bytes) { return (num_bytes + 255) / 256 * 256; }

int64_t slot_bytes_of(const Fp4MatrixView& w) {
  return padded(w.rows * (w.cols / 2)) + padded(w.rows * (w.cols / fp4_block(w.format)));
}

}  // namespace

Result<TileUploader> TileUploader::make(TileKind kind, ThreadPool& pool) {
  TileUploader uploader(kind, pool);
  FP4MOE_ASSIGN_OR_RETURN(uploader.ring_, upload_ring(kSlotBytes));
  const int32_t none = 0;
  FP4MOE_ASSIGN_OR_RETURN(uploader.worst_span_, Buffer::copy_of(&none, sizeof none, device_memory()));
  return uploader;
}

Status TileUploader::plain(const Fp4MatrixView& w, uint8_t* tiles, float* scale) {
  return add(&w, 1, tiles, scale);
}

Status TileUploader::gate_up(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* tiles,
                             float* scales) {
  FP4MOE_RETURN_IF_ERROR(check_gate_up(gate, up));
  const Fp4MatrixView sides[] = {gate, up};
  return add(sides, 2, tiles, scales);
}

Status TileUploader::add(const Fp4MatrixView* sides, int num_sides, uint8_t* tiles, float* scales) {
  const Fp4MatrixView& w = sides[0];
  FP4MOE_RETURN_IF_ERROR(make_room(w.format, num_sides * slot_bytes_of(w)));
  TilePackJob job{.tiles = tiles,
                  .rows = static_cast<int32_t>(w.rows),
                  .cols = static_cast<int32_t>(w.cols),
                  .is_pair = num_sides == 2};
  for (int i = 0; i < num_sides; ++i) job.side[i] = place(sides[i], scales + i);
  jobs_.push_back(job);
  max_rows_ = std::max(max_rows_, num_sides * w.rows);
  max_cols_ = std::max(max_cols_, w.cols);
  return {};
}

TilePackSide TileUploader::place(const Fp4MatrixView& w, float* scale) {
  const int64_t codes = place_rows(w.codes, w.code_stride_bytes, w.cols / 2, w.rows);
  const int64_t scales = place_rows(w.scales, w.scale_stride_bytes, w.cols / fp4_block(w.format), w.rows);
  return {.codes = slot_.device + codes,
          .scales = slot_.device + scales,
          .scale = scale,
          .tensor_scale = w.tensor_scale};
}

// Adds the rows to the gathers and returns their offset in the slot.
int64_t TileUploader::place_rows(const uint8_t* from, int64_t stride_bytes, int64_t row_bytes,
                                 int64_t num_rows) {
  const int64_t at = used_,
                rows_at_once = std::max<int64_t>(1, kGatherBytes / std::max<int64_t>(row_bytes, 1));
  for (int64_t row = 0; row < num_rows; row += rows_at_once)
    gathers_.push_back({from + row * stride_bytes, stride_bytes, row_bytes,
                        std::min(rows_at_once, num_rows - row), slot_.host + at + row * row_bytes});
  used_ += padded(num_rows * row_bytes);
  return at;
}

Status TileUploader::make_room(Fp4Format format, int64_t num_bytes) {
  const bool has_room = slot_.host != nullptr && format == format_ && jobs_.size() < kMaxJobs &&
                        used_ + num_bytes <= ring_->slot_bytes();
  if (has_room) return {};
  flush();
  if (kJobBytes + num_bytes > ring_->slot_bytes()) {
    FP4MOE_RETURN_IF_ERROR(ring_->finish());
    ring_.reset();
    FP4MOE_ASSIGN_OR_RETURN(ring_, upload_ring(kJobBytes + num_bytes));
  }
  format_ = format;
  return open_slot();
}

Status TileUploader::open_slot() {
  FP4MOE_ASSIGN_OR_RETURN(slot_, ring_->next());
  used_ = kJobBytes;
  max_rows_ = max_cols_ = 0;
  return {};
}

// Gathers the rows of the open slot, sends the slot to the GPU and launches the kernel that packs it.
void TileUploader::flush() {
  if (slot_.host == nullptr) return;
  pool_->run(static_cast<int64_t>(gathers_.size()), [&](int64_t i, int) {
    const Gather& g = gathers_[static_cast<size_t>(i)];
    if (g.stride_bytes == g.row_bytes) {
      std::memcpy(g.to, g.from, static_cast<size_t>(g.num_rows * g.row_bytes));
      return;
    }
    for (int64_t r = 0; r < g.num_rows; ++r)
      std::memcpy(g.to + r * g.row_bytes, g.from + r * g.stride_bytes, static_cast<size_t>(g.row_bytes));
  });
  std::memcpy(slot_.host, jobs_.data(), jobs_.size() * sizeof(TilePackJob));
  ring_->send(used_);
#ifdef FP4MOE_HAS_CUDA
  {
    const StreamScope scope(ring_->stream());
    (kind_ == TileKind::kFp8 ? launch_fp8_tile_pack
                             : launch_tile_pack)({.format = format_,
                                                  .jobs = reinterpret_cast<TilePackJob*>(slot_.device),
                                                  .num_jobs = static_cast<int>(jobs_.size()),
                                                  .max_rows = max_rows_,
                                                  .max_cols = max_cols_,
                                                  .worst_span = worst_span_.as<int32_t>()});
  }
#endif
  jobs_.clear();
  gathers_.clear();
  slot_ = {};
  ring_->advance();
}

Status TileUploader::finish() {
  flush();
  FP4MOE_RETURN_IF_ERROR(ring_->finish());
  int32_t span = 0;
  FP4MOE_RETURN_IF_ERROR(device_memory().download(&span, worst_span_.data(), sizeof span));
  const Status fits = kind_ == TileKind::kFp8 ? check_fp8_scale_span(span) : check_scale_span(span);
  const int32_t none = 0;
  if (!fits.ok()) FP4MOE_RETURN_IF_ERROR(device_memory().upload(worst_span_.data(), &none, sizeof none));
  return fits;
}

}  // namespace fp4moe
