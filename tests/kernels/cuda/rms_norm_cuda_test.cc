// Compares the GPU's norm of many rows with the oracle and, bit for bit, with that of fewer rows.
#include <limits>

#include "device/stream.h"
#include "kernels/cuda/device_array.h"
#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

struct Normed {
  std::vector<float> f32, act;
};

// in_place: the f32 output replaces x.
Normed norm_on_gpu(const std::vector<float>& x, const std::vector<float>& weight, bool in_place) {
  const int64_t h = std::ssize(weight), rows = std::ssize(x) / h;
  const std::vector<float> poison(x.size(), std::numeric_limits<float>::quiet_NaN());
  const DeviceArray<float> device_x(x), device_weight(weight), out(poison);
  const DeviceArray<bf16> act(to_bf16(poison));
  ThreadPool pool(1);
  Stream stream = Stream::make().value();
  const StreamScope scope(stream);
  const DeviceArray<float>& f32 = in_place ? device_x : out;
  cuda_dense_ops()->rms_norm(
      {device_x.data(), device_weight.data(), 1e-5f, {act.data(), DType::kBF16, rows, h}, f32.data()}, pool);
  const Status status = stream.synchronize();
  EXPECT_TRUE(status.ok()) << status.message();
  return {f32.values(), to_float(act.values())};
}

// From 1024 rows of up to 4096 columns on, a warp norms a row; a block norms any other row.
TEST(RmsNormCuda, ManyRowsHaveTheSameBits) {
  ThreadPool pool(2);
  for (const int64_t h : {4, 132, 2044, 2048, 2880, 4096, 4100}) {
    const int64_t many = 1027, few = 1023;
    const std::vector<float> x = Random(8).normal(many * h, 3), weight = Random(9).normal(h);
    std::vector<float> expected(x.size());
    ref_dense_ops().rms_norm(
        {x.data(), weight.data(), 1e-5f, {nullptr, DType::kBF16, many, h}, expected.data()}, pool);
    const Normed all = norm_on_gpu(x, weight, /*in_place=*/false);
    EXPECT_TRUE(within_relative_l2(all.f32, expected, 1e-6)) << h;
    EXPECT_TRUE(same_bits(norm_on_gpu(x, weight, /*in_place=*/true).f32, all.f32)) << h;
    const Normed part = norm_on_gpu({x.begin(), x.begin() + few * h}, weight, /*in_place=*/false);
    const auto first = [&](const std::vector<float>& values) {
      return std::vector<float>(values.begin(), values.begin() + few * h);
    };
    EXPECT_TRUE(same_bits(part.f32, first(all.f32))) << h;
    EXPECT_TRUE(same_bits(part.act, first(all.act))) << h;
  }
}

}  // namespace
}  // namespace fp4moe
