// Rotary embedding, and storing new tokens' keys and values in their pages; both in one launch, or
// separately.
//
// Computes:  norms each head (QkNorm, an MLA key's latent), if wanted; rotates pairs (i, i + rotary_dim / 2)
//            of each head by position * inv_freq[i]; writes queries in place or elsewhere, keys in place or
//            to their page, values to their page, rounded to its type.
// Shapes:    rows [T, row_stride] f32, heads contiguous.
// Bytes:     8 per rotated element; 4 + 2 (bf16 pages) or 4 + 1 (E4M3) per stored element.
// Bound:     HBM; at T = 1, latency.
// Numerics:  the angle is rounded to f32, as in the models' training code, before sincosf; products and sums
//            in f32. A row's results do not depend on the number of rows.
#include "kernels/cuda/dense_kernels.h"
#include "kernels/cuda/ptx/block_norm.cuh"
#include "kernels/cuda/ptx/launch.h"
#include "kernels/cuda/ptx/ptx_e4m3.cuh"
#include "kernels/cuda/ptx/ptx_sm90.cuh"

namespace fp4moe::cuda {
namespace {

// The heads of one matrix, and what to do with them.
struct Heads {
  float* x = nullptr;
  int64_t row_stride = 0, head_stride = 0;
  int num_heads = 0, head_dim = 0;
  bool is_turned = false, is_stored = false;  // is_stored: written to `pages` instead of `out`
  float* out = nullptr;                       // may be x
  int64_t out_row_stride = 0, out_head_stride = 0;
  KvPages pages;
  int page_column = 0;                 // of a page's row: where the head begins
  float inverse = 1;                   // of pages.scale
  const float* norm_weight = nullptr;  // [head_dim], or null: no norm
};

struct RopeKernelArgs {
  Heads parts[3];  // queries, keys, values; num_heads 0: unused
  const int64_t* positions;
  const float* inv_freq;
  float attention_factor;
  int half;        // rotary_dim / 2
  float norm_eps;  // of the heads' norms
  // Where rows are stored; the pages of keys and of values have the same page_size:
  const int32_t* row_sequence;
  const int32_t* page_table;
  int64_t max_pages;
  int page_size;
};

constexpr int kPairLanes = 32, kHeadLanes = 8;
constexpr int kBlocksPerSm = 4;          // as many as run at once
constexpr int kHeld = 8, kMaxHeld = 16;  // elements of a head that a lane keeps in registers: all of them

struct Turn {
  float cosine = 1, sine = 0;
};

__device__ Turn turn_of(const RopeKernelArgs& a, int64_t position, int pair) {
  const float angle = static_cast<float>(position) * a.inv_freq[pair];
  Turn turn;
  sincosf(angle, &turn.sine, &turn.cosine);
  turn.cosine *= a.attention_factor, turn.sine *= a.attention_factor;
  return turn;
}

__device__ __forceinline__ void turn_pair(const Turn& turn, float& low, float& high) {
  const float x = low;
  low = __fmaf_rn(x, turn.cosine, -__fmul_rn(high, turn.sine));
  high = __fmaf_rn(high, turn.cosine, __fmul_rn(x, turn.sine));
}

__device__ void store(const Heads& heads, int64_t at, float value) {
  void* const data = heads.pages.data;
  if (heads.pages.dtype == DType::kF32)
    static_cast<float*>(data)[at] = value;
  else if (heads.pages.dtype == DType::kF8E4M3)
    static_cast<uint8_t*>(data)[at] = static_cast<uint8_t>(ptx::e4m3_pair(value * heads.inverse, 0));
  else
    static_cast<bf16*>(data)[at].bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// A row's position, page and rotation, computed before its values are ready.
struct Row {
  int64_t t, position;
  int32_t page;  // where the row is stored; -1: padding, or nothing is stored
  Turn turn;     // for pair threadIdx.x
};

// One head of one row, and where its elements go.
struct Head {
  const Heads& heads;
  const float* x;
  float* out;
  int64_t page_row;

  __device__ Head(const Heads& of, int head, const Row& row)
      : heads(of),
        x(of.x + row.t * of.row_stride + head * of.head_stride),
        out(of.out + row.t * of.out_row_stride + head * of.out_head_stride),
        page_row(of.is_stored
                     ? of.pages.offset(&row.page, head, row.position % of.pages.page_size) + of.page_column
                     : 0) {}
  __device__ void put(int i, float value) const {
    if (heads.is_stored)
      store(heads, page_row + i, value);
    else
      out[i] = value;
  }
};

// Processes a head by one warp: the norm, pairs threadIdx.x, threadIdx.x + 32, ..., then the elements that
// are not rotated.
__device__ void do_head(const RopeKernelArgs& a, const Head& head, const Row& row) {
  const Heads& heads = head.heads;
  const float* const x = head.x;
  const float* const weight = heads.norm_weight;
  float inverse = 1;
  if (weight != nullptr) {
    float sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < heads.head_dim; i += kPairLanes)
      sum += __ldcg(x + i) * __ldcg(x + i);
    inverse = inverse_rms(warp_sum(sum), heads.head_dim, a.norm_eps);
  }
  const auto element = [&](int i) {
    return weight == nullptr ? __ldcg(x + i) : __ldcg(x + i) * inverse * __ldg(weight + i);
  };
  const int half = heads.is_turned ? a.half : 0;
  for (int i = static_cast<int>(threadIdx.x); i < half; i += kPairLanes) {
    const Turn turn = i < kPairLanes ? row.turn : turn_of(a, row.position, i);
    float low = element(i), high = element(i + half);
    turn_pair(turn, low, high);
    head.put(i, low);
    head.put(i + half, high);
  }
  if (!heads.is_stored && weight == nullptr) return;
  for (int i = 2 * half + static_cast<int>(threadIdx.x); i < heads.head_dim; i += kPairLanes)
    head.put(i, element(i));
}

// The same for a head of up to kPairLanes * kElements elements with kPairs pairs per lane: a lane loads its
// elements lane, lane + 32, ... at once.
template <int kPairs, int kElements>
__device__ void do_held_head(const RopeKernelArgs& a, const Head& head, const Row& row) {
  const Heads& heads = head.heads;
  const float* const weight = heads.norm_weight;
  const int lane = static_cast<int>(threadIdx.x);
  float v[kElements];
#pragma unroll
  for (int j = 0; j < kElements; ++j) {
    const int i = lane + j * kPairLanes;
    v[j] = i < heads.head_dim ? __ldcg(head.x + i) : 0;
  }
  if (weight != nullptr) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += v[j] * v[j];
    const float inverse = inverse_rms(warp_sum(sum), heads.head_dim, a.norm_eps);
#pragma unroll
    for (int j = 0; j < kElements; ++j)
      if (const int i = lane + j * kPairLanes; i < heads.head_dim) v[j] = v[j] * inverse * __ldg(weight + i);
  }
  if (heads.is_turned)
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const Turn turn = j == 0 ? row.turn : turn_of(a, row.position, lane + j * kPairLanes);
      turn_pair(turn, v[j], v[j + kPairs]);
    }
  const int changed = heads.is_stored || weight != nullptr ? heads.head_dim : 2 * kPairs * kPairLanes;
#pragma unroll
  for (int j = 0; j < kElements; ++j)
    if (const int i = lane + j * kPairLanes; i < changed) head.put(i, v[j]);
}

