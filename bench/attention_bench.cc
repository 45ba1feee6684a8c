// Attention on a GPU: microseconds, GB/s of keys and values (decode) and TFLOP/s (prefill) of one layer, by
// replays of a graph over copies of the pages that together exceed the L2 cache. Pages are scattered.
// Arguments: query heads, kv heads, head_dim, sequences, context, new rows of each, window.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "base/buffer.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/graph.h"
#include "kernels/cuda/attention.h"

namespace fp4moe {
namespace {

constexpr int64_t kColdBytes = 160 << 20;
constexpr int kPageSize = 16, kMinLaunches = 8;

template <class T>
Buffer upload(const std::vector<T>& host) {
  const int64_t bytes = static_cast<int64_t>(host.size() * sizeof(T));
  Buffer buffer = *Buffer::make(bytes, device_memory());
  if (!device_memory().upload(buffer.data(), host.data(), bytes).ok()) std::abort();
  return buffer;
}

struct Shape {
  int heads, kv_heads, dim;
  int64_t sequences, context, rows, window;
  explicit Shape(const benchmark::State& s)
      : heads(static_cast<int>(s.range(0))),
        kv_heads(static_cast<int>(s.range(1))),
        dim(static_cast<int>(s.range(2))),
        sequences(s.range(3)),
        context(s.range(4)),
        rows(s.range(5)),
        window(s.range(6)) {}
  int64_t pages() const { return (context + rows + kPageSize - 1) / kPageSize; }  // of a sequence
  double keys() const {  // that a row of each sequence sees, summed
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t n = context + r + 1;
      sum += static_cast<double>(window > 0 ? std::min(window, n) : n);
    }
    return sum * static_cast<double>(sequences);
  }
};

// A batch of the shape and as many copies of its pages as stay cold.
class Batch {
 public:
  explicit Batch(const Shape& s) : shape_(s) {
    const int64_t page_elems = int64_t{s.kv_heads} * kPageSize * s.dim;
    const int64_t pages = s.sequences * s.pages();
    const int64_t copies = s.rows > 1 ? 1 : kColdBytes / (pages * page_elems * 4) + 1;
    std::minstd_rand random(1);
    std::vector<bf16> values(static_cast<size_t>(copies * pages * page_elems));
    for (bf16& x : values) x = float_to_bf16(static_cast<float>(random() % 2001) / 1000 - 1);
    k_ = upload(values), v_ = upload(values);
    std::vector<int32_t> ids(static_cast<size_t>(copies * pages));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), random);
    for (int64_t c = 0; c < copies; ++c)
      tables_.push_back(upload(std::vector(ids.begin() + c * pages, ids.begin() + (c + 1) * pages)));
    make_rows();
  }
  int64_t copies() const { return static_cast<int64_t>(tables_.size()); }

  void launch(int64_t copy) {
    const Shape& s = shape_;
    DeviceBatch batch;
    batch.num_rows = s.sequences * s.rows, batch.num_sequences = s.sequences;
    batch.max_rows = s.rows, batch.max_pages = s.pages();
    batch.positions = positions_.as<int64_t>(), batch.row_sequence = row_sequence_.as<int32_t>();
    batch.first_row = first_row_.as<int32_t>(), batch.first_position = first_position_.as<int32_t>();
    batch.page_table = tables_[static_cast<size_t>(copy % copies())].as<int32_t>();
    ThreadPool pool(1);
    cuda::attention({.q = q_.as<float>(),
                     .q_stride = int64_t{s.heads} * s.dim,
                     .k_pages = {k_.data(), DType::kBF16, s.kv_heads, kPageSize, s.dim},
                     .v_pages = {v_.data(), DType::kBF16, s.kv_heads, kPageSize, s.dim},
                     .num_heads = s.heads,
                     .scale = 0.125f,
                     .window = s.window,
                     .out = {out_.data(), DType::kBF16, batch.num_rows, int64_t{s.heads} * s.dim},
                     .device_batch = &batch},
                    pool);
  }

 private:
  void make_rows() {
    std::vector<int64_t> positions;
    std::vector<int32_t> row_sequence, first_row = {0}, first_position;
    for (int64_t s = 0; s < shape_.sequences; ++s) {
      for (int64_t r = 0; r < shape_.rows; ++r) {
        positions.push_back(shape_.context + r), row_sequence.push_back(static_cast<int32_t>(s));
      }
      first_row.push_back(static_cast<int32_t>(positions.size()));
      first_position.push_back(static_cast<int32_t>(shape_.context));
    }
    const size_t elems = positions.size() * static_cast<size_t>(shape_.heads * shape_.dim);
    positions_ = upload(positions), row_sequence_ = upload(row_sequence);
    first_row_ = upload(first_row), first_position_ = upload(first_position);
    q_ = upload(std::vector<float>(elems, 0.5f)), out_ = upload(std::vector<bf16>(elems));
  }
  const Shape shape_;
  Buffer k_, v_, positions_, row_sequence_, first_row_, first_position_, q_, out_;
  std::vector<Buffer> tables_;
};

void attention(benchmark::State& state) {
  auto stream = Stream::make();
  if (!stream.ok()) return state.SkipWithError("no GPU");
  const Shape shape(state);
  Batch batch(shape);
  const int64_t launches = std::max<int64_t>(kMinLaunches, batch.copies());
  const Graph graph = *Graph::capture(*stream, [&] {
    for (int64_t i = 0; i < launches; ++i) batch.launch(i);
    return Status();
  });
  Event start = *Event::make(), stop = *Event::make();
  for (auto _ : state) {
    start.record(*stream), graph.launch(*stream), stop.record(*stream);
    if (!stream->synchronize().ok()) return state.SkipWithError("the device failed");
    state.SetIterationTime(*stop.microseconds_since(start) * 1e-6 / static_cast<double>(launches));
  }
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  if (shape.rows == 1)
    state.counters["bytes/s"] = benchmark::Counter(shape.keys() * shape.kv_heads * shape.dim * 4, rate);
  else
    state.counters["flop/s"] = benchmark::Counter(shape.keys() * shape.heads * shape.dim * 4, rate);
}

BENCHMARK(attention)  // gpt-oss-20b, then qwen3-30b-a3b
    ->ArgsProduct({{64}, {8}, {64}, {1, 8, 64}, {127, 1023, 8191}, {1}, {0, 128}})
    ->ArgsProduct({{64}, {8}, {64}, {1}, {0}, {2048, 8192}, {0, 128}})
    ->ArgsProduct({{32}, {4}, {128}, {1, 8, 64}, {127, 1023, 8191}, {1}, {0}})
    ->ArgsProduct({{32}, {4}, {128}, {1}, {0}, {2048, 8192}, {0}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond)
    ->Iterations(20);

}  // namespace
}  // namespace fp4moe

BENCHMARK_MAIN();
