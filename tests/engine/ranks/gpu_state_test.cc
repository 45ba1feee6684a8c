// States on a GPU: with drafts, and handed over to and from other engines, on a GPU and on a CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "engine/ranks/growing_drafts.h"

namespace fp4moe {
namespace {

constexpr const char* kModel = "demo-qwen35-nvfp4";

TEST(GpuStates, DraftsChangeNoBitIfDecodingIsDeterministic) {
  EngineConfig flags;
  flags.device = "cuda";
  flags.enable_deterministic_inference = true;
  for (const bool graphs : {true, false}) {
    flags.disable_cuda_graph = !graphs;
    expect_states_without_drafts(kModel, flags, graphs ? "by graphs" : "without graphs");
  }
}

TEST(GpuStates, ARecordedStepThatVerifiesDraftsGivesTheBitsOfALaunchedOne) {
  EngineConfig flags;
  flags.device = "cuda";
  for (const bool deterministic : {false, true}) {
    flags.enable_deterministic_inference = deterministic;
    flags.disable_cuda_graph = false;
    Growing recorded(kModel, with_drafts(flags));
    flags.disable_cuda_graph = true;
    Growing launched(kModel, with_drafts(flags));
    expect_equal_bits_with_drafts(recorded, launched);
    EXPECT_EQ(recorded.states(), launched.states());
  }
}

// Otherwise the rows of drafts change the last bits, but not more than other rows do.
TEST(GpuStates, VerifiedRowsAgreeWithPlainDecoding) {
  EngineConfig flags;
  flags.device = "cuda";
  Growing drafted(kModel, with_drafts(flags)), plain(kModel, flags);
  std::vector<double> errors;
  compare_with_plain(drafted, plain, [&](const auto& a, const auto& b, const std::string&) {
    errors.push_back(relative_l2(a, b));
  });
  std::ranges::sort(errors);
  EXPECT_LT(errors[errors.size() / 2], 2e-2);
  EXPECT_LT(errors.back(), 1.0);
}

// A rank that receives pages and states continues with the same bits, recorded and launched.
TEST(GpuStates, StatesThatAreHandedOverAreWorthThePrompt) {
  for (const bool graphs : {true, false}) {
    Growing prefill(kModel, graphs), decode(kModel, graphs);
    Logits logits = prefill.step(kPrompts);
    decode.take_over(prefill);
    EXPECT_EQ(decode.states(), prefill.states());
    for (int i = 0; i < 8; ++i) {
      const auto next = best_of(logits);
      logits = prefill.step(next);
      ASSERT_EQ(decode.step(next), logits) << "step " << i;
    }
    EXPECT_EQ(decode.states(), prefill.states());
  }
}

std::vector<float> floats_of(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// A CPU's states have the same layout, and either device continues from the other's.
TEST(GpuStates, StatesOfACpuAreLaidOutAlike) {
  Growing gpu(kModel, false), cpu(kModel, false, {}, "cpu");
  gpu.step(kPrompts), cpu.step(kPrompts);
  const auto on_gpu = gpu.states(), on_cpu = cpu.states();
  for (size_t s = 0; s < on_gpu.size(); ++s) {
    const std::vector<float> values = floats_of(on_cpu[s]);
    EXPECT_LT(relative_l2(floats_of(on_gpu[s]), values), 0.3) << s;  // of another layout: about 1.4
    EXPECT_GT(std::ranges::count_if(values, [](float x) { return x != 0; }), std::ssize(values) / 2) << s;
  }
  Growing on_gpu_again(kModel, false), on_cpu_again(kModel, false, {}, "cpu");
  on_gpu_again.take_over(cpu);
  on_cpu_again.take_over(gpu);
  EXPECT_EQ(on_gpu_again.states(), on_cpu);
  EXPECT_EQ(on_cpu_again.states(), on_gpu);
}

// A state is read back as written, in pieces of any size, and no other slot changes.
TEST(GpuStates, AHandedOverStateChangesNoOther) {
  Growing growing(kModel, false);
  RankGroup& ranks = growing.ranks();
  const auto state_bytes = static_cast<size_t>(ranks.state_bytes());
  const auto num_slots = static_cast<int32_t>(ranks.num_slots());
  ASSERT_GT(num_slots, 2);
  std::mt19937 random(3);
  std::vector<std::vector<uint8_t>> states;
  for (int32_t slot = 0; slot < num_slots; ++slot) {
    std::vector<uint8_t>& state = states.emplace_back(state_bytes);
    for (uint8_t& byte : state) byte = static_cast<uint8_t>(random());
    ASSERT_TRUE(ranks.write_state(0, slot, 0, state).ok());
  }
  for (const size_t piece : {state_bytes, state_bytes / 2 + 3, state_bytes / 40 + 1}) {
    std::ranges::reverse(states[1]);
    for (size_t first = 0; first < state_bytes; first += piece)
      ASSERT_TRUE(ranks
                      .write_state(0, 1, static_cast<int64_t>(first),
                                   std::span(states[1]).subspan(first, std::min(piece, state_bytes - first)))
                      .ok());
    for (int32_t slot = 0; slot < num_slots; ++slot) {
      std::vector<uint8_t> now(state_bytes);
      for (size_t first = 0; first < state_bytes; first += piece)
        ASSERT_TRUE(ranks
                        .read_state(0, slot, static_cast<int64_t>(first),
                                    std::span(now).subspan(first, std::min(piece, state_bytes - first)))
                        .ok());
      ASSERT_EQ(now, states[static_cast<size_t>(slot)]) << "slot " << slot << " in pieces of " << piece;
    }
  }
  const StateCopy copies[] = {{1, 2}, {2, 3}};
  ASSERT_TRUE(ranks.copy_states(0, copies).ok());
  ASSERT_TRUE(ranks.finish_steps().ok());
  for (const int32_t slot : {1, 2, 3}) {
    std::vector<uint8_t> now(state_bytes);
    ASSERT_TRUE(ranks.read_state(0, slot, 0, now).ok());
    EXPECT_EQ(now, states[1]) << slot;
  }
}

}  // namespace
}  // namespace fp4moe
