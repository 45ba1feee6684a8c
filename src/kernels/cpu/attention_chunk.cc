// Computes  softmax(scale q K^T, sink) V for up to kAttentionRows query rows (tokens x heads of one kv head).
// Bytes     the kv head's keys and values once per chunk: 4, 2 or 1 per element (f32, bf16 or e4m3 pages).
// Flops     2 rows keys (Dk + Dv).
// Bound     decode: memory (the pages) once a group has several heads; prefill: f32 FMA.
// Numerics  online softmax in f32 over blocks of kKeyBlock positions that start at multiples of kKeyBlock,
//           for every page size, chunk and batch. A logit is summed over d in order, an output over keys in
//           order, so a row's bits do not depend on the batch. A row uses no key outside its own range, so
//           not even a NaN there affects it. E4M3 codes are multiplied exactly; the scale of the keys
//           multiplies the softmax scale, that of the values the output's 1 / denominator, both in f32.
#include "kernels/cpu/dense_chunks.h"
#include "kernels/cpu/vec.h"

#if defined(__AVX512BF16__)
#include "kernels/cpu/e4m3_decode_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/e4m3_decode_avx2.h"
#else
#include "kernels/cpu/e4m3_decode_scalar.h"
#endif

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kKeyBlock = 64, kDimSlice = 64;
constexpr int kTileRows = 4;
#if defined(__AVX512F__)
constexpr int kTileVecs = 4;
#else
constexpr int kTileVecs = 1;
#endif

template <int N>
struct Count {
  static constexpr int value = N;
};

template <class T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}

struct Row {
  const float* q = nullptr;
  int64_t first_key = 0, end_key = 0;  // keys to which the row attends
  int begin = 0, end = 0;              // keys in the current block, relative to the block's start
  float largest = 0, denominator = 0;  // so far; the sums are relative to exp(largest)
};

struct Scratch {
  Row rows[kAttentionRows];
  alignas(64) float slice[kKeyBlock * kDimSlice];        // keys transposed [d][key], then values [key][d]
  alignas(64) float scores[kAttentionRows][kKeyBlock];   // logits, then probabilities
  alignas(64) float sums[kAttentionRows * kMaxHeadDim];  // of p * v: [row][sums_stride]
  int sums_stride = 0;                                   // v's head_dim, rounded up to a multiple of kLanes
};

inline float exp_of(float x) {
  float y;
  store_partial(&y, exp(broadcast(x)), 1);
  return y;
}

inline Vec load_elems(const KvPages& pages, int64_t offset, int64_t n) {
  if (pages.dtype == DType::kF8E4M3) return load_e4m3(static_cast<const uint8_t*>(pages.data) + offset, n);
  return pages.dtype == DType::kF32 ? load_partial(static_cast<const float*>(pages.data) + offset, n)
                                    : load_partial(static_cast<const bf16*>(pages.data) + offset, n);
}

// One block of keys: `start` is its first position; [begin, end) are the keys to which some row attends.
struct Block {
  const AttentionChunk& chunk;
  int64_t start = 0;
  int begin = 0, end = 0;
};

// Sets slice[d][key] = K[key][first_dim + d] for keys in [begin, end) and 0 for the other keys of the same
// vectors.
void load_keys(const Block& b, const KvPages& k, int first_dim, int dims, float* slice) {
  for (int key = b.begin / kLanes * kLanes; key < b.end; key += kLanes) {
    int64_t offsets[kLanes];
    for (int i = 0; i < kLanes; ++i)
      if (key + i >= b.begin && key + i < b.end)
        offsets[i] = k.offset(b.chunk.page_table, b.chunk.kv_head, b.start + key + i) + first_dim;
    for (int d = 0; d < dims; d += kLanes) {
      Vec rows[kLanes];
      for (int i = 0; i < kLanes; ++i)
        rows[i] = key + i >= b.begin && key + i < b.end ? load_elems(k, offsets[i] + d, dims - d) : zero();
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) store(slice + (d + i) * kKeyBlock + key, rows[i]);
    }
  }
}

// Sets slice[key][d] = V[key][first_dim + d], and columns up to the next multiple of kLanes to 0.
void load_values(const Block& b, const KvPages& v, int first_dim, int dims, float* slice) {
  for (int key = b.begin; key < b.end; ++key) {
    const int64_t offset = v.offset(b.chunk.page_table, b.chunk.kv_head, b.start + key) + first_dim;
    for (int d = 0; d < dims; d += kLanes)
      store(slice + key * kDimSlice + d, load_elems(v, offset + d, dims - d));
  }
}

