// The parallel drivers of the CPU ops: they cut an op into chunks, which are computed by kernels compiled per
// ISA. No result depends on the chunk sizes.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/run_ranges.h"
#include "kernels/cpu/dense_chunks.h"
#include "kernels/ref/dense_ref.h"

namespace fp4moe {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A chunk's rows (K = 2880: 0.55 MB of bf16) stay in a core's L2 while 4 panels are multiplied by them, two
// at a time.
constexpr int64_t kLinearPanels = 4, kLinearRows = 96;

template <const DenseChunks& chunks, auto kChunk = &DenseChunks::linear>
void linear(const LinearArgs& args, ThreadPool& pool) {
  const int64_t panels = ceil_div(args.n, 16), panel_chunks = ceil_div(panels, kLinearPanels);
  const auto run = args.format == LinearFormat::kFp8 ? chunks.linear_fp8 : chunks.*kChunk;
  run_in_streams(pool, panel_chunks * ceil_div(args.x.rows, kLinearRows), [&](int64_t chunk) {
    const int64_t row = chunk / panel_chunks * kLinearRows, panel = chunk % panel_chunks * kLinearPanels;
    run(args, {.row_begin = row,
               .row_end = std::min(args.x.rows, row + kLinearRows),
               .panel_begin = panel,
               .panel_end = std::min(panels, panel + kLinearPanels)});
  });
}

constexpr int64_t kRowsPerChunk = 8;

template <const DenseChunks& chunks>
void rms_norm(const RmsNormArgs& args, ThreadPool& pool) {
  run_ranges(pool, args.out_act.rows, kRowsPerChunk,
             [&](int64_t begin, int64_t end) { chunks.rms_norm(args, begin, end); });
}

template <const DenseChunks& chunks, auto kChunk = &DenseChunks::linear>
void norm_linear(const NormLinearArgs& args, ThreadPool& pool) {
  rms_norm<chunks>(args.norm, pool);
  linear<chunks, kChunk>(args.linear, pool);
  if (args.also.n > 0) linear<chunks, kChunk>(args.also, pool);
}

template <const DenseChunks& chunks>
void rope(const RopeArgs& args, ThreadPool& pool) {
  run_ranges(pool, args.num_tokens, kRowsPerChunk,
             [&](int64_t begin, int64_t end) { chunks.rope(args, begin, end); });
}

// How attention is cut into chunks: sequence by sequence, then blocks of tokens, then groups of query heads.
struct AttentionCut {
  const AttentionArgs& args;
  int group, heads_per_chunk, head_chunks_per_group, tokens_per_chunk;

  explicit AttentionCut(const AttentionArgs& a)
      : args(a),
        group(a.num_heads / a.k_pages.num_kv_heads),
        heads_per_chunk(std::min(group, kAttentionRows)),
        head_chunks_per_group(static_cast<int>(ceil_div(group, heads_per_chunk))),
        tokens_per_chunk(kAttentionRows / heads_per_chunk) {}

  int64_t head_chunks() const { return int64_t{args.k_pages.num_kv_heads} * head_chunks_per_group; }
  int64_t chunks_of(const SequenceRows& s) const {
    return ceil_div(s.num_rows, tokens_per_chunk) * head_chunks();
  }

