// The configuration of a checkpoint that make-tiny would write.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "io/write/make_tiny_files.h"

namespace fp4moe {

inline ModelConfig config_of(const MakeTinyOptions& options) {
  const auto files = make_tiny_files(options);
  EXPECT_TRUE(files.ok());
  auto config = parse_model_config(files->config.dump(), "", "");
  EXPECT_TRUE(config.ok()) << config.status().message();
  return std::move(*config);
}

}  // namespace fp4moe
