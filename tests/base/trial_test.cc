#include "base/trial.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace fp4moe {
namespace {

TEST(Trial, OnlyListedFeaturesAreOnTrial) {
  unsetenv("FP4MOE_TRIAL");
  EXPECT_FALSE(is_on_trial("gpu-nodes"));
  for (const char* list : {"gpu-nodes", "gpu-nodes,others", "others,gpu-nodes", "a,,gpu-nodes,"}) {
    setenv("FP4MOE_TRIAL", list, 1);
    EXPECT_TRUE(is_on_trial("gpu-nodes")) << list;
    EXPECT_FALSE(is_on_trial("gpu")) << list;
  }
  for (const char* list : {"", ",", "gpu", "gpu-nodes-2", "1"}) {
    setenv("FP4MOE_TRIAL", list, 1);
    EXPECT_FALSE(is_on_trial("gpu-nodes")) << list;
  }
  unsetenv("FP4MOE_TRIAL");
}

}  // namespace
}  // namespace fp4moe
