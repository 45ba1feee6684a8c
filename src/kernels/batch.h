// The rows of a batch, on the host and on a device: the sequence of each row, and where its keys and values
// are stored.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace fp4moe {

// One sequence's part of a batch: its rows, and where its keys and values are.
struct SequenceRows {
  int64_t first_row = 0;                // in the batch
  int64_t num_rows = 0;                 // new tokens
  int64_t first_position = 0;           // of the first new token: the number of cached tokens
  std::span<const int32_t> page_table;  // ids of pages of page_size tokens; covers first_position + num_rows
  // The same for layers whose pages hold the last tokens only; entries before the first row's window are 0,
  // and no kernel reads them. Empty: all layers use page_table. Never longer than page_table.
  std::span<const int32_t> window_page_table;
  int32_t slot = 0;  // of the sequence's state; 0: scrap (padding, or a model without states)
  // States (StateSlots): the last num_replayed tokens before the first new one are in the slot's replay rows,
  // and not yet in its state. The last num_tentative new rows are drafts.
  int32_t num_replayed = 0, num_tentative = 0;
};

// One layer's slots, each with the state of one sequence: what a layer keeps of it besides pages. Null data:
// the layer has no state. A sequence whose first_position is 0 starts from a state of zeros, so kernels never
// read its slot. A forward pass reads the state after first_position tokens and leaves the one after
// first_position + num_rows tokens in the same slot.
//
// Drafts may be wrong, so they never change a state. With drafts, a pass leaves the state after the tokens
// before the first draft, and the inputs of the drafts in the slot's replay rows, first draft first. The next
// pass first applies as many of these rows as were right, and then its new rows.
struct StateSlots {
  float* recurrent = nullptr;  // [num_slots, Hv, dk, dv]: this rank's value heads
  // [num_slots, C, conv_width - 1]: the last inputs of the convolution over time, oldest first
  float* conv = nullptr;
  int64_t num_slots = 0;
  // [num_slots, num_replay_rows, C + 2 Hv]: a draft's input of the convolution, then b, then a
  float* replay = nullptr;
  int64_t num_replay_rows = 0;
};

// Copies a slot in every layer. A batch's copies run before its rows, in order.
struct StateCopy {
  int32_t from = 0, to = 0;
};

// Token ids in device memory that an earlier step sampled: a negative token id ~r stands for ids[r * stride].
struct ChosenTokens {
  const int32_t* ids = nullptr;
  int64_t stride = 0;
};

// The sequences of a batch in device memory, for layers with states: all rows of a sequence together, also
// where a DeviceBatch presents each row as a sequence. Kernels read what else they need of a sequence, so
// that a recorded graph serves all numbers of replayed rows and drafts.
struct DeviceStates {
  int64_t num_sequences = 0;                // padded: sequences past the last have no rows
  int64_t max_rows = 0;                     // the most new rows of any sequence; 1: decode without drafts
  const int32_t* first_row = nullptr;       // [num_sequences + 1]
  const int32_t* first_position = nullptr;  // [num_sequences]: of the first new token
  const int32_t* slots = nullptr;           // [num_sequences]
  const int32_t* num_replayed = nullptr;    // [num_sequences]: as in SequenceRows
  const int32_t* num_tentative = nullptr;   // [num_sequences]: as in SequenceRows
};

// A whole batch in device memory, for kernels that find a row's sequence by themselves. Sizes are those with
// which a graph was recorded: rows after those of the last sequence (row_sequence -1) are padding, for which
// kernels write only zeros to their outputs. The batch is complete before the step's first kernel lets the
// next kernel start, so kernels may read it (and, in decode, the K/V rows of earlier steps) before the
// preceding kernels are done. If shares_pages, some rows are consecutive tokens of one sequence, presented as
// sequences of one row with the same pages: a row then attends to K/V rows that this step writes.
struct DeviceBatch {
  int64_t num_rows = 0;                        // T, padded
  int64_t num_sequences = 0;                   // padded: sequences past the last have no rows
  int64_t max_rows = 0;                        // the most of any sequence; 1: decode
  bool shares_pages = false;                   // decode only
  int64_t max_pages = 0;                       // columns of page_table
  const int32_t* token_ids = nullptr;          // [T]
  ChosenTokens chosen;                         // the only data here that another kernel writes
  const int64_t* positions = nullptr;          // [T]
  const int32_t* row_sequence = nullptr;       // [T]
  const int32_t* first_row = nullptr;          // [num_sequences + 1]
  const int32_t* first_position = nullptr;     // [num_sequences]: of the first new token
  const int32_t* page_table = nullptr;         // [num_sequences, max_pages]
  const int32_t* window_page_table = nullptr;  // the same, as in SequenceRows
  DeviceStates states;                         // null arrays: a model without states
  // [num_logit_rows], ascending, padded with 0. If num_logit_rows is num_rows: all rows in order.
  const int64_t* logit_rows = nullptr;
  int64_t num_logit_rows = 0;
  const int64_t* feature_rows = nullptr;  // [T] for a draft model (Batch::feature_rows), padded with 0
  // Rows of the data-parallel group that has the most of them in this step; the same on all ranks.
  int64_t largest_rows = 0, largest_logit_rows = 0;

  // [1]: the number of rows that are not padding.
  const int32_t* num_filled_rows() const { return first_row + num_sequences; }
};

constexpr int kMaxHeadDim = 576;  // MLA: kv_lora_rank 512 + rope 64

// Keys or values of one layer: [num_pages, num_kv_heads, page_size, row_stride] of dtype; the first head_dim
// elements of each row are used. With MLA the values are the first kv_lora_rank columns of the keys: same
// data and row_stride, smaller head_dim. In pages of kF8E4M3 a value is its code times `scale`; x is stored
// as e4m3_encode(x * (1 / scale)), in f32 (formats/e4m3.h).
struct KvPages {
  void* data = nullptr;
  DType dtype = DType::kBF16;                         // kBF16, kF32 or kF8E4M3
  int num_kv_heads = 0, page_size = 0, head_dim = 0;  // head_dim <= kMaxHeadDim; k's and v's may differ
  int row_stride = 0;                                 // elements; 0: head_dim
  float scale = 1;                                    // of the codes; 1 for other types

  // Offset of the row of `position`, in elements. Always inlined: sources of every ISA use it.
  [[gnu::always_inline]] constexpr int64_t offset(const int32_t* page_table, int kv_head,
                                                  int64_t position) const {
    const int64_t page = page_table[position / page_size], slot = position % page_size;
    return ((page * num_kv_heads + kv_head) * page_size + slot) * (row_stride != 0 ? row_stride : head_dim);
  }
};

}  // namespace fp4moe
