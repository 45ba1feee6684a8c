// Weights replaced on CPU ranks.
#include "engine/reloading.h"

namespace fp4moe {
namespace {

TEST_P(Reloading, GivesTheOutputsOfAFreshStart) {
  make_models(GetParam());
  check_updates(config_of_case(GetParam(), "cpu"));
}

INSTANTIATE_TEST_SUITE_P(
    Cpu, Reloading,
    testing::Values(ReloadCase{"gpt-oss-tiny"},  //
                    ReloadCase{.like = "gpt-oss-tiny", .kv_cache_dtype = "fp8_e4m3", .dense_quant = "q8"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 4, .ep = 4},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .a2a = "none"},
                    ReloadCase{.like = "gpt-oss-tiny", .dialect = "bf16", .tp = 2, .ep = 2},
                    ReloadCase{.like = "deepseek-v3-tiny", .dialect = "modelopt", .drafts = "NEXTN"},
                    ReloadCase{.like = "gpt-oss-tiny", .drafts = "EAGLE3"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 4, .ep = 4, .drafts = "EAGLE3"},
                    ReloadCase{.like = "deepseek-v3-tiny", .dialect = "modelopt", .drafts = "STANDALONE"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .ep = 2, .drafts = "STANDALONE"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 2, .a2a = "deepep", .num_redundant = 2},
                    ReloadCase{"deepseek-v3-tiny", "modelopt", 4, 4, 4, "deepep", "auto", "none", "NEXTN", 4},
                    ReloadCase{"deepseek-v3-tiny", "modelopt", 4, 4, 4, "deepep"},
                    ReloadCase{"deepseek-v3-tiny", "compressed-nvfp4", 4, 4, 1, "flashinfer"},
                    ReloadCase{.like = "qwen3-next-tiny"}),
    reload_name);

using ReloadFailures = Reloading;

TEST_P(ReloadFailures, AfterTheFirstByteEndTheJobByName) {
  make_models(GetParam());
  check_failure(config_of_case(GetParam(), "cpu"));
}

TEST_P(ReloadFailures, BeforeTheFirstByteLeaveTheOldWeights) {
  make_models(GetParam());
  check_refusal(config_of_case(GetParam(), "cpu"));
}

INSTANTIATE_TEST_SUITE_P(
    Cpu, ReloadFailures,
    testing::Values(ReloadCase{"gpt-oss-tiny"}, ReloadCase{.like = "gpt-oss-tiny", .tp = 4, .ep = 4},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 4, .ep = 4, .drafts = "EAGLE3"},
                    ReloadCase{.like = "gpt-oss-tiny", .tp = 4, .a2a = "deepep", .num_redundant = 4}),
    reload_name);

}  // namespace
}  // namespace fp4moe
