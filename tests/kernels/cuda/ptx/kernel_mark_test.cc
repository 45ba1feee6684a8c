// Tests the error that a stream reports if a kernel fails, launched eagerly or in a graph. A process cannot
// use the device after such an error, so each case runs in a separate process.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "base/thread_pool.h"
#include "device/graph.h"
#include "kernels/cuda/device_array.h"
#include "kernels/device_moe.h"

namespace fp4moe {
namespace {

// Runs four layers, each a sort and a copy of rows, then a final sort. Layer `layer` copies from an invalid
// address.
[[noreturn]] void fail_in(int layer, bool in_graph) {
  Stream stream = Stream::make().value();
  ThreadPool pool(1);
  constexpr int64_t kRows = 4, kCols = 256;
  const DeviceArray<float> x(kRows * kCols), y(kRows * kCols);
  const DeviceArray<int64_t> rows(std::vector<int64_t>{3, 2, 1, 0});
  const DeviceArray<int32_t> offsets(2), counts(1), slot_of_row(kRows), row_of_slot(kRows);
  const MoeSortArgs sort{.num_tokens = kRows,
                         .topk = 1,
                         .num_experts = 1,
                         .rows = {.max_rows = kRows,
                                  .offsets = offsets.data(),
                                  .counts = counts.data(),
                                  .slot_of_row = slot_of_row.data(),
                                  .row_of_slot = row_of_slot.data()}};
  const auto work = [&]() -> Status {
    for (int i = 0; i < 4; ++i) {
      stream.begin_layer(i);
      sm90_moe_ops()->sort(sort);
      const auto* from = i == layer ? reinterpret_cast<const float*>(uint64_t{1} << 46) : y.data();
      cuda_dense_ops()->gather_rows({from, x.data(), rows.data(), kRows, kCols * 4}, pool);
    }
    stream.end_layers();
    sm90_moe_ops()->sort(sort);
    return {};
  };
  Status status;
  if (in_graph) {
    const Graph graph = Graph::capture(stream, work).value();
    graph.launch(stream);
    status = stream.synchronize();
  } else {
    const StreamScope scope(stream);
    status = work();
    status = stream.synchronize();
  }
  std::fprintf(stderr, "[%s]\n", status.message().c_str());
  std::_Exit(0);
}

class KernelMarks : public testing::TestWithParam<bool> {
 protected:
  KernelMarks() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_P(KernelMarks, NameTheLayerOfAFailure) {
  EXPECT_EXIT(fail_in(0, GetParam()), testing::ExitedWithCode(0),
              "\\[device, in or after layer 0, kernel moe_sort: "
              ".*illegal memory access");
  EXPECT_EXIT(fail_in(2, GetParam()), testing::ExitedWithCode(0),
              "\\[device, in or after layer 2, kernel moe_sort: "
              ".*illegal memory access");
  EXPECT_EXIT(fail_in(3, GetParam()), testing::ExitedWithCode(0),
              "\\[device, in or after layer 3, kernel moe_sort: "
              ".*illegal memory access");
}

INSTANTIATE_TEST_SUITE_P(Ways, KernelMarks, testing::Bool(),
                         [](const auto& p) { return p.param ? "Recorded" : "Launched"; });

}  // namespace
}  // namespace fp4moe
