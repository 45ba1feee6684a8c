// Engines on the demo checkpoints, small enough for tests to reach their limits. Sources that include this
// header need the definition FP4MOE_MODELS.
#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/engine.h"

namespace fp4moe {

inline std::unique_ptr<Engine> make_engine(const EngineConfig& config) {
  Result<std::unique_ptr<Engine>> engine = Engine::make(config);
  EXPECT_TRUE(engine.ok()) << engine.status().to_string();
  return engine.ok() ? std::move(*engine) : nullptr;
}

inline EngineConfig config_of(const std::string& model) {
  EngineConfig config;
  config.model_path = std::string(FP4MOE_MODELS "/") + model;
  config.threads = 2;
  config.max_total_tokens = 4096;
  config.page_size = 8;
  return config;
}

// Test name for a demo's folder: "gptoss" for "demo-gptoss-mxfp4".
inline std::string demo_name(const testing::TestParamInfo<const char*>& which) {
  const std::string model = which.param;
  return model.substr(5, model.find('-', 5) - 5);
}

// Blocks the engine's thread in the callback of a separate request, so that requests submitted meanwhile
// start together.
class Hold {
 public:
  explicit Hold(Engine& engine) {
    Request request{.input_ids = {0}};
    request.sampling.max_new_tokens = 1;
    const auto id = engine.submit(std::move(request),
                                  [until = release_.get_future().share()](const Delta&) { until.wait(); });
    EXPECT_TRUE(id.ok()) << id.status().to_string();
  }
  ~Hold() { release_.set_value(); }

 private:
  std::promise<void> release_;
};

}  // namespace fp4moe
