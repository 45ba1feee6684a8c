// Weights replaced on GPUs. The steps are recorded graphs, which read the new weights at the old addresses.
#include <cstdlib>

#include "engine/reloading.h"

namespace fp4moe {
namespace {

// Set before the first use of a GPU, which reads the variable; a value from outside stays.
const bool environment_is_set = [] {
  setenv("FP4MOE_RANKS_PER_GPU", "8", 0);
  return true;
}();

TEST_P(Reloading, GivesTheOutputsOfAFreshStart) {
  ASSERT_TRUE(environment_is_set);
  make_models(GetParam());
  check_updates(config_of_case(GetParam(), "cuda"));
}

INSTANTIATE_TEST_SUITE_P(
    Gpu, Reloading,
    testing::Values(ReloadCase{"gpt-oss-tiny"},  //
                    ReloadCase{.like = "gpt-oss-tiny", .kv_cache_dtype = "fp8_e4m3"},
                    ReloadCase{.like = "gpt-oss-tiny", .dense_quant = "fp8"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .ep = 2},
                    ReloadCase{.like = "deepseek-v3-tiny", .dialect = "modelopt", .drafts = "NEXTN"},
                    ReloadCase{.like = "gpt-oss-tiny", .drafts = "EAGLE3"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .ep = 2, .drafts = "EAGLE3"},
                    ReloadCase{.like = "deepseek-v3-tiny", .dialect = "modelopt", .drafts = "STANDALONE"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .a2a = "deepep", .num_redundant = 2},
                    ReloadCase{"deepseek-v3-tiny", "modelopt", 2, 2, 2, "deepep", "auto", "none", "NEXTN", 4},
                    ReloadCase{"deepseek-v3-tiny", "modelopt", 2, 2, 2, "deepep"},
                    ReloadCase{"deepseek-v3-tiny", "modelopt", 2, 2, 1, "flashinfer"},
                    ReloadCase{.like = "qwen3-next-tiny"}),
    reload_name);

using ReloadFailures = Reloading;

TEST_P(ReloadFailures, AfterTheFirstByteEndTheJobByName) {
  make_models(GetParam());
  check_failure(config_of_case(GetParam(), "cuda"));
}

TEST_P(ReloadFailures, BeforeTheFirstByteLeaveTheOldWeights) {
  make_models(GetParam());
  check_refusal(config_of_case(GetParam(), "cuda"));
}

INSTANTIATE_TEST_SUITE_P(Gpu, ReloadFailures,
                         testing::Values(ReloadCase{"gpt-oss-tiny"},
                                         ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .ep = 2}),
                         reload_name);

}  // namespace
}  // namespace fp4moe