// Adds q[r][first_dim ..] . slice to scores[r][0..kKeyBlock), for R rows that attend to the same keys.
template <int R>
void add_logits(const Row* rows, float (*scores)[kKeyBlock], const float* slice, int first_dim, int dims) {
  constexpr int kStep = kTileVecs * kLanes;
  for (int key = rows->begin / kStep * kStep; key < rows->end; key += kStep) {
    Vec sums[R][kTileVecs];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kTileVecs; ++v) sums[r][v] = load(scores[r] + key + v * kLanes);
    for (int d = 0; d < dims; ++d) {
      Vec k[kTileVecs];
      for (int v = 0; v < kTileVecs; ++v) k[v] = load(slice + d * kKeyBlock + key + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const Vec q = broadcast(rows[r].q[first_dim + d]);
        for (int v = 0; v < kTileVecs; ++v) sums[r][v] = fma(q, k[v], sums[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kTileVecs; ++v) store(scores[r] + key + v * kLanes, sums[r][v]);
  }
}

// Adds the dot products of p[r] and slice's columns, over the keys to which the R rows attend, to
// sums[r][0..V * 16).
template <int R, int V>
void add_value_columns(const Row* rows, const float (*p)[kKeyBlock], const float* slice, float* sums,
                       int stride) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(sums + r * stride + v * kLanes);
  for (int key = rows->begin; key < rows->end; ++key) {
    Vec values[V];
    for (int v = 0; v < V; ++v) values[v] = load(slice + key * kDimSlice + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec probability = broadcast(p[r][key]);
      for (int v = 0; v < V; ++v) acc[r][v] = fma(probability, values[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * stride + v * kLanes, acc[r][v]);
}

template <int R>
void add_values(const Row* rows, const float (*p)[kKeyBlock], const float* slice, float* sums, int stride,
                int dims) {
  int d = 0;
  for (; d + kTileVecs * kLanes <= dims; d += kTileVecs * kLanes)
    add_value_columns<R, kTileVecs>(rows, p, slice + d, sums + d, stride);
  for (; d < dims; d += kLanes) add_value_columns<R, 1>(rows, p, slice + d, sums + d, stride);
}

// Calls f(first row, number of rows as a type) for runs of rows that attend to the same non-empty part of the
// block.
template <class F>
void for_each_run(const Row* rows, int num_rows, F f) {
  for (int r = 0, n = 1; r < num_rows; r += n) {
    n = 1;
    if (rows[r].begin >= rows[r].end) continue;
    while (n < kTileRows && r + n < num_rows && rows[r + n].begin == rows[r].begin &&
           rows[r + n].end == rows[r].end)
      ++n;
    switch (n) {
      case 4:
        f(r, Count<4>{});
        break;
      case 3:
        f(r, Count<3>{});
        break;
      case 2:
        f(r, Count<2>{});
        break;
      default:
        f(r, Count<1>{});
    }
  }
}

// Turns logits into probabilities within the row's part of the block, and rescales the row's previous sums.
void softmax_block(Row& row, float* scores, float* sums, int stride, float scale) {
  for (int key = 0; key < kKeyBlock; ++key)
    if (key < row.begin || key >= row.end) scores[key] = -__builtin_inff();
  Vec logits[kKeyBlock / kLanes], most = broadcast(row.largest), total = zero();
  for (int i = 0; i < kKeyBlock / kLanes; ++i) {
    logits[i] = mul(load(scores + i * kLanes), broadcast(scale));
    most = max(most, logits[i]);
  }
  const float now_largest = largest(most), shrink = exp_of(row.largest - now_largest);
  for (int i = 0; i < kKeyBlock / kLanes; ++i) {
    const Vec p = exp(sub(logits[i], broadcast(now_largest)));
    store(scores + i * kLanes, p);
    total = add(total, p);
  }
  row.largest = now_largest;
  row.denominator = row.denominator * shrink + sum(total);
  if (shrink == 1) return;
  for (int d = 0; d < stride; d += kLanes) store(sums + d, mul(load(sums + d), broadcast(shrink)));
}

void attend_block(const AttentionArgs& a, const Block& b, Scratch& s, int num_rows) {
  for (int r = 0; r < num_rows; ++r)
    for (int key = 0; key < kKeyBlock; key += kLanes) store(s.scores[r] + key, zero());
  for (int d = 0; d < a.k_pages.head_dim; d += kDimSlice) {
    const int dims = smaller(kDimSlice, a.k_pages.head_dim - d);
    load_keys(b, a.k_pages, d, dims, s.slice);
    for_each_run(s.rows, num_rows, [&](int r, auto count) {
      add_logits<count.value>(s.rows + r, s.scores + r, s.slice, d, dims);
    });
  }
  for (int r = 0; r < num_rows; ++r)
    if (s.rows[r].begin < s.rows[r].end)
      softmax_block(s.rows[r], s.scores[r], s.sums + r * s.sums_stride, s.sums_stride,
                    a.scale * a.k_pages.scale);
  for (int d = 0; d < a.v_pages.head_dim; d += kDimSlice) {
    const int dims = smaller(kDimSlice, a.v_pages.head_dim - d);
    load_values(b, a.v_pages, d, dims, s.slice);
    for_each_run(s.rows, num_rows, [&](int r, auto count) {
      add_values<count.value>(s.rows + r, s.scores + r, s.slice, s.sums + r * s.sums_stride + d,
                              s.sums_stride, dims);
    });
  }
}

// Computes each row's part of the block, and the union of all rows' parts.
void clip_to_block(Block& b, Row* rows, int num_rows) {
  b.begin = kKeyBlock;
  b.end = 0;
  for (int r = 0; r < num_rows; ++r) {
    const int64_t begin = rows[r].first_key - b.start, end = rows[r].end_key - b.start;
    rows[r].begin = static_cast<int>(begin < 0 ? 0 : smaller<int64_t>(begin, kKeyBlock));
    rows[r].end = static_cast<int>(end < 0 ? 0 : smaller<int64_t>(end, kKeyBlock));
    if (rows[r].begin >= rows[r].end) continue;
    b.begin = smaller(b.begin, rows[r].begin);
    if (rows[r].end > b.end) b.end = rows[r].end;
  }
}

void start_rows(const AttentionArgs& a, const AttentionChunk& c, Scratch& s) {
  s.sums_stride = (a.v_pages.head_dim + kLanes - 1) / kLanes * kLanes;
  for (int r = 0; r < c.num_tokens * c.num_heads; ++r) {
    const int token = r / c.num_heads, head = c.first_head + r % c.num_heads;
    const int64_t position = c.first_position + token;
    s.rows[r] = {
        .q = a.q + (c.first_row + token) * a.q_stride + static_cast<int64_t>(head) * a.k_pages.head_dim,
        .first_key = a.window > 0 && position >= a.window ? position - a.window + 1 : 0,
        .end_key = position + 1,
        .largest = a.sinks != nullptr ? a.sinks[head] : -__builtin_inff(),
        .denominator = a.sinks != nullptr ? 1.0f : 0.0f};
    for (int d = 0; d < s.sums_stride; d += kLanes) store(s.sums + r * s.sums_stride + d, zero());
  }
}

void store_rows(const AttentionArgs& a, const AttentionChunk& c, const Scratch& s) {
  const int head_dim = a.v_pages.head_dim;
  for (int r = 0; r < c.num_tokens * c.num_heads; ++r) {
    const int64_t out = (c.first_row + r / c.num_heads) * a.out.cols +
                        static_cast<int64_t>(c.first_head + r % c.num_heads) * head_dim;
    const Vec inverse = broadcast(a.v_pages.scale / s.rows[r].denominator);
    for (int d = 0; d < head_dim; d += kLanes) {
      const Vec y = mul(load(s.sums + r * s.sums_stride + d), inverse);
      if (a.out.dtype == DType::kF32)
        store_partial(static_cast<float*>(a.out.data) + out + d, y, head_dim - d);
      else
        store_partial(static_cast<bf16*>(a.out.data) + out + d, y, head_dim - d);
    }
  }
}

}  // namespace

void attention_chunk(const AttentionArgs& a, const AttentionChunk& c) {
  Scratch s;
  start_rows(a, c, s);
  const int num_rows = c.num_tokens * c.num_heads;
  const int64_t end_key = s.rows[num_rows - 1].end_key;
  for (Block b{.chunk = c, .start = s.rows[0].first_key / kKeyBlock * kKeyBlock}; b.start < end_key;
       b.start += kKeyBlock) {
    clip_to_block(b, s.rows, num_rows);
    attend_block(a, b, s, num_rows);
  }
  store_rows(a, c, s);
}

}  // namespace fp4moe::FP4MOE_ISA