// Positions and page tables are read before the wait: no kernel writes them (DeviceBatch). kPairs: pairs per
// lane if all heads are held; 0: any heads.
template <int kPairs, int kElements>
__global__ void __launch_bounds__(kPairLanes* kHeadLanes)
    rope_kernel(const __grid_constant__ RopeKernelArgs a) {
  ptx::grid_dependents_launch();
  Row row{.t = blockIdx.x, .position = __ldg(a.positions + blockIdx.x), .page = -1, .turn = {}};
  if (static_cast<int>(threadIdx.x) < a.half)
    row.turn = turn_of(a, row.position, static_cast<int>(threadIdx.x));
  if (a.row_sequence != nullptr)
    if (const int32_t sequence = __ldg(a.row_sequence + row.t); sequence >= 0)
      row.page = __ldg(a.page_table + sequence * a.max_pages + row.position / a.page_size);
  ptx::grid_dependency_wait();
  const int step = static_cast<int>(gridDim.y) * kHeadLanes;
  int head = static_cast<int>(blockIdx.y * kHeadLanes + threadIdx.y);
#pragma unroll
  for (const Heads& part : a.parts) {
    for (; head < part.num_heads; head += step) {
      if (part.is_stored && row.page < 0) continue;
      const Head one(part, head, row);
      if constexpr (kPairs == 0)
        do_head(a, one, row);
      else if (part.head_dim == 2 * kPairs * kPairLanes)  // nothing but pairs
        do_held_head<kPairs, 2 * kPairs>(a, one, row);
      else
        do_held_head<kPairs, kElements>(a, one, row);
    }
    head -= part.num_heads;
  }
}

