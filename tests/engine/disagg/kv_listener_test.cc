#include "engine/disagg/kv_listener.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <future>
#include <vector>

#include "engine/test_peer.h"
#include "support/eventually.h"

namespace fp4moe {
namespace {

using Event = KvListener::Event;

TEST(KvListener, PlacesThatCannotBeAreRefused) {
  TestPort port;
  EXPECT_EQ(KvListener().listen("127.0.0.1", port.port()).code(), StatusCode::kUnavailable);
  EXPECT_EQ(KvListener().listen("no.such.host.invalid", 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(KvListener().listen("192.0.2.1", 0).code(), StatusCode::kInvalidArgument);
}

TEST(KvListener, WakesAndEnds) {
  TestPort port;
  port.listener().wake();
  EXPECT_EQ(port.listener().accept().event, Event::kWoken);
  auto event = std::async(std::launch::async, [&] { return port.listener().accept().event; });
  port.listener().shut_down();
  EXPECT_EQ(event.get(), Event::kEnded);
  EXPECT_EQ(port.listener().accept().event, Event::kEnded);
}

// Exhausts the process's file descriptors during its lifetime.
class NoDescriptors {
 public:
  NoDescriptors() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int next = ::dup(0);  // the lowest free one
    ::close(next);
    rlimit low = before_;
    low.rlim_cur = static_cast<rlim_t>(next) + 8;
    setrlimit(RLIMIT_NOFILE, &low);
    for (int fd; (fd = ::dup(0)) >= 0;) taken_.push_back(fd);
  }
  ~NoDescriptors() {
    give_back();
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  void give_back() {
    for (const int fd : taken_) ::close(fd);
    taken_.clear();
  }

 private:
  rlimit before_{};
  std::vector<int> taken_;
};

// Without free descriptors, the listener accepts connections on its spare descriptor and closes them. Once
// descriptors are free, it keeps connections again.
TEST(KvListener, RunsOutOfDescriptorsAndRecovers) {
  TestPort port;
  std::vector<Stranger> strangers;
  for (int i = 0; i < 3; ++i) strangers.emplace_back(port.port());
  {
    NoDescriptors none;
    for (const Stranger& stranger : strangers) {
      EXPECT_EQ(port.listener().accept().event, Event::kNoDescriptors);
      EXPECT_TRUE(stranger.is_ended_within(10));
    }
    none.give_back();
    const Stranger next(port.port());
    EXPECT_NE(port.accept(), nullptr);
  }
  const Stranger last(port.port());
  EXPECT_NE(port.accept(), nullptr);
}

}  // namespace
}  // namespace fp4moe
