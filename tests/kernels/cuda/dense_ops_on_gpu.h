// What tests of the GPU's dense ops share: the ops, the oracle and a stream.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "kernels/cuda/dense_kernels.h"
#include "kernels/dense_case.h"

namespace fp4moe {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class DenseOpsCuda : public testing::Test {
 protected:
  void SetUp() override {
    const Status prepared = prepare_cuda_dense_ops();
    ASSERT_TRUE(prepared.ok()) << prepared.message();
  }
  void wait() {
    const Status status = current_stream().synchronize();
    ASSERT_TRUE(status.ok()) << status.message();
  }
  const DenseOps& ops_ = *cuda_dense_ops();
  const DenseOps& ref_ = ref_dense_ops();
  ThreadPool pool_{2};
  Stream stream_ = std::move(Stream::make()).value();
  StreamScope scope_{stream_};
};

inline std::vector<float> filled(int64_t n, float value) {
  return std::vector<float>(static_cast<size_t>(n), value);
}

}  // namespace fp4moe