  AttentionChunk chunk_of(const SequenceRows& s, int64_t index) const {
    const int64_t first_token = index / head_chunks() * tokens_per_chunk, head_chunk = index % head_chunks();
    const int kv_head = static_cast<int>(head_chunk / head_chunks_per_group);
    const int head_in_group = static_cast<int>(head_chunk % head_chunks_per_group) * heads_per_chunk;
    return {.page_table = s.page_table.data(),
            .first_row = s.first_row + first_token,
            .first_position = s.first_position + first_token,
            .num_tokens = static_cast<int>(std::min<int64_t>(tokens_per_chunk, s.num_rows - first_token)),
            .first_head = kv_head * group + head_in_group,
            .num_heads = std::min(heads_per_chunk, group - head_in_group),
            .kv_head = kv_head};
  }
};

template <const DenseChunks& chunks>
void attention(const AttentionArgs& args, ThreadPool& pool) {
  FP4MOE_CHECK(args.k_pages.head_dim <= kMaxHeadDim && args.v_pages.head_dim <= kMaxHeadDim,
               "head_dim " + std::to_string(std::max(args.k_pages.head_dim, args.v_pages.head_dim)) + " > " +
                   std::to_string(kMaxHeadDim));
  const AttentionCut cut(args);
  int64_t num_chunks = 0;
  for (const SequenceRows& s : args.sequences) num_chunks += cut.chunks_of(s);
  pool.run(num_chunks, [&](int64_t chunk, int) {
    int64_t index = num_chunks - 1 - chunk;  // late tokens first: they have the most keys
    for (const SequenceRows& s : args.sequences) {
      if (index < cut.chunks_of(s)) return chunks.attention(args, cut.chunk_of(s, index));
      index -= cut.chunks_of(s);
    }
  });
}

template <const DenseChunks& chunks>
void head_norm(const HeadNormArgs& args, ThreadPool& pool) {
  run_ranges(pool, args.num_tokens, kRowsPerChunk,
             [&](int64_t begin, int64_t end) { chunks.head_norm(args, begin, end); });
}

template <const DenseChunks& chunks>
void head_linear(const HeadLinearArgs& args, ThreadPool& pool) {
  const int64_t panels = ceil_div(args.n, 16), per_head = ceil_div(panels, kLinearPanels);
  const int64_t per_block = args.num_heads * per_head;
  pool.run(per_block * ceil_div(args.num_tokens, kLinearRows), [&](int64_t chunk, int) {
    const int64_t row = chunk / per_block * kLinearRows, panel = chunk % per_head * kLinearPanels;
    chunks.head_linear(args, chunk % per_block / per_head,
                       {.row_begin = row,
                        .row_end = std::min(args.num_tokens, row + kLinearRows),
                        .panel_begin = panel,
                        .panel_end = std::min(panels, panel + kLinearPanels)});
  });
}

constexpr int64_t kSiluMulCols = 2048;

template <const DenseChunks& chunks>
void silu_mul(const SiluMulArgs& args, ThreadPool& pool) {
  const int64_t per_row = ceil_div(args.out.cols, kSiluMulCols);
  pool.run(args.out.rows * per_row, [&](int64_t chunk, int) {
    const int64_t begin = chunk % per_row * kSiluMulCols;
    chunks.silu_mul(args, chunk / per_row, begin, std::min(args.out.cols, begin + kSiluMulCols));
  });
}

template <const DenseChunks& chunks>
void mul_sigmoid(const MulSigmoidArgs& args, ThreadPool& pool) {
  run_ranges(pool, args.x.rows, kRowsPerChunk,
             [&](int64_t begin, int64_t end) { chunks.mul_sigmoid(args, begin, end); });
}

template <const DenseChunks& chunks>
void rope_attention(const RopeAttentionArgs& args, ThreadPool& pool) {
  const auto& [q, k, kv, norm] = args.rope;
  if (norm.q != nullptr) {
    head_norm<chunks>(head_norm_args(q, norm.q, norm.eps), pool);
    head_norm<chunks>(head_norm_args(k, norm.k, norm.eps), pool);
  }
  rope<chunks>(q, pool);
  rope<chunks>(k, pool);
  ref::kv_write(kv, pool);
  attention<chunks>(args.attention, pool);
  if (args.gate != nullptr) mul_sigmoid<chunks>(output_gate_args(args), pool);
}

template <const DenseChunks& chunks>
void latent_rope(const LatentRopeArgs& args, ThreadPool& pool) {
  head_norm<chunks>(args.latents, pool);
  rope<chunks>(args.k, pool);
  ref::kv_write(args.kv, pool);
  rope<chunks>(args.q, pool);
  if (args.q_out != nullptr) ref::copy_heads(rotated_queries(args), pool);
}

template <const DenseChunks& chunks>
void gated_delta(const GatedDeltaArgs& args, ThreadPool& pool) {
  ref::check_gated_delta(args);
  const int64_t heads = args.num_value_heads;
  pool.run(heads * static_cast<int64_t>(args.sequences.size()), [&](int64_t chunk, int) {
    const SequenceRows& s = args.sequences[static_cast<size_t>(chunk / heads)];
    if (s.num_rows > 0) chunks.gated_delta(args, s, static_cast<int>(chunk % heads));
  });
  ref::store_conv_inputs(args, pool);
}

// Copying and adding gain nothing from wider registers, so the oracle's ops are used.
template <const DenseChunks& chunks>
constexpr DenseOps make_ops(const char* name) {
  return {.name = name,
          .linear_layout = LinearLayout::kPanel16,
          .fp8_layout = LinearLayout::kPanel16Fp8,
          .has_fp8 = true,
          .head_linear_layout = LinearLayout::kPanel16,
          .linear = linear<chunks>,
          .embed = ref::embed,
          .rms_norm = rms_norm<chunks>,
          .norm_linear = norm_linear<chunks>,
          .rope = rope<chunks>,
          .kv_write = ref::kv_write,
          .attention = attention<chunks>,
          .rope_attention = rope_attention<chunks>,
          .latent_rope = latent_rope<chunks>,
          .head_norm = head_norm<chunks>,
          .head_linear = head_linear<chunks>,
          .silu_mul = silu_mul<chunks>,
          .add = ref::add,
          .gather_rows = ref::gather_rows,
          .copy_heads = ref::copy_heads,
          .convert_rows = ref::convert_rows,
          .sigmoid_gate = ref::sigmoid_gate,
          .mul_sigmoid = mul_sigmoid<chunks>,
          .gated_delta = gated_delta<chunks>};
}

template <const DenseChunks& chunks>
constexpr DenseOps make_q8_ops(const char* name) {
  DenseOps ops = make_ops<chunks>(name);
  ops.linear_layout = LinearLayout::kPanel16Q8;
  ops.linear = linear<chunks, &DenseChunks::linear_q8>;
  ops.norm_linear = norm_linear<chunks, &DenseChunks::linear_q8>;
  return ops;
}

template <const DenseChunks& chunks>
constexpr DenseOps make_fp8_ops(const char* name) {
  DenseOps ops = make_ops<chunks>(name);
  ops.linear_layout = ops.fp8_layout;
  return ops;
}

// Indexed by DenseQuant.
constexpr DenseOps kScalarOps[] = {make_ops<cpu_scalar::dense_chunks>("cpu_scalar"),
                                   make_q8_ops<cpu_scalar::dense_chunks>("cpu_scalar_q8"),
                                   make_fp8_ops<cpu_scalar::dense_chunks>("cpu_scalar_fp8")};
#if defined(__x86_64__)
constexpr DenseOps kAvx2Ops[] = {make_ops<cpu_avx2::dense_chunks>("cpu_avx2"),
                                 make_q8_ops<cpu_avx2::dense_chunks>("cpu_avx2_q8"),
                                 make_fp8_ops<cpu_avx2::dense_chunks>("cpu_avx2_fp8")};
constexpr DenseOps kAvx512Ops[] = {make_ops<cpu_avx512::dense_chunks>("cpu_avx512"),
                                   make_q8_ops<cpu_avx512::dense_chunks>("cpu_avx512_q8"),
                                   make_fp8_ops<cpu_avx512::dense_chunks>("cpu_avx512_fp8")};
constexpr DenseOps kAmxOps[] = {make_ops<cpu_amx::dense_chunks>("cpu_amx"),
                                make_q8_ops<cpu_amx::dense_chunks>("cpu_amx_q8"),
                                make_fp8_ops<cpu_amx::dense_chunks>("cpu_amx_fp8")};
#endif

}  // namespace

const DenseOps& cpu_dense_ops(Isa isa, DenseQuant quant) {
  FP4MOE_CHECK(isa_available(isa), std::string("this CPU has no ") + isa_name(isa));
  const auto index = static_cast<size_t>(quant);
#if defined(__x86_64__)
  if (isa == Isa::kAmx) return kAmxOps[index];
  if (isa == Isa::kAvx512) return kAvx512Ops[index];
  if (isa == Isa::kAvx2) return kAvx2Ops[index];
#endif
  return kScalarOps[index];
}

}  // namespace fp4moe
