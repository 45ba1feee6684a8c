// Every dense op of a forward pass, declared once. Implementations: kernels/ref (naive, double
// accumulation: the oracle and the float32 mode) and kernels/cpu (one file per op, compiled per ISA).
//
// Conventions. Matrices are row-major and contiguous unless a stride is named. Dims: T tokens (rows of a
// batch), H hidden_size, V vocab_size; heads and head_dim as named. "act" rows are the inputs of GEMMs: bf16
// in the default mode, f32 with --dtype float32; everything else (residual, GEMM outputs, logits) is f32. No
// op allocates, keeps state or throws; T = 0 is allowed everywhere. Every output element is computed in one
// fixed order, which does not depend on T, the chunking, the thread count or the batch's other rows ("batch
// invariant").
#pragma once

#include <cstdint>
#include <span>

#include "base/cpu_info.h"
#include "base/dtype.h"
#include "base/memory.h"
#include "base/thread_pool.h"
#include "formats/bf16.h"
#include "kernels/act_rows.h"
#include "kernels/attention_args.h"
#include "kernels/batch.h"
#include "kernels/gated_delta.h"
#include "kernels/linear_weight.h"

namespace fp4moe {

struct PartialsToSend;  // kernels/device_comm.h

struct LinearArgs {              // out = x W^T + bias (+ out)
  ActRows x;                     // [T, K]
  const void* weight = nullptr;  // [N, K] in the table's linear_layout; null with kFp8
  const float* bias = nullptr;   // [N] or null
  float* out = nullptr;          // [T, N]; must not overlap x
  int64_t n = 0;
  bool accumulate = false;                    // add the finished sum to out (residual)
  LinearFormat format = LinearFormat::kBf16;  // kFp8, or the format of the table's linear_layout
  Fp8LinearView fp8;  // with kFp8: the weight in the table's fp8_layout. y = sum_k x[k] * (code * scale)
  PartialsToSend* send = nullptr;  // on a GPU: out is this rank's part of a sum; only without accumulate
};

struct EmbedArgs {               // out[t] = table[id]; the caller has checked the ids against num_rows
  const bf16* table = nullptr;   // [num_rows, H]
  const int32_t* ids = nullptr;  // [T]
  float* out = nullptr;          // [T, H]
  int64_t num_tokens = 0, hidden_size = 0;
  ChosenTokens chosen;  // on a GPU: what negative ids refer to
};

struct RmsNormArgs {              // y = x / sqrt(mean(x^2) + eps) * weight, in f32, then converted to
                                  // out_act's dtype; T and H are out_act's; f32 outputs may alias x
  const float* x = nullptr;       // [T, H]
  const float* weight = nullptr;  // [H]
  float eps = 0;
  ActRows out_act;           // [T, H]: the GEMM input (rounded if bf16); null data: not written
  float* out_f32 = nullptr;  // [T, H] or null: the same values before rounding (the router's input)
  // An earlier operation has written out_act already; run_norm() (model/linear_layer.h) then does nothing.
  bool is_done = false;
};

// A norm and the linear layers applied to its output: linear.x is norm.out_act, whose contents are
// unspecified afterwards (a GPU normalises batches of a few tokens inside the linear layer). norm.out_f32 is
// null.
struct NormLinearArgs {
  RmsNormArgs norm;
  LinearArgs linear;
  LinearArgs also = {};  // a second layer with the same x, in any format; n = 0: none
};

// out[t, h] = x[t, h] W_h^T for every head: f32 rows times bf16 weights, f32 sums (MLA's absorbed
// projections).
struct HeadLinearArgs {
  const float* x = nullptr;  // row t, head h starts at x + t * x_stride + h * x_head_stride
  int64_t x_stride = 0, x_head_stride = 0;
  const bf16* weight = nullptr;  // [num_heads] matrices [N, K], each in the table's head_linear_layout
  void* out = nullptr;           // out_dtype, kF32 or kBF16; addressed like x; must not overlap x
  DType out_dtype = DType::kF32;
  int64_t out_stride = 0, out_head_stride = 0;
  int64_t num_tokens = 0, n = 0, k = 0;
  int num_heads = 0;
  float scale = 1;  // multiplies the sums
};

struct AddArgs {             // out += x
  const float* x = nullptr;  // [count]
  float* out = nullptr;      // [count]; must not overlap x
  int64_t count = 0;
};

// out[i] = x[rows[i]], rows of row_bytes bytes (a multiple of 4).
struct GatherRowsArgs {
  const void* x = nullptr;
  void* out = nullptr;            // must not overlap x
  const int64_t* rows = nullptr;  // [num_rows]
  int64_t num_rows = 0, row_bytes = 0;
};

// out[t, h] = x[t, h], n f32 elements per head (MLA: the rotary part of the queries, next to the latent
// part).
struct CopyHeadsArgs {
  const float* x = nullptr;  // row t, head h starts at x + t * x_stride + h * x_head_stride
  int64_t x_stride = 0, x_head_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0, out_head_stride = 0;
  int64_t num_tokens = 0, n = 0;
  int num_heads = 0;
};

// The copy of the rotated queries of a LatentRopeArgs.
inline CopyHeadsArgs rotated_queries(const LatentRopeArgs& a) {
  return {a.q.x,          a.q.row_stride, a.q.head_dim, a.q_out, a.q_out_stride, a.q_out_head_stride,
          a.q.num_tokens, a.q.rotary_dim, a.q.num_heads};
}

// out[t] = x[t], n elements per row, converted to out's type (an EAGLE-3 head: GEMM inputs of several parts).
struct ConvertRowsArgs {
  const float* x = nullptr;        // row t starts at x + t * x_stride
  int64_t x_stride = 0;            // elements
  void* out = nullptr;             // row t starts at element t * out_stride; must not overlap x
  DType out_dtype = DType::kBF16;  // kBF16 or kF32
  int64_t out_stride = 0;          // elements
  int64_t num_tokens = 0, n = 0;
};

// out[t] *= sigmoid(x[t] . weight), with sums in double on a CPU and in f32 on a GPU (a shared expert's
// gate).
struct SigmoidGateArgs {
  const float* x = nullptr;       // [T, H]
  const float* weight = nullptr;  // [H]
  float* out = nullptr;           // [T, H]
  int64_t num_tokens = 0, hidden_size = 0;
};

// out = silu(gate) * up in f32, then converted to out's dtype; T and I are out's.
struct SiluMulArgs {
  const float* gate_up = nullptr;  // [T, 2 I]: gate, then up
  ActRows out;                     // [T, I]
};

// The dense ops at one ISA level or on a GPU. All functions are thread-compatible; on a CPU, only the pool
// runs work in parallel. GPU ops read and write device memory only, are enqueued on the calling thread's
// current stream (device/stream.h), ignore the pool, and can be captured into a graph.
struct DenseOps {
  // "ref", "cpu_scalar", "cpu_avx2", "cpu_avx512", "cpu_amx", "cuda"; with 8-bit weights "..._q8", "..._fp8"
  const char* name;
  LinearLayout linear_layout;  // of bf16 weights; an FP8 layout: they are quantised to FP8
  LinearLayout fp8_layout = LinearLayout::kRowMajorFp8;
  bool has_fp8 = false;         // whether linear and norm_linear take LinearFormat::kFp8
  int64_t fp8_column_step = 1;  // K of an FP8 weight is a multiple of this
  LinearLayout head_linear_layout = LinearLayout::kRowMajor;  // always bf16
  void (*linear)(const LinearArgs&, ThreadPool&);
  void (*embed)(const EmbedArgs&, ThreadPool&);
  void (*rms_norm)(const RmsNormArgs&, ThreadPool&);
  void (*norm_linear)(const NormLinearArgs&, ThreadPool&);
  int64_t most_rows_normed_inside = 0;  // up to this many rows, norm_linear is one launch for most sizes
  void (*rope)(const RopeArgs&, ThreadPool&);
  void (*kv_write)(const KvWriteArgs&, ThreadPool&);
  void (*attention)(const AttentionArgs&, ThreadPool&);
  void (*rope_attention)(const RopeAttentionArgs&, ThreadPool&);
  void (*latent_rope)(const LatentRopeArgs&, ThreadPool&);
  void (*head_norm)(const HeadNormArgs&, ThreadPool&);
  void (*head_linear)(const HeadLinearArgs&, ThreadPool&);
  void (*silu_mul)(const SiluMulArgs&, ThreadPool&);
  void (*add)(const AddArgs&, ThreadPool&);
  void (*gather_rows)(const GatherRowsArgs&, ThreadPool&);
  void (*copy_heads)(const CopyHeadsArgs&, ThreadPool&);
  void (*convert_rows)(const ConvertRowsArgs&, ThreadPool&);
  void (*sigmoid_gate)(const SigmoidGateArgs&, ThreadPool&);
  void (*mul_sigmoid)(const MulSigmoidArgs&, ThreadPool&);  // null: not supported
  void (*gated_delta)(const GatedDeltaArgs&, ThreadPool&);  // null: not supported
  // Returns the size in bytes of GatedDeltaArgs::workspace. Null: no workspace is needed.
  int64_t (*gated_delta_workspace_bytes)(const GatedDeltaArgs& args, int64_t max_tokens);
  // Returns the size in bytes of AttentionArgs::workspace for batches of up to max_tokens rows with heads as
  // in args. Null: no workspace is needed.
  int64_t (*attention_workspace_bytes)(const AttentionArgs& args, int64_t max_tokens);
  MemoryResource& (*memory)() = host_memory;  // for all data that the ops read and write
};

// Returns the oracle, which accepts both activation types.
const DenseOps& ref_dense_ops(DenseQuant quant = DenseQuant::kNone);
// Returns the ops of one ISA level, which accept both activation types; bf16 is faster. Precondition:
// isa_available(isa).
const DenseOps& cpu_dense_ops(Isa isa, DenseQuant quant = DenseQuant::kNone);
// Returns the GPU's ops, which take only bf16 activations, or null in a build without CUDA. There is no table
// for kQ8.
const DenseOps* cuda_dense_ops(DenseQuant quant = DenseQuant::kNone);
// Returns the same ops with one algorithm for any batch: a row's bits depend neither on the other rows nor on
// how its sequence was split into steps. Slower; norm_linear runs a norm, then a linear op.
const DenseOps* cuda_invariant_dense_ops(DenseQuant quant = DenseQuant::kNone);
// Opens the libraries that the current GPU's ops call and creates their handles and workspaces. Call it
// before the first op on each GPU and not during graph capture. Returns kUnsupported if a library is missing
// and kDoesNotFit if there is no memory for a workspace. Later calls on the same GPU return the same status.
Status prepare_cuda_dense_ops();

}  // namespace fp4moe
