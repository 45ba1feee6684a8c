// Attention on a GPU over a whole model's KV pool. Prints microseconds per layer: each replay of a CUDA graph
// calls every layer once, and the median of the replays counts. Decode varies the size of the pool, its page
// size and the placement of a sequence's pages, because a server's pool is larger than the L2 and its pages
// are scattered; prefill has one prompt.
//
//   attention_cuda_bench [gpt-oss|qwen3|qwen3.5|mla|bf16|fp8|decode|prefill]...      (default: all heads,
//   both types of pages, decode and prefill)
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "cuda_timing.h"
#include "kernels/device_peak.h"
#include "kernels/ops.h"

namespace fp4moe {
namespace {

template <class T>
Buffer on_device(const std::vector<T>& values) {
  return must(
      Buffer::copy_of(values.data(), static_cast<int64_t>(values.size() * sizeof(T)), device_memory()));
}

enum class Order {
  kInOrder,   // sequence after sequence, with ascending pages
  kRuns,      // a sequence's pages are adjacent; the sequences are anywhere in the pool
  kShuffled,  // every page anywhere in the pool
};
const char* name_of(Order order) {
  return order == Order::kInOrder ? "in order" : order == Order::kRuns ? "runs" : "shuffled";
}

struct Heads {
  const char* name;
  int query, kv, k_dim, v_dim;
};
constexpr Heads kHeads[] = {{"gpt-oss", 64, 8, 64, 64},
                            {"qwen3", 32, 4, 128, 128},
                            {"qwen3.5", 16, 2, 256, 256},
                            {"mla", 128, 1, 576, 512}};

struct Case {
  Heads heads;
  int64_t layers, batch, context;
  int page_size = 16;
  double pool = 1;  // size of the pool, as a multiple of the sequences' pages
  Order order = Order::kInOrder;
  int64_t window = 0;
  DType kv = DType::kBF16;
  int64_t rows = 1;  // new tokens of each sequence

  int64_t total_rows() const { return batch * rows; }
  int64_t elem_bytes() const { return dtype_bits(kv) / 8; }
  int num_tensors() const { return heads.k_dim == heads.v_dim ? 2 : 1; }  // MLA's values are part of the keys
  int64_t pages_of_sequence() const { return (context + rows + page_size - 1) / page_size; }
  int64_t num_pages() const {
    return static_cast<int64_t>(static_cast<double>(batch * pages_of_sequence()) * pool);
  }
  int64_t tensor_elements() const { return num_pages() * heads.kv * page_size * heads.k_dim; }
  double read_bytes() const {
    const int64_t keys = window > 0 ? std::min(window, context + 1) : context + 1;
    return static_cast<double>(elem_bytes() * batch * keys * heads.kv * num_tensors() * heads.k_dim);
  }
  double flops() const {
    int64_t keys = 0;  // that the rows of one sequence see
    for (int64_t n = context + 1; n <= context + rows; ++n) keys += window > 0 ? std::min(window, n) : n;
    return 2.0 * static_cast<double>(batch * keys * heads.query) * (heads.k_dim + heads.v_dim);
  }
};

std::vector<int32_t> page_table(const Case& c) {
  std::mt19937 random(1);
  const int64_t length = c.pages_of_sequence();
  std::vector<int32_t> table(static_cast<size_t>(c.batch * length));
  if (c.order == Order::kShuffled) {
    std::vector<int32_t> pages(static_cast<size_t>(c.num_pages()));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    std::copy_n(pages.begin(), table.size(), table.begin());
    return table;
  }
  std::vector<int64_t> slots(static_cast<size_t>(c.num_pages() / length));
  std::iota(slots.begin(), slots.end(), 0);
  if (c.order == Order::kRuns) std::shuffle(slots.begin(), slots.end(), random);
  for (int64_t s = 0; s < c.batch; ++s)
    for (int64_t i = 0; i < length; ++i)
      table[static_cast<size_t>(s * length + i)] =
          static_cast<int32_t>(slots[static_cast<size_t>(s)] * length + i);
  return table;
}

// The device arrays of a batch.
struct Rows {
  Buffer positions, row_sequence, first_row, first_position, pages;
  DeviceBatch batch;

