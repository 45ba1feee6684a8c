// main() of the tests labelled cuda, which run with GPU 0 as the current GPU. If GPU 0 is not usable, they
// print the reason and are skipped, or fail if FP4MOE_REQUIRE_CUDA=1 is set in the environment.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "device/device_context.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;  // SKIP_RETURN_CODE
  testing::InitGoogleTest(&argc, argv);
  const auto gpu = fp4moe::DeviceContext::of(0);
  if (gpu.ok()) {
    const fp4moe::DeviceScope scope(**gpu);
    return RUN_ALL_TESTS();
  }
  const char* required = std::getenv("FP4MOE_REQUIRE_CUDA");
  const bool fails = required != nullptr && std::string_view(required) == "1";
  std::printf("%s: this test needs a GPU: %s\n", fails ? "FAILED" : "SKIPPED",
              gpu.status().message().c_str());
  return fails ? 1 : kSkipped;
}
