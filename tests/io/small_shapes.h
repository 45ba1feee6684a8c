// The families and dialects of the tests' small checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace fp4moe {

struct Shape {
  const char *like, *dialect;  // as in MakeTinyOptions
};

inline auto all_shapes() {
  return testing::Values(Shape{"gpt-oss-tiny", "gpt-oss"}, Shape{"gpt-oss-tiny", "bf16"},
                         Shape{"qwen2-moe-tiny", "modelopt"}, Shape{"qwen2-moe-tiny", "bf16"},
                         Shape{"qwen3-moe-tiny", "compressed-mxfp4"}, Shape{"deepseek-v3-tiny", "modelopt"},
                         Shape{"deepseek-v3-tiny", "compressed-nvfp4"}, Shape{"deepseek-v3-tiny", "bf16"},
                         Shape{"glm-4.5", "modelopt"}, Shape{"glm-4.7-flash", "compressed-nvfp4"},
                         Shape{"kimi-k2.5", "modelopt"}, Shape{"qwen3-vl-30b-a3b", "bf16"},
                         Shape{"qwen3-next-tiny", "compressed-nvfp4"}, Shape{"qwen3.5-moe-tiny", "modelopt"},
                         Shape{"qwen3.5-moe-tiny", "bf16"});
}

// Name of a test for this shape, such as "gpt_oss_tiny_bf16".
inline std::string shape_name(const testing::TestParamInfo<Shape>& test) {
  std::string name = test.param.like + std::string("_") + test.param.dialect;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}

}  // namespace fp4moe
