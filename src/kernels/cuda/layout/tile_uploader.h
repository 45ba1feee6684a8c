// TileUploader: turns FP4 matrices of a checkpoint into tiles on the GPU, at the speed of the bus: threads
// gather rows into pinned slots, the copy engine moves the slots to the GPU, and a kernel packs the rows
// there.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "device/upload_ring.h"
#include "formats/fp4_matrix.h"
#include "fp4moe/status.h"
#include "kernels/cuda/layout/tile_pack.h"

namespace fp4moe {

enum class TileKind : uint8_t { kBf16, kFp8 };  // tile_layout.h; fp8_tile_layout.h

// Uses UploadRing::kNumSlots pinned slots of host memory, whatever the model's size, and the same amount of
// GPU memory, for as long as it exists. Inside an UploadScope the slots belong to the scope, and no
// other code may use them until finish(). For one thread at a time; the pool is borrowed.
class TileUploader {
 public:
  // Returns kUnsupported without a device or in a build without CUDA, kDoesNotFit if an allocation fails.
  static Result<TileUploader> make(TileKind kind, ThreadPool& pool);

  // Fills `tiles`, which is tiled_bytes() or fp8_tiled_bytes() long, and sets *scale to the factor of the
  // tiles (FP8: 1) times w.tensor_scale. Both are in device memory and are written by the time finish()
  // returns; until then, w's bytes must stay valid. gate_up() returns kInvalidArgument unless gate and up
  // have the same shape and format, with a multiple of 32 rows.
  Status plain(const Fp4MatrixView& w, uint8_t* tiles, float* scale);
  Status gate_up(const Fp4MatrixView& gate, const Fp4MatrixView& up, uint8_t* tiles, float* scales /* [2] */);
  // Waits for the device. Returns kUnsupported if any matrix added since the last finish() has e8m0 scales
  // that are too far apart for the tiles.
  Status finish();

 private:
  // Rows of a matrix to copy into a slot.
  struct Gather {
    const uint8_t* from;
    int64_t stride_bytes, row_bytes, num_rows;
    uint8_t* to;
  };
  TileUploader(TileKind kind, ThreadPool& pool) : kind_(kind), pool_(&pool) {}

  Status add(const Fp4MatrixView* sides, int num_sides, uint8_t* tiles, float* scales);
  TilePackSide place(const Fp4MatrixView& w, float* scale);
  int64_t place_rows(const uint8_t* from, int64_t stride_bytes, int64_t row_bytes, int64_t num_rows);
  Status make_room(Fp4Format format, int64_t num_bytes);
  Status open_slot();
  void flush();

  TileKind kind_;
  ThreadPool* pool_;
  std::shared_ptr<UploadRing> ring_;
  UploadRing::Slot slot_;                // host is null if no slot is open
  int64_t used_ = 0;                     // bytes used in the open slot
  int64_t max_rows_ = 0, max_cols_ = 0;  // of the open slot's jobs
  Fp4Format format_ = Fp4Format::kMxfp4;
  std::vector<TilePackJob> jobs_;
  std::vector<Gather> gathers_;
  Buffer worst_span_;  // device: int32_t
};

}  // namespace fp4moe
