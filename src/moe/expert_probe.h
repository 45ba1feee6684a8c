// ExpertProbe runs experts of one layer with one row of the runner table on random inputs, without router or
// exchange. The self-test, the numerics report and the autotuner use it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "device/stream.h"
#include "io/checkpoint/expert_weights.h"
#include "moe/device/device_expert_runner.h"
#include "moe/table.h"

namespace fp4moe {

struct ProbeShape {
  BatchLayout layout = BatchLayout::kPacked;
  int64_t rows_per_expert = 1;  // upper bound for run()'s `rows`
  uint64_t seed = 0;
};

class ExpertProbe {
 public:
  // Packs the experts of `weights`, which must have problem.num_experts experts. kDoesNotFit if memory
  // allocation fails.
  static Result<ExpertProbe> make(const RunnerRow& row, const MoeProblem& problem, const Numerics& numerics,
                                  const MoeWeightsView& weights, const ProbeShape& shape, ThreadPool& pool);

  // Runs `rows` input rows per expert; returns y [L, rows, H], valid until the next run. Input row r of
  // expert e depends only on the seed, e and r; its values are nearly normal with variance 1, rounded to
  // bf16.
  Result<std::span<const float>> run(int64_t rows, ThreadPool& pool);
  // CPU rows only.
  PackedExperts& experts() { return experts_; }

 private:
  // State of a GPU row; x_ and y_ stay in host memory.
  struct OnDevice {
    Stream stream;
    DeviceExpertRunner experts;
    Buffer x, ids, y;
    Arena scratch;
  };
  Status make_on_device(const Numerics& numerics, const MoeWeightsView& weights, ThreadPool& pool);
  Status run_on_device(int64_t rows);
  void fill(int64_t rows, ThreadPool& pool);

  const RunnerRow* row_ = nullptr;
  MoeProblem problem_;
  ProbeShape shape_;
  PackedExperts experts_;
  Buffer x_, y_;
  Arena scratch_;
  int64_t filled_rows_ = 0;  // rows per expert that x_ holds
  std::vector<int64_t> offsets_, counts_;
  std::unique_ptr<OnDevice> on_device_;
};

// Returns a layer with only the chosen experts. If the numerics use one activation scale for the whole layer,
// the chosen experts keep it.
MoeWeightsView choose_experts_of(const MoeWeightsView& all, std::span<const int64_t> chosen,
                                 const Numerics& numerics);

}  // namespace fp4moe
