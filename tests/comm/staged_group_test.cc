// Sums and gathers of ranks on GPUs that do not share memory: the bits of loops on the host, which are those
// of ranks that do (device_communicator_test.cc).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/gpu_ranks.h"
#include "formats/bf16.h"
#include "support/compare.h"

namespace fp4moe {
namespace {

class StagedRanks : public testing::TestWithParam<int> {
 protected:
  TestGroup group_{GetParam(),
                   {.offset = 0, .word_bytes = 48 << 10, .gather_bytes = 64 << 10, .is_staged = true}};
};
INSTANTIATE_TEST_SUITE_P(Ranks, StagedRanks, testing::Values(1, 2, 3, 8));

void check_sums(TestGroup& group, bool bf16_partials) {
  if (bf16_partials) group.for_each([](int, DeviceCommunicator& rank) { rank.send_bf16_partials(); });
  uint64_t seed = 1;
  for (const int64_t n : {8, 2880, 8 * 1021, 12 << 10, 40000}) {  // the last in pieces
    const std::vector<float> before = random_floats(n, ++seed);
    std::vector<float> expected = before, sum(before.size());
    std::vector<std::vector<float>> partials;
    std::vector<Buffer> partial, out;
    group.for_each([&](int, DeviceCommunicator&) {
      partials.push_back(random_floats(n, ++seed));
      partial.push_back(on_device(partials.back()));
      out.push_back(on_device(before));
    });
    for (const auto& values : partials)
      for (size_t i = 0; i < sum.size(); ++i)
        sum[i] += bf16_partials ? bf16_to_float(float_to_bf16(values[i])) : values[i];
    for (size_t i = 0; i < sum.size(); ++i) expected[i] += sum[i];
    group.for_each([&](int r, DeviceCommunicator& rank) {
      const auto i = static_cast<size_t>(r);
      EXPECT_FALSE(rank.fuses_norm(1, 2880));
      rank.add_all_reduced({"sum", 7}, partial[i].as<float>(), out[i].as<float>(), n);
    });
    group.expect_ok();
    for (const Buffer& of_rank : out) EXPECT_TRUE(same_bits(from_device<float>(of_rank), expected)) << n;
  }
}

TEST_P(StagedRanks, SumsHaveTheHostsBits) { check_sums(group_, false); }
TEST_P(StagedRanks, SumsOfBf16PartialsHaveTheHostsBits) { check_sums(group_, true); }

// Parts of rows, of different widths; one rank has none.
TEST_P(StagedRanks, Gathers) {
  const int num_ranks = GetParam();
  for (const int64_t rows : {1, 3, 16})
    for (const int64_t unit : {4, 16}) {
      std::vector<int64_t> first = {0};
      for (int r = 0; r < num_ranks; ++r) first.push_back(first.back() + unit * (r % 3 == 1 ? 0 : r + 5));
      const auto width = static_cast<size_t>(first.back());
      std::vector<uint8_t> whole(static_cast<size_t>(rows) * width);
      for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<uint8_t>(i * 13 + i / 256);
      std::vector<Buffer> mine, out, rows_out;
      group_.for_each([&](int r, DeviceCommunicator&) {
        std::vector<uint8_t> part;
        for (size_t row = 0; row < static_cast<size_t>(rows); ++row)
          part.insert(part.end(),
                      whole.begin() + static_cast<int64_t>(row * width) + first[static_cast<size_t>(r)],
                      whole.begin() + static_cast<int64_t>(row * width) + first[static_cast<size_t>(r) + 1]);
        part.resize(std::max<size_t>(part.size(), 16));
        mine.push_back(on_device(part));
        out.push_back(on_device(std::vector<uint8_t>(whole.size())));
      });
      group_.for_each([&](int r, DeviceCommunicator& rank) {
        const auto i = static_cast<size_t>(r);
        rank.gather_columns({"gather"}, mine[i].data(), rows, first, out[i].data());
      });
      group_.expect_ok();
      for (const Buffer& of_rank : out) EXPECT_EQ(from_device<uint8_t>(of_rank), whole);
    }
}

// A rank's rows are in their place in `out` already.
TEST_P(StagedRanks, GathersRowsInPlace) {
  constexpr int64_t kRowBytes = 64;
  std::vector<int64_t> first = {0};
  for (int r = 0; r < GetParam(); ++r) first.push_back(first.back() + 1 + r % 2);
  std::vector<uint8_t> whole(static_cast<size_t>(first.back() * kRowBytes));
  for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<uint8_t>(i * 31 + i / 64);
  std::vector<Buffer> out;
  group_.for_each([&](int r, DeviceCommunicator& rank) {
    const int64_t begin = first[static_cast<size_t>(r)] * kRowBytes;
    std::vector<uint8_t> own(whole.size());
    std::copy(whole.begin() + begin, whole.begin() + first[static_cast<size_t>(r) + 1] * kRowBytes,
              own.begin() + begin);
    out.push_back(on_device(own));
    rank.gather_rows({"gather"}, out.back().data() + begin, kRowBytes, first, out.back().data());
  });
  group_.expect_ok();
  for (const Buffer& of_rank : out) EXPECT_EQ(from_device<uint8_t>(of_rank), whole);
}

}  // namespace
}  // namespace fp4moe
