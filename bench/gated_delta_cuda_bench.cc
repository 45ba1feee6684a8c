// The gated delta net on a GPU: microseconds per call in a CUDA graph of several calls, median of 20 replays,
// for the heads of Qwen3.6-35B-A3B, Qwen3.5-397B-A17B and one of 8 ranks of Qwen3.5-397B-A17B. Decode steps
// rotate through more slots than the L2 holds, as do steps that verify drafts, and all inputs are f32, as the
// projections before the op write them. Prints a JSON object per line, as bench/gated_delta_peers.py does;
// bytes: each input, output and state once.
//
//   gated_delta_cuda_bench [HBM_GBPS [decode]]     default: the rate of reads in this run (also if 0), and
//                                                  all sizes, not only those of decode
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_timing.h"
#include "kernels/device_peak.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

constexpr int kKeyHeads = 16, kHeadDim = 128, kConvWidth = 4;
constexpr int64_t kColdBytes = 200'000'000;
constexpr int kDrafts = 3, kReplayed = 2;  // of each sequence in a step that verifies

Buffer random_f32(int64_t n, float scale, float offset) {
  std::vector<float> values(static_cast<size_t>(n));
  uint32_t state = static_cast<uint32_t>(n) | 1;
  for (float& x : values) {
    state = state * 1664525u + 1013904223u;
    x = (static_cast<float>(state >> 8) * 0x1p-23f - 1) * scale + offset;
  }
  return must(Buffer::copy_of(values.data(), n * 4, device_memory()));
}

double read_gbps(Stream& stream) {
  const int64_t num_bytes = int64_t{1} << 30;
  const Buffer data = device_buffer(num_bytes);
  sm90_peak_ops()->fill_random(data.as<uint64_t>(), num_bytes / 8, 1);
  const double us = median_us(stream, 4, [&](int64_t) { sm90_peak_ops()->read(data.data(), num_bytes); });
  return static_cast<double>(num_bytes) / us * 1e-3;
}

struct Heads {
  const char* model;
  int key_heads, value_heads;
};

// A model's layer, with inputs for up to max_rows rows and max_slots states.
class DeltaLayer {
 public:
  DeltaLayer(const Heads& heads, int64_t max_rows, int64_t max_slots) : heads_(heads), max_slots_(max_slots) {
    const int64_t columns = int64_t{heads.value_heads} * kHeadDim;
    channels_ = int64_t{2} * heads.key_heads * kHeadDim + columns;
    stride_ = channels_ + columns + 2 * heads.value_heads;
    inputs_ = random_f32(max_rows * stride_, 1.5f, 0);
    conv_weight_ = random_f32(channels_ * kConvWidth, 0.5f, 0);
    decay_ = random_f32(heads.value_heads, 1, -1.01f);
    dt_bias_ = random_f32(heads.value_heads, 1, -3);
    norm_ = random_f32(kHeadDim, 0.5f, 1);
    recurrent_ = random_f32(max_slots * state_elems(), 0.1f, 0);
    conv_ = random_f32(max_slots * conv_elems(), 1, 0);
    replay_ = random_f32(max_slots * kDrafts * replay_elems(), 1, 0);
    out_ = device_buffer(max_rows * columns * 2);
    workspace_ = device_buffer(cuda_dense_ops()->gated_delta_workspace_bytes(args(), max_rows));
  }

  GatedDeltaArgs args() const {
    GatedDeltaArgs a;
    const int64_t columns = int64_t{heads_.value_heads} * kHeadDim;
    a.qkv = inputs_.as<float>(), a.z = a.qkv + channels_, a.b = a.z + columns, a.a = a.b + heads_.value_heads;
    a.qkv_stride = a.z_stride = a.ba_stride = stride_;
    a.conv_weight = conv_weight_.as<float>(), a.decay = decay_.as<float>(), a.dt_bias = dt_bias_.as<float>();
    a.norm_weight = norm_.as<float>(), a.eps = 1e-6f;
    a.num_key_heads = heads_.key_heads, a.num_value_heads = heads_.value_heads;
    a.key_head_dim = a.value_head_dim = kHeadDim, a.conv_width = kConvWidth;
    a.slots = {recurrent_.as<float>(), conv_.as<float>(), max_slots_, replay_.as<float>(), kDrafts};
    a.out = {out_.data(), DType::kBF16, 0, columns};
    a.workspace = workspace_.data();
    return a;
  }
  int64_t state_elems() const { return int64_t{heads_.value_heads} * kHeadDim * kHeadDim; }
  int64_t conv_elems() const { return channels_ * (kConvWidth - 1); }
  int64_t replay_elems() const { return channels_ + int64_t{2} * heads_.value_heads; }
  int64_t max_slots() const { return max_slots_; }
  const Heads& heads() const { return heads_; }
  int64_t num_bytes(int64_t sequences, int64_t rows) const {
    return sequences * 8 * (state_elems() + conv_elems()) + rows * (4 * stride_ + 2 * out_cols());
  }
  int64_t out_cols() const { return int64_t{heads_.value_heads} * kHeadDim; }

 private:
  Heads heads_;
  int64_t max_slots_, channels_, stride_;
  Buffer inputs_, conv_weight_, decay_, dt_bias_, norm_, recurrent_, conv_, replay_, out_, workspace_;
};

struct DeltaSize {
  int64_t sequences, rows_each;
  bool verifies = false;  // all rows but a sequence's first are drafts, after kReplayed replayed rows
};

