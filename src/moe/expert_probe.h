// ExpertProbe: experts of one layer, run by a row of the table on random rows, without router and exchange.
// What the self-test, the numerics report and the autotuner look at.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "device/stream.h"
#include "io/expert_weights.h"
#include "moe/device_expert_runner.h"
#include "moe/table.h"

namespace fp4moe {

struct ProbeShape {
  BatchLayout layout = BatchLayout::kPacked;
  int64_t rows_per_expert = 1;  // at most
  uint64_t seed = 0;
};

class ExpertProbe {
 public:
  // Packs all of `weights`' experts, as many as problem.num_experts. kDoesNotFit if memory is refused.
  static Result<ExpertProbe> make(const RunnerRow& row, const MoeProblem& problem, const Numerics& numerics,
                                  const MoeWeightsView& weights, const ProbeShape& shape, ThreadPool& pool);

  // The first `rows` rows of every expert: y [L, rows, H], valid until the next run. Row r of expert e is the
  // same for every row of the table, shape and number of rows: normal, of variance 1, rounded to bf16.
  Result<std::span<const float>> run(int64_t rows, ThreadPool& pool);
  // Of a CPU's row.
  PackedExperts& experts() { return experts_; }

 private:
  // What a GPU's row needs; x_ and y_ stay the host's.
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
  int64_t filled_rows_ = 0;  // x_ holds so many of each expert
  std::vector<int64_t> offsets_, counts_;
  std::unique_ptr<OnDevice> on_device_;
};

// Some experts of a layer, as if they were all. Where numerics take one scale over all experts, those chosen
// keep the scale of all.
MoeWeightsView choose_experts_of(const MoeWeightsView& all, std::span<const int64_t> chosen,
                                 const Numerics& numerics);

}  // namespace fp4moe
