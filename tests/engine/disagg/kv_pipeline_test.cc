// A pipeline handles items in order and beside its owner, keeps few of them, and stops at an error.
#include "engine/disagg/kv_pipeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <stdexcept>

#include "support/eventually.h"

namespace fp4moe {
namespace {

TEST(KvPipeline, ItemsAreHandledInOrderAndComeBack) {
  std::vector<int> handled;
  std::vector<int> back;
  {
    KvPipeline<int> pipeline([&](int& item) -> Status {
      handled.push_back(item);
      item += 1000;
      return {};
    });
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(pipeline.put(i).ok());
      for (const int item : pipeline.take_done()) back.push_back(item);
    }
    ASSERT_TRUE(pipeline.drain().ok());
    for (const int item : pipeline.take_done()) back.push_back(item);
  }
  ASSERT_EQ(handled.size(), 100u);
  ASSERT_EQ(back.size(), 100u);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(handled[static_cast<size_t>(i)], i);
    EXPECT_EQ(back[static_cast<size_t>(i)], i + 1000);
  }
}

// One item is handled and one waits; the next put() waits for the first to end.
TEST(KvPipeline, FewItemsWait) {
  std::promise<void> go;
  std::atomic<int> num_put = 0;
  KvPipeline<int> pipeline([open = go.get_future().share()](int&) -> Status {
    open.wait();
    return {};
  });
  auto owner = std::async(std::launch::async, [&] {
    for (int i = 0; i < 3; ++i, ++num_put) EXPECT_TRUE(pipeline.put(i).ok());
    EXPECT_TRUE(pipeline.drain().ok());
    return pipeline.take_done();
  });
  EXPECT_TRUE(eventually([&] { return num_put == 2; }));
  EXPECT_EQ(owner.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  EXPECT_EQ(num_put, 2);
  go.set_value();
  EXPECT_EQ(owner.get(), (std::vector<int>{0, 1, 2}));
}

TEST(KvPipeline, TheDestructorHandlesWhatWaits) {
  std::atomic<int> num_handled = 0;
  std::optional<KvPipeline<int>> pipeline;
  pipeline.emplace([&](int&) -> Status {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ++num_handled;
    return {};
  });
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(pipeline->put(i).ok());
  pipeline.reset();
  EXPECT_EQ(num_handled, 4);
}

TEST(KvPipeline, NothingIsHandledAfterAnError) {
  for (const bool throws : {false, true}) {
    std::atomic<int> num_handled = 0;
    KvPipeline<int> pipeline([&](int&) -> Status {
      ++num_handled;
      if (throws) throw std::runtime_error("a torn cable");
      return unavailable("a torn cable");
    });
    static_cast<void>(pipeline.put(0));
    const Status status = pipeline.drain();
    EXPECT_NE(status.message().find("a torn cable"), std::string::npos) << status.to_string();
    EXPECT_EQ(pipeline.put(1).message(), status.message());
    EXPECT_EQ(num_handled, 1);
  }
}

}  // namespace
}  // namespace fp4moe