// For many rows: a block computes its row's rotation once, and a thread processes four pairs of a head at a
// time, with wide loads and stores.
constexpr int kRowThreads = 256, kQuad = 4, kMostHalf = 128;
constexpr int64_t kManyRows = 128;

// Whether rope_rows_kernel can process these heads.
bool has_quads(const RopeKernelArgs& a) {
  if (kRowThreads * kQuad % std::max(a.half, 1) != 0 || a.half % kQuad != 0 || a.half > kMostHalf)
    return false;
  const auto is_whole = [](const void* data, int64_t row_stride, int64_t head_stride) {
    return is_aligned_to_16(data) && row_stride % kQuad == 0 && head_stride % kQuad == 0;
  };
  return std::ranges::all_of(a.parts, [&](const Heads& part) {
    return part.num_heads == 0 ||
           (part.head_dim == 2 * a.half && part.norm_weight == nullptr &&
            is_whole(part.x, part.row_stride, part.head_stride) &&
            (part.is_stored ? is_whole(part.pages.data, part.pages.row_stride, part.page_column)
                            : is_whole(part.out, part.out_row_stride, part.out_head_stride)));
  });
}

__device__ __forceinline__ void store_quad(const Heads& heads, int64_t at, const float4& v) {
  void* const data = heads.pages.data;
  const float inverse = heads.inverse;
  if (heads.pages.dtype == DType::kF32)
    *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = v;
  else if (heads.pages.dtype == DType::kF8E4M3)
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(data) + at) =
        ptx::e4m3_word(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
  else
    *reinterpret_cast<uint2*>(static_cast<bf16*>(data) + at) = bf16_words(v);
}