// Calls of one size. Call i uses the i-th range of slots.
class DeltaCalls {
 public:
  DeltaCalls(const DeltaLayer& layer, const DeltaSize& size)
      : layer_(layer), sequences_(size.sequences), rows_(size.rows_each), verifies_(size.verifies) {
    const int64_t sequences = sequences_, rows_each = rows_;
    std::vector<int32_t> first, position(static_cast<size_t>(sequences), 64), slots;
    const std::vector<int32_t> replayed(position.size(), verifies_ ? kReplayed : 0),
        drafts(position.size(), verifies_ ? static_cast<int32_t>(rows_each) - 1 : 0);
    for (int64_t s = 0; s <= sequences; ++s) first.push_back(static_cast<int32_t>(s * rows_each));
    for (int64_t s = 0; s < layer.max_slots(); ++s) slots.push_back(static_cast<int32_t>(s));
    first_ = must(Buffer::copy_of(first.data(), static_cast<int64_t>(first.size()) * 4, device_memory()));
    position_ = must(Buffer::copy_of(position.data(), sequences * 4, device_memory()));
    slots_ = must(Buffer::copy_of(slots.data(), layer.max_slots() * 4, device_memory()));
    replayed_ = must(Buffer::copy_of(replayed.data(), sequences * 4, device_memory()));
    drafts_ = must(Buffer::copy_of(drafts.data(), sequences * 4, device_memory()));
  }
  void enqueue(const DenseOps& ops, int64_t call) const {
    DeviceBatch batch;
    batch.num_rows = sequences_ * rows_;
    batch.states = {.num_sequences = sequences_,
                    .max_rows = rows_,
                    .first_row = first_.as<int32_t>(),
                    .first_position = position_.as<int32_t>(),
                    .slots = slots_.as<int32_t>() + call % (layer_.max_slots() / sequences_) * sequences_,
                    .num_replayed = replayed_.as<int32_t>(),
                    .num_tentative = drafts_.as<int32_t>()};
    GatedDeltaArgs args = layer_.args();
    if (!verifies_) args.slots.num_replay_rows = 0;
    args.device_batch = &batch;
    args.out.rows = batch.num_rows;
    ThreadPool pool(1);
    ops.gated_delta(args, pool);
  }

 private:
  const DeltaLayer& layer_;
  int64_t sequences_, rows_;
  bool verifies_;
  Buffer first_, position_, slots_, replayed_, drafts_;
};

void bench(Stream& stream, const DeltaLayer& layer, const DeltaSize& size, double gbps) {
  const DeltaCalls calls(layer, size);
  const int64_t num_replay_rows = size.verifies ? size.sequences * (kReplayed + size.rows_each - 1) : 0;
  const int64_t num_bytes = layer.num_bytes(size.sequences, size.sequences * size.rows_each) +
                            num_replay_rows * layer.replay_elems() * 4;
  const bool is_decode = size.rows_each == 1 || size.verifies;
  struct Kernel {
    const char* name;
    const DenseOps* ops;
  };
  for (const Kernel& kernel :
       {Kernel{"fp4moe", cuda_dense_ops()}, {"recurrence", cuda_invariant_dense_ops()}}) {
    if (is_decode && kernel.ops != cuda_dense_ops()) continue;  // the same
    const int64_t num_calls = !is_decode ? 2 : std::max<int64_t>(8, layer.max_slots() / size.sequences);
    const double us = median_us(stream, num_calls, [&](int64_t i) { calls.enqueue(*kernel.ops, i); });
    std::printf(
        "{\"kernel\": \"%s\", \"model\": \"%s\", \"value_heads\": %d, \"sequences\": %lld, \"rows_each\": "
        "%lld, \"replayed_each\": %d, "
        "\"us\": %.2f, \"gbps\": %.0f, \"floor_us\": %.2f}\n",
        kernel.name, layer.heads().model, layer.heads().value_heads, static_cast<long long>(size.sequences),
        static_cast<long long>(size.rows_each), size.verifies ? kReplayed : 0, us,
        static_cast<double>(num_bytes) / us * 1e-3, static_cast<double>(num_bytes) / gbps * 1e-3);
    std::fflush(stdout);
  }
}

void run(double gbps, bool only_decode) {
  BenchGpu gpu;
  Stream& stream = gpu.stream;
  if (gbps == 0) gbps = read_gbps(stream);
  std::printf("{\"hbm_gbps\": %.0f}\n", gbps);
  for (const Heads& heads :
       {Heads{"35B", kKeyHeads, 32}, {"397B", kKeyHeads, 64}, {"397B tp 8", kKeyHeads / 8, 8}}) {
    const int64_t state_bytes = int64_t{heads.value_heads} * kHeadDim * kHeadDim * 4;
    const DeltaLayer layer(heads, 8192, std::max<int64_t>(512, kColdBytes / state_bytes));
    for (int64_t sequences : {1, 4, 8, 12, 16, 32, 64, 128, 256}) bench(stream, layer, {sequences, 1}, gbps);
    if (only_decode) continue;
    for (int64_t sequences : {1, 16, 64}) bench(stream, layer, {sequences, 1 + kDrafts, true}, gbps);
    for (int64_t rows : {16, 32, 64, 128, 512, 2048, 8192}) bench(stream, layer, {1, rows}, gbps);
    bench(stream, layer, {8, 1024}, gbps);
    bench(stream, layer, {64, 128}, gbps);
  }
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) {
  fp4moe::run(argc > 1 ? std::atof(argv[1]) : 0, argc > 2 && std::string_view(argv[2]) == "decode");
}
