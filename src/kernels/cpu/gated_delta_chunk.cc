// Computes  the gated delta net of one sequence's rows for one value head (kernels/gated_delta.h).
// Shapes    blocks of kRows rows; within a block, tiles of kTileVecs * 16 columns of the state [dk, dv].
// Bytes     the state once in and once out (8 dk dv) per block; decode reads and writes it in memory.
// Flops     8 dk dv + 2 conv_width (2 dk + dv) per row.
// Bound     decode: memory (the state); prefill: f32 FMA, with a tile of the state in L1.
// Numerics  f32, row by row: the order of the operations on a row and on each element of the state depends
//           neither on blocks nor on where a prompt is cut, nor on whether a row is replayed. k^T S and q^T S
//           are summed over i in order, from the state before the row: o = g q^T S + (q . k) d. Norms and q .
//           k are summed in sixteen lanes, then in a fixed tree. beta and g are computed in double.
#include "kernels/cpu/dense_chunks.h"
#include "kernels/cpu/vec.h"

namespace fp4moe::FP4MOE_ISA {
namespace {

constexpr int kRows = 16;
constexpr int kHeadChannels = 3 * kMaxDeltaHeadDim;  // q, k and v of one head
// kRowVecs: for a block of one row, whose columns do not pass through the tile.
#if defined(__AVX512F__)
constexpr int kTileVecs = 4, kRowVecs = 8;
#elif defined(__AVX2__)
constexpr int kTileVecs = 2, kRowVecs = 2;
#else
constexpr int kTileVecs = 1, kRowVecs = 1;
#endif

struct DeltaRow {
  alignas(64) float q[kMaxDeltaHeadDim], k[kMaxDeltaHeadDim], v[kMaxDeltaHeadDim], o[kMaxDeltaHeadDim];
  float beta = 0, shrink = 0, q_k = 0;
};

// What one head needs of its 2 dk + dv channels, in the order q, k, v.
struct HeadConv {
  int64_t part_channel[3];                          // first channel of q, k and v
  int part_dims[3];                                 // dk, dk, dv
  float weight[kMaxConvWidth][kHeadChannels];       // [tap][channel of the head]
  float history[kMaxConvWidth - 1][kHeadChannels];  // inputs before the first new row, oldest first
};

struct DeltaScratch {
  HeadConv conv;
  DeltaRow rows[kRows];
  alignas(64) float tile[kMaxDeltaHeadDim * kTileVecs * kLanes];
};

// Sets to[i][c] = from[c, i] for n rows of `from`. W: the number of columns if it is known to the compiler,
// or 0.
template <int W>
[[gnu::always_inline]] inline void transpose_rows(const float* __restrict from, int num_cols, int n,
                                                  float (*__restrict to)[kHeadChannels], int at) {
  const int cols = W > 0 ? W : num_cols;
  for (int c = 0; c < n; ++c)
    for (int i = 0; i < cols; ++i) to[i][at + c] = from[c * cols + i];
}

// Copies the weights of n channels, and their inputs before the first row (null: zeros).
template <int W>
void load_conv_part(const float* weights, const float* inputs, int width, int n, int at, HeadConv& conv) {
  constexpr int kKept = W > 0 ? W - 1 : 0;
  transpose_rows<W>(weights, width, n, conv.weight, at);
  if (inputs != nullptr) return transpose_rows<kKept>(inputs, width - 1, n, conv.history, at);
  for (int i = 0; i < width - 1; ++i)
    for (int c = 0; c < n; ++c) conv.history[i][at + c] = 0;
}

void load_conv(const GatedDeltaArgs& a, const SequenceRows& s, int head, HeadConv& conv) {
  const int dk = a.key_head_dim, dv = a.value_head_dim, width = a.conv_width;
  const int64_t keys = int64_t{a.num_key_heads} * dk;
  const int64_t key_head = head / (a.num_value_heads / a.num_key_heads);
  const int64_t first[] = {key_head * dk, keys + key_head * dk, 2 * keys + int64_t{head} * dv};
  const float* slot = s.first_position == 0 ? nullptr : a.conv(s.slot);
  for (int part = 0; part < 3; ++part) {
    conv.part_channel[part] = first[part];
    conv.part_dims[part] = part == 2 ? dv : dk;
    const float* inputs = slot != nullptr ? slot + first[part] * (width - 1) : nullptr;
    const auto load_part = width == 4 ? load_conv_part<4> : load_conv_part<0>;
    load_part(a.conv_weight + first[part] * width, inputs, width, conv.part_dims[part], part * dk, conv);
  }
}

// Sets out = silu(convolution) of one part (q, k or v) at `row`; `at` is the part's first channel of the
// head.
void convolve(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row, const HeadConv& conv, int part,
              float* out) {
  const int at = part * a.key_head_dim, dims = conv.part_dims[part], width = a.conv_width;
  const float* inputs[kMaxConvWidth];
  for (int i = 0; i < width; ++i) {
    const int64_t from = row - width + 1 + i;
    inputs[i] = from < -s.num_replayed ? conv.history[width - 1 + s.num_replayed + from] + at
                                       : a.qkv_of(s, from) + conv.part_channel[part];
  }
  for (int c = 0; c < dims; c += kLanes) {
    const int n = dims - c;
    Vec sum = zero();
    for (int i = 0; i < width; ++i)
      sum = fma(load_partial(conv.weight[i] + at + c, n), load_partial(inputs[i] + c, n), sum);
    store_partial(out + c, times_sigmoid(sum, sum), n);
  }
}

float dot_of(const float* x, const float* y, int n) {
  Vec products = zero();
  for (int i = 0; i < n; i += kLanes)
    products = fma(load_partial(x + i, n - i), load_partial(y + i, n - i), products);
  return sum(products);
}

void scale_to_norm(float* x, int n, float norm) {
  const Vec factor = broadcast(norm / __builtin_sqrtf(dot_of(x, x, n) + kDeltaNormEps));
  for (int i = 0; i < n; i += kLanes) store_partial(x + i, mul(load_partial(x + i, n - i), factor), n - i);
}

// Prefetches the inputs of row `row` of the sequence, if it exists: a head's channels are short pieces of
// long rows, which hardware prefetchers do not recognize.
[[gnu::always_inline]] inline void prefetch_row(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row,
                                                int head, const HeadConv& conv) {
  if (row >= s.num_rows) return;
  const float* inputs = a.qkv + (s.first_row + row) * a.qkv_stride;
  for (int part = 0; part < 3; ++part)
    for (int c = 0; c < conv.part_dims[part]; c += kLanes)
      __builtin_prefetch(inputs + conv.part_channel[part] + c, 0, 2);
  const float* z = a.z + (s.first_row + row) * a.z_stride + int64_t{head} * a.value_head_dim;
  for (int c = 0; c < a.value_head_dim; c += kLanes) __builtin_prefetch(z + c, 0, 2);
}

void prepare_row(const GatedDeltaArgs& a, const SequenceRows& s, int64_t row, int head, DeltaScratch& scratch,
                 DeltaRow& r) {
  convolve(a, s, row, scratch.conv, 0, r.q);
  convolve(a, s, row, scratch.conv, 1, r.k);
  convolve(a, s, row, scratch.conv, 2, r.v);
  scale_to_norm(r.q, a.key_head_dim, 1 / __builtin_sqrtf(static_cast<float>(a.key_head_dim)));
  scale_to_norm(r.k, a.key_head_dim, 1);
  r.q_k = dot_of(r.q, r.k, a.key_head_dim);
  r.beta = static_cast<float>(1 / (1 + __builtin_exp(-static_cast<double>(a.b_of(s, row)[head]))));
  const double x = static_cast<double>(a.a_of(s, row)[head]) + a.dt_bias[head];
  const double softplus = (x > 0 ? x : 0) + __builtin_log1p(__builtin_exp(x > 0 ? -x : x));
  r.shrink = static_cast<float>(__builtin_exp(a.decay[head] * softplus));
}

// V * 16 columns of the state, in rows of `stride` elements; `cols` of them are valid (all, if V > 1).
template <class T>
struct StateColumns {
  T* data = nullptr;  // null: zeros, or nowhere to store
  int64_t stride = 0, cols = 0;
};

template <int V>
inline Vec load_columns(const StateColumns<const float>& s, int i, int v) {
  if (s.data == nullptr) return zero();
  return V > 1 ? load(s.data + i * s.stride + v * kLanes) : load_partial(s.data + i * s.stride, s.cols);
}
template <int V>
inline void store_columns(const StateColumns<float>& s, int i, int v, Vec x) {
  if (s.data == nullptr) return;
  if (V > 1)
    store(s.data + i * s.stride + v * kLanes, x);
  else
    store_partial(s.data + i * s.stride, x, s.cols);
}

// A row's update of the state, which is applied while the next row reads the state.
template <int V>
struct Update {
  const DeltaRow* row = nullptr;  // null: none
  Vec d[V];
};

// What a row reads of the state before its own update.
template <int V>
struct Reads {
  const DeltaRow* row = nullptr;  // null: nothing
  Vec k_state[V], q_state[V];     // k^T S and q^T S
};

// Stores the state in `to` after the update, and adds what `reads` needs of it.
template <int V>
inline void read_state(const Update<V>& u, StateColumns<const float> from, StateColumns<float> to, int dk,
                       Reads<V>& reads) {
  const Vec shrink = broadcast(u.row != nullptr ? u.row->shrink : 1);
  for (int i = 0; i < dk; ++i) {
    Vec s[V];
    for (int v = 0; v < V; ++v) s[v] = load_columns<V>(from, i, v);
    if (u.row != nullptr) {
      const Vec k = broadcast(u.row->k[i]);
      for (int v = 0; v < V; ++v) s[v] = fma(k, u.d[v], mul(shrink, s[v]));
    }
    for (int v = 0; v < V; ++v) store_columns<V>(to, i, v, s[v]);
    if (reads.row == nullptr) continue;
    const Vec k = broadcast(reads.row->k[i]), q = broadcast(reads.row->q[i]);
    for (int v = 0; v < V; ++v) {
      reads.k_state[v] = fma(k, s[v], reads.k_state[v]);
      reads.q_state[v] = fma(q, s[v], reads.q_state[v]);
    }
  }
}

// The state before and after a block's rows.
struct BlockState {
  float* data = nullptr;  // [dk, dv]
  bool is_zero = false;   // before the block, whatever `data` has
  bool advances = true;   // `data` gets the state after the block
};

// Runs a block's rows over V * 16 columns from `column`.
template <int V>
void run_tile(const GatedDeltaArgs& a, const BlockState& state, int column, int num_rows,
              DeltaScratch& scratch) {
  const int dk = a.key_head_dim, dv = a.value_head_dim;
  const StateColumns<float> slot{state.data + column, dv, dv - column};
  const StateColumns<float> tile{num_rows > 1 ? scratch.tile : nullptr, V * kLanes, V * kLanes};
  StateColumns<const float> from = {state.is_zero ? nullptr : slot.data, slot.stride, slot.cols};
  Update<V> update;
  for (int v = 0; v < V; ++v) update.d[v] = zero();
  for (int t = 0; t < num_rows; ++t) {
    DeltaRow& r = scratch.rows[t];
    Reads<V> reads{.row = &r};
    for (int v = 0; v < V; ++v) reads.k_state[v] = reads.q_state[v] = zero();
    read_state<V>(update, from, tile, dk, reads);
    const Vec shrink = broadcast(r.shrink), beta = broadcast(r.beta), q_k = broadcast(r.q_k);
    update.row = &r;
    for (int v = 0; v < V; ++v) {
      const int at = column + v * kLanes;
      update.d[v] = mul(beta, sub(load_partial(r.v + at, dv - at), mul(shrink, reads.k_state[v])));
      store_partial(r.o + at, fma(q_k, update.d[v], mul(shrink, reads.q_state[v])), dv - at);
    }
    if (num_rows > 1) from = {tile.data, tile.stride, tile.cols};
  }
  Reads<V> none{};
  if (state.advances) read_state<V>(update, from, slot, dk, none);
}

void norm_and_gate(const GatedDeltaArgs& a, int64_t t, int head, const DeltaRow& r) {
  const int dv = a.value_head_dim;
  const float mean = dot_of(r.o, r.o, dv) / static_cast<float>(dv);
  const Vec inverse = broadcast(1 / __builtin_sqrtf(mean + a.eps));
  const float* z = a.z + t * a.z_stride + static_cast<int64_t>(head) * dv;
  const int64_t out = t * a.out.cols + static_cast<int64_t>(head) * dv;
  for (int j = 0; j < dv; j += kLanes) {
    const int n = dv - j;
    const Vec gate = load_partial(z + j, n);
    const Vec normed = mul(mul(load_partial(r.o + j, n), inverse), load_partial(a.norm_weight + j, n));
    const Vec y = mul(normed, times_sigmoid(gate, gate));
    if (a.out.dtype == DType::kF32)
      store_partial(static_cast<float*>(a.out.data) + out + j, y, n);
    else
      store_partial(static_cast<bf16*>(a.out.data) + out + j, y, n);
  }
}

// Runs at most kRows rows from `begin`.
void run_block(const GatedDeltaArgs& a, const SequenceRows& s, int head, int64_t begin, int num_rows,
               DeltaScratch& scratch) {
  for (int t = 0; t < num_rows; ++t) {
    prefetch_row(a, s, begin + kRows + t, head, scratch.conv);
    prepare_row(a, s, begin + t, head, scratch, scratch.rows[t]);
  }
  const BlockState state{.data = a.recurrent(s.slot, head),
                         .is_zero = s.first_position + begin == 0,
                         .advances = begin < s.num_rows - s.num_tentative};
  int column = 0;
  if (num_rows == 1)
    for (; column + kRowVecs * kLanes <= a.value_head_dim; column += kRowVecs * kLanes)
      run_tile<kRowVecs>(a, state, column, num_rows, scratch);
  for (; column + kTileVecs * kLanes <= a.value_head_dim; column += kTileVecs * kLanes)
    run_tile<kTileVecs>(a, state, column, num_rows, scratch);
  for (; column < a.value_head_dim; column += kLanes) run_tile<1>(a, state, column, num_rows, scratch);
  for (int t = begin < 0 ? static_cast<int>(-begin) : 0; t < num_rows; ++t)
    norm_and_gate(a, s.first_row + begin + t, head, scratch.rows[t]);
}

}  // namespace

// The drafts are one block.
void gated_delta_chunk(const GatedDeltaArgs& a, const SequenceRows& s, int head) {
  static_assert(kMaxReplayRows <= kRows);
  DeltaScratch scratch;
  load_conv(a, s, head, scratch.conv);
  const int64_t end = s.num_rows - s.num_tentative;
  for (int64_t begin = -s.num_replayed; begin < end; begin += kRows)
    run_block(a, s, head, begin, static_cast<int>(end - begin < kRows ? end - begin : kRows), scratch);
  if (s.num_tentative > 0) run_block(a, s, head, end, s.num_tentative, scratch);
}

}  // namespace fp4moe::FP4MOE_ISA