__global__ void __launch_bounds__(kRowThreads) rope_rows_kernel(const __grid_constant__ RopeKernelArgs a) {
  __shared__ Turn shared_turns[kMostHalf];
  __shared__ int64_t shared_places[3];  // where a part's first head begins in its pages; -1: not stored
  __shared__ int64_t shared_steps[3];   // from one of its heads to the next
  ptx::grid_dependents_launch();
  const int thread = static_cast<int>(threadIdx.x), lanes = a.half / kQuad;  // lanes per head
  const int64_t t = blockIdx.x, position = __ldg(a.positions + t);
  if (thread < a.half) shared_turns[thread] = turn_of(a, position, thread);
  if (thread < 3) {
    const Heads& part = a.parts[thread];
    int64_t place = -1;
    if (part.is_stored)
      if (const int32_t sequence = __ldg(a.row_sequence + t); sequence >= 0) {
        const int32_t* const table = a.page_table + sequence * a.max_pages;
        place = part.pages.offset(table, 0, position);
        shared_steps[thread] = part.pages.offset(table, 1, position) - place;
        place += part.page_column;
      }
    shared_places[thread] = place;
  }
  __syncthreads();
  const int column = thread % lanes * kQuad;
  Turn turns[kQuad];
#pragma unroll
  for (int j = 0; j < kQuad; ++j) turns[j] = shared_turns[column + j];
  ptx::grid_dependency_wait();
  int head = thread / lanes;
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    const Heads& part = a.parts[p];
    const int64_t place = shared_places[p];
    for (; head < part.num_heads; head += kRowThreads / lanes) {
      if (part.is_stored && place < 0) continue;
      const float* const x = part.x + t * part.row_stride + head * part.head_stride + column;
      float4 low = __ldcg(reinterpret_cast<const float4*>(x));
      float4 high = __ldcg(reinterpret_cast<const float4*>(x + a.half));
      if (part.is_turned) {
        turn_pair(turns[0], low.x, high.x), turn_pair(turns[1], low.y, high.y);
        turn_pair(turns[2], low.z, high.z), turn_pair(turns[3], low.w, high.w);
      }
      if (part.is_stored) {
        const int64_t at = place + head * shared_steps[p] + column;
        store_quad(part, at, low);
        store_quad(part, at + a.half, high);
      } else {
        float* const out = part.out + t * part.out_row_stride + head * part.out_head_stride + column;
        *reinterpret_cast<float4*>(out) = low;
        *reinterpret_cast<float4*>(out + a.half) = high;
      }
    }
    head -= part.num_heads;
  }
}

// Returns rope_kernel for these heads.
template <int kElements>
auto kernel_of(int half) {
  switch (half) {
    case kPairLanes:
      return rope_kernel<1, kElements>;
    case 2 * kPairLanes:
      return rope_kernel<2, kElements>;
    case 4 * kPairLanes:
      return rope_kernel<4, kElements>;
    default:
      return rope_kernel<0, 0>;
  }
}
auto kernel_of(const RopeKernelArgs& args) {
  int head_dim = 0;
  for (const Heads& part : args.parts) head_dim = std::max(head_dim, part.head_dim);
  if (head_dim <= kPairLanes * kHeld) return kernel_of<kHeld>(args.half);
  return head_dim <= kPairLanes * kMaxHeld ? kernel_of<kMaxHeld>(args.half) : rope_kernel<0, 0>;
}

void launch_rope(const char* name, const RopeKernelArgs& args, int64_t num_tokens) {
  int num_heads = 0;
  for (const Heads& part : args.parts) num_heads += part.num_heads;
  if (num_tokens >= kManyRows && has_quads(args))
    return launch(name, rope_rows_kernel, {dim3(static_cast<unsigned>(num_tokens)), dim3(kRowThreads)}, args);
  // With more blocks than run at once, the last would begin when others end: warps take several heads
  // instead.
  const int64_t most_blocks = int64_t{kBlocksPerSm} * device_limits().num_sms;
  const int64_t blocks =
      std::min(ceil_div(num_heads, kHeadLanes), std::max<int64_t>(most_blocks / num_tokens, 1));
  launch(
      name, kernel_of(args),
      {dim3(static_cast<unsigned>(num_tokens), static_cast<unsigned>(blocks)), dim3(kPairLanes, kHeadLanes)},
      args);
}

Heads turned_heads(const RopeArgs& r) {
  return {.x = r.x,
          .row_stride = r.row_stride,
          .head_stride = r.head_dim,
          .num_heads = r.num_heads,
          .head_dim = r.head_dim,
          .is_turned = true,
          .is_stored = false,
          .out = r.x,
          .out_row_stride = r.row_stride,
          .out_head_stride = r.head_dim,
          .pages = {}};
}

