#include "kernels/dense_case.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

class Embed : public testing::TestWithParam<const DenseOps*> {};

TEST_P(Embed, CopiesRowsExactly) {
  ThreadPool pool(2);
  constexpr int64_t kRows = 9, kHidden = 37;
  const std::vector<bf16> table = to_bf16(Random(1).normal(kRows * kHidden));
  for (const std::vector<int32_t>& ids : {std::vector<int32_t>{}, {8}, {0, 8, 3, 3, 5}}) {
    std::vector<float> out(ids.size() * kHidden), expected;
    for (int32_t id : ids)
      for (int64_t i = 0; i < kHidden; ++i) expected.push_back(bf16_to_float(table[id * kHidden + i]));
    GetParam()->embed({table.data(), ids.data(), out.data(), static_cast<int64_t>(ids.size()), kHidden},
                      pool);
    EXPECT_EQ(out, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, Embed, testing::ValuesIn([] {
                           std::vector<const DenseOps*> tables = cpu_tables();
                           tables.push_back(&ref_dense_ops());
                           return tables;
                         }()),
                         [](const auto& p) { return std::string(p.param->name); });

}  // namespace
}  // namespace fp4moe