  explicit Rows(const Case& c) {
    std::vector<int32_t> sequence_of, first(1, 0);
    std::vector<int64_t> position_of;
    for (int32_t s = 0; s < c.batch; ++s) {
      for (int64_t i = 0; i < c.rows; ++i) sequence_of.push_back(s), position_of.push_back(c.context + i);
      first.push_back(static_cast<int32_t>(sequence_of.size()));
    }
    first_row = on_device(first);
    row_sequence = on_device(sequence_of);
    positions = on_device(position_of);
    first_position =
        on_device(std::vector<int32_t>(static_cast<size_t>(c.batch), static_cast<int32_t>(c.context)));
    pages = on_device(page_table(c));
    batch.num_rows = c.total_rows(), batch.num_sequences = c.batch;
    batch.max_rows = c.rows;
    batch.max_pages = c.pages_of_sequence();
    batch.positions = positions.as<int64_t>();
    batch.row_sequence = row_sequence.as<int32_t>();
    batch.first_row = first_row.as<int32_t>();
    batch.first_position = first_position.as<int32_t>();
    batch.page_table = pages.as<int32_t>();
  }
};

void print(const Case& c, double us, double pool_bytes) {
  std::printf("%-7s %-7s batch %-3lld context %-5lld window %-3lld page %-3d ", c.heads.name,
              dtype_name(c.kv), static_cast<long long>(c.batch), static_cast<long long>(c.context),
              static_cast<long long>(c.window), c.page_size);
  if (c.rows == 1)
    std::printf("pool %6.1f GB, %-8s %8.1f us %6.0f GB/s\n", pool_bytes * 1e-9, name_of(c.order), us,
                c.read_bytes() / us * 1e-3);
  else
    std::printf("new %-5lld %8.1f us %6.1f TFLOP/s\n", static_cast<long long>(c.rows), us,
                c.flops() / us * 1e-6);
  std::fflush(stdout);
}

void bench(Stream& stream, const Case& c) {
  const int64_t tensor = c.tensor_elements(), layer = tensor * c.num_tensors();
  const Buffer pool = device_buffer(c.elem_bytes() * layer * c.layers);
  const Heads& heads = c.heads;
  const int64_t q_cols = int64_t{heads.query} * heads.k_dim, out_cols = int64_t{heads.query} * heads.v_dim;
  const Buffer q = device_buffer(c.total_rows() * q_cols * 4),
               out = device_buffer(c.total_rows() * out_cols * 2);
  // As codes, the bytes of these numbers; the time does not depend on them.
  sm90_peak_ops()->fill_normal(pool.as<bf16>(), pool.num_bytes() / 2, 1);
  must(stream.synchronize());
  std::vector<float> queries(static_cast<size_t>(c.total_rows() * q_cols));
  std::mt19937 random(2);
  for (float& x : queries) x = static_cast<float>(random() >> 8) * 0x1p-23f - 1;
  must(device_memory().upload(q.data(), queries.data(), q.num_bytes()));
  const Rows rows(c);
  ThreadPool threads(1);
  const double us = median_us(stream, c.layers, [&](int64_t i) {
    uint8_t* keys = pool.data() + i * layer * c.elem_bytes();
    uint8_t* values = keys + (c.num_tensors() - 1) * tensor * c.elem_bytes();
    const KvPages k = {keys, c.kv, heads.kv, c.page_size, heads.k_dim, heads.k_dim};
    const KvPages v = {values, c.kv, heads.kv, c.page_size, heads.v_dim, heads.k_dim};
    cuda_dense_ops()->attention({.q = q.as<float>(),
                                 .q_stride = q_cols,
                                 .k_pages = k,
                                 .v_pages = v,
                                 .num_heads = heads.query,
                                 .scale = 0.1f,
                                 .window = c.window,
                                 .out = {out.data(), DType::kBF16, c.total_rows(), out_cols},
                                 .device_batch = &rows.batch},
                                threads);
  });
  print(c, us, static_cast<double>(pool.num_bytes()));
}

// Uses enough layers that their keys and values exceed the L2, except with the shortest context.
void bench_sizes(Stream& stream, const Heads& heads, DType kv) {
  for (const int64_t batch : {1, 8, 64, 128})
    for (const int64_t context : {128, 1024, 8192})
      bench(stream, {.heads = heads,
                     .layers = batch * context < 65536 ? 96 : 12,
                     .batch = batch,
                     .context = context,
                     .kv = kv});
  bench(stream, {.heads = heads, .layers = 4, .batch = 64, .context = 32768, .kv = kv});
  bench(stream, {.heads = heads, .layers = 12, .batch = 64, .context = 8192, .window = 128, .kv = kv});
}

void bench_pools(Stream& stream, const Heads& heads, DType kv) {
  Case c = {.heads = heads, .layers = 12, .batch = 64, .context = 8192, .kv = kv};
  for (const Order order : {Order::kInOrder, Order::kRuns, Order::kShuffled})
    for (const double pool : {1.0, 8.0}) {
      c.pool = pool, c.order = order;
      bench(stream, c);
    }
  for (const int page_size : {32, 64, 128}) {
    c.page_size = page_size;
    bench(stream, c);
  }
}

void bench_prefill(Stream& stream, const Heads& heads, DType kv) {
  Case c = {.heads = heads, .layers = 4, .batch = 1, .context = 0, .kv = kv};
  for (const int64_t rows : {1024, 8192, 32768}) {
    c.rows = rows;
    bench(stream, c);
  }
  c.rows = 2048, c.context = 6144;
  bench(stream, c);
  c.rows = 8192, c.context = 0, c.window = 128;
  bench(stream, c);
}

int run(std::span<char*> names) {
  BenchGpu gpu;
  Stream& stream = gpu.stream;
  const bool all_heads = std::ranges::none_of(kHeads, [&](const Heads& h) { return has(names, h.name); });
  const bool both_phases = has(names, "decode") == has(names, "prefill");
  const bool both_types = has(names, "bf16") == has(names, "fp8");
  for (const Heads& heads : kHeads) {
    if (!all_heads && !has(names, heads.name)) continue;
    for (const DType kv : {DType::kBF16, DType::kF8E4M3}) {
      if (!both_types && !has(names, kv == DType::kBF16 ? "bf16" : "fp8")) continue;
      if (both_phases || has(names, "decode")) {
        bench_sizes(stream, heads, kv);
        bench_pools(stream, heads, kv);
      }
      if (both_phases || has(names, "prefill")) bench_prefill(stream, heads, kv);
    }
  }
  return 0;
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) { return fp4moe::run(std::span(argv, static_cast<size_t>(argc)).subspan(1)); }