Heads stored_heads(const float* x, int64_t row_stride, const KvPages& pages) {
  if (x == nullptr) return {};
  return {.x = const_cast<float*>(x),
          .row_stride = row_stride,
          .head_stride = pages.head_dim,
          .num_heads = pages.num_kv_heads,
          .head_dim = pages.head_dim,
          .is_turned = false,
          .is_stored = true,
          .pages = pages,
          .inverse = 1 / pages.scale};
}

RopeKernelArgs rope_args(const RopeArgs& r) {
  return {.parts = {},
          .positions = r.positions,
          .inv_freq = r.inv_freq,
          .attention_factor = r.attention_factor,
          .half = r.rotary_dim / 2,
          .norm_eps = 0,
          .row_sequence = nullptr,
          .page_table = nullptr,
          .max_pages = 0,
          .page_size = 1};
}

void set_batch(RopeKernelArgs& args, const KvWriteArgs& kv) {
  const DeviceBatch& batch = *kv.device_batch;
  args.positions = batch.positions;
  args.row_sequence = batch.row_sequence;
  args.page_table = batch.page_table;
  args.max_pages = batch.max_pages;
  args.page_size = kv.k_pages.page_size;
}

}  // namespace

void rope(const RopeArgs& args, ThreadPool&) {
  RopeKernelArgs kernel_args = rope_args(args);
  kernel_args.parts[0] = turned_heads(args);
  launch_rope("rope", kernel_args, args.num_tokens);
}

void kv_write(const KvWriteArgs& args, ThreadPool&) {
  RopeKernelArgs kernel_args = rope_args({});
  kernel_args.parts[1] = stored_heads(args.k, args.row_stride, args.k_pages);
  kernel_args.parts[2] = stored_heads(args.v, args.row_stride, args.v_pages);
  set_batch(kernel_args, args);
  launch_rope("kv_write", kernel_args, args.device_batch->num_rows);
}

void rope_kv(const RopeKvArgs& args, ThreadPool&) {
  RopeKernelArgs kernel_args = rope_args(args.q);
  kernel_args.parts[0] = turned_heads(args.q);
  kernel_args.parts[1] = stored_heads(args.kv.k, args.kv.row_stride, args.kv.k_pages);
  kernel_args.parts[1].is_turned = true;
  kernel_args.parts[0].norm_weight = args.norm.q, kernel_args.parts[1].norm_weight = args.norm.k;
  kernel_args.norm_eps = args.norm.eps;
  kernel_args.parts[2] = stored_heads(args.kv.v, args.kv.row_stride, args.kv.v_pages);
  set_batch(kernel_args, args.kv);
  launch_rope("rope_kv", kernel_args, args.kv.device_batch->num_rows);
}

// The parts of a key's row are two heads, each stored in its columns of the row's page.
void latent_rope(const LatentRopeArgs& args, ThreadPool&) {
  RopeKernelArgs kernel_args = rope_args(args.q);
  Heads &q = kernel_args.parts[0], &k = kernel_args.parts[1], &latents = kernel_args.parts[2];
  q = turned_heads(args.q);
  q.head_dim = args.q.rotary_dim;  // the other parts stay
  if (args.q_out != nullptr) {
    q.out = args.q_out;
    q.out_row_stride = args.q_out_stride, q.out_head_stride = args.q_out_head_stride;
  }
  k = stored_heads(args.k.x, args.k.row_stride, args.kv.k_pages);
  k.head_dim = args.k.head_dim;
  k.is_turned = true;
  k.page_column = args.latents.head_dim;
  latents = stored_heads(args.latents.x, args.latents.row_stride, args.kv.k_pages);
  latents.head_dim = args.latents.head_dim;
  latents.norm_weight = args.latents.weight;
  kernel_args.norm_eps = args.latents.eps;
  set_batch(kernel_args, args.kv);
  launch_rope("latent_rope", kernel_args, args.kv.device_batch->num_rows);
}

}  // namespace fp4moe::cuda
