// The facts of a model with states: nodes whose states have another shape refuse each other by name.
#include "engine/disagg/kv_hello.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "engine/fake_executor.h"
#include "io/small_model.h"
#include "io/status_matchers.h"
#include "io/temp_folder.h"

namespace fp4moe {
namespace {

TEST(KvHello, NamesTheShapeOfAState) {
  const TempFolder folder;
  ASSERT_TRUE(is_ok(make_tiny(folder.path(), small_model("qwen3.5-moe-tiny"))));
  const auto config = load_model_config(folder.path());
  ASSERT_TRUE(config.ok());
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.ok());
  const auto plan = plan_model(*config, {});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  const auto hello_of = [&](const ModelConfig& of) {
    FakeModel model(of, hashed_logits);
    const FakeExecutor executor(model, LoopShape{.num_slots = of.has_state() ? 2 : 0});
    return make_hello(*checkpoint, of, *plan, executor, nullptr);
  };
  const KvHello hello = hello_of(*config);
  EXPECT_TRUE(compare_hello(hello, hello_of(*config)).ok());
  const std::vector<std::function<void(ModelConfig&)>> changes{
      [](ModelConfig& other) { other.delta.num_value_heads *= 2; },
      [](ModelConfig& other) { other.delta.key_head_dim *= 2; },
      [](ModelConfig& other) { other.delta.value_head_dim *= 2; },
      [](ModelConfig& other) { other.delta.conv_width += 1; },
      // The same bytes: heads instead of dims.
      [](ModelConfig& other) {
        other.delta.num_value_heads *= 2;
        other.delta.value_head_dim /= 2;
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    ModelConfig other = *config;
    changes[i](other);
    const Status status = compare_hello(hello, hello_of(other));
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << i;
    EXPECT_NE(status.message().find("state of a sequence is "), std::string::npos) << status.message();
  }
  for (const auto& [name, value] : hello.facts)
    if (name == "state of a sequence") {
      const std::string bytes = std::to_string(StateCache::bytes_per_slot(*config)) + " bytes";
      EXPECT_NE(value.find(bytes), std::string::npos) << value;
    }
}

TEST(KvHello, TellsWeightsApart) {
  const TempFolder folder;
  MakeTinyOptions options = small_model("gpt-oss-tiny");
  for (const std::string name : {"a", "b"}) {
    options.seed = static_cast<uint64_t>(name[0]);
    ASSERT_TRUE(is_ok(make_tiny(folder.file(name), options)));
  }
  const auto config = load_model_config(folder.file("a"));
  const auto a = Checkpoint::open(folder.file("a")), b = Checkpoint::open(folder.file("b"));
  ASSERT_TRUE(config.ok() && a.ok() && b.ok());
  FakeModel model(*config, hashed_logits);
  const auto hello_of = [&](const Checkpoint& checkpoint, const std::string& version) {
    EngineConfig flags;
    flags.weight_version = version;
    const FakeExecutor executor(model, {});
    return make_hello(checkpoint, *config, plan_model(*config, flags).value(), executor, nullptr);
  };
  KvHello hello = hello_of(*a, "default");
  set_weights(hello, *b, "2");
  EXPECT_EQ(hello.facts, hello_of(*b, "2").facts);
  EXPECT_EQ(compare_hello(hello_of(*a, "default"), hello).message(),
            "weight version is default on the prefill node and 2 on the decode node; they must be the same");
  EXPECT_NE(compare_hello(hello_of(*a, "2"), hello).message().find("checkpoint fingerprint is"),
            std::string::npos);
  for (const std::string& version : {std::string("step 5"), std::string(64, '~')})
    EXPECT_TRUE(is_ok(check_weight_version(version)));
  for (const std::string& version :
       {std::string(), std::string(65, 'a'), std::string("a\n"), std::string("\xff"), std::string("é")})
    EXPECT_EQ(check_weight_version(version).code(), StatusCode::kInvalidArgument) << version;
}

}  // namespace
}  // namespace fp4moe
