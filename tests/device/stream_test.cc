// Tests Stream, Event, Graph and the device's memory resources on a GPU.
#include "device/stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/graph.h"
#include "device/pinned_memory.h"
#include "device/side_stream.h"

namespace fp4moe {
namespace {

constexpr int64_t kInts = 1 << 20, kBytes = kInts * static_cast<int64_t>(sizeof(int));

struct Memories {
  Buffer from = Buffer::make(kBytes, pinned_memory()).value();
  Buffer to = Buffer::make(kBytes, pinned_memory()).value();
  Buffer device = Buffer::make(kBytes, device_memory()).value();

  Memories() { fill(1); }
  void fill(int first) {
    std::iota(from.as<int>(), from.as<int>() + kInts, first);
    std::fill_n(to.as<int>(), kInts, -1);
  }
  // Copies to the device and back, on the current stream.
  Status round_trip() const {
    copy_async(device.data(), from.data(), kBytes);
    copy_async(to.data(), device.data(), kBytes);
    return {};
  }
  bool arrived() const { return std::equal(to.as<int>(), to.as<int>() + kInts, from.as<int>()); }
};

TEST(StreamTest, TheDeviceIsKnown) {
  const auto info = device_info(0);
  ASSERT_TRUE(info.ok());
  EXPECT_GE(info->compute_capability, 80);
  EXPECT_GT(info->num_sms, 0);
  EXPECT_GT(info->l2_bytes, 0);
  const auto memory = device_memory_info(0);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(memory->total_bytes, info->memory_bytes);
  EXPECT_LE(memory->free_bytes, memory->total_bytes);
}

TEST(StreamTest, CopiesGoThroughTheCurrentStream) {
  Memories m;
  Stream stream = Stream::make().value();
  StreamScope scope(stream);
  ASSERT_TRUE(m.round_trip().ok());
  ASSERT_TRUE(stream.synchronize().ok());
  EXPECT_TRUE(m.arrived());
}

// Uploads from unpinned memory in sizes that the driver stages.
TEST(StreamTest, AnUploadHasArrivedWhenItReturns) {
  Stream stream = Stream::make().value();
  StreamScope scope(stream);
  const Buffer device = Buffer::make(64 << 10, device_memory()).value();
  const Buffer to = Buffer::make(64 << 10, pinned_memory()).value();
  for (int i = 0; i < 1000; ++i) {
    const std::vector<int> from(static_cast<size_t>(64 + i % 3 * 8000), i);
    const auto num_bytes = static_cast<int64_t>(from.size() * sizeof(int));
    ASSERT_TRUE(device_memory().upload(device.data(), from.data(), num_bytes).ok());
    copy_async(to.data(), device.data(), num_bytes);
    ASSERT_TRUE(stream.synchronize().ok());
    ASSERT_TRUE(std::equal(from.begin(), from.end(), to.as<int>())) << "upload " << i;
  }
}

TEST(StreamTest, TheFirstFailureIsKeptUntilItIsTaken) {
  Stream stream = Stream::make().value();
  StreamScope scope(stream);
  stream.keep(internal_error("first"));
  stream.keep(internal_error("second"));
  EXPECT_EQ(stream.synchronize().message(), "first");
  EXPECT_TRUE(stream.synchronize().ok());
}

TEST(StreamTest, MemoryThatDoesNotFitIsAnError) {
  const auto memory = device_memory_info(0);
  const auto buffer = Buffer::make(memory->total_bytes * 2, device_memory());
  EXPECT_EQ(buffer.status().code(), StatusCode::kDoesNotFit);
  EXPECT_TRUE(Buffer::make(64, device_memory()).ok());  // the error is not sticky
}

TEST(GraphTest, ReplaysWhatWasRecorded) {
  Memories m;
  Stream stream = Stream::make().value();
  auto graph = Graph::capture(stream, [&] { return m.round_trip(); });
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  EXPECT_EQ(graph->num_nodes(), 2);
  ASSERT_TRUE(stream.synchronize().ok());
  EXPECT_EQ(m.to.as<int>()[0], -1);  // capture does not run the work
  for (int first : {5, 6}) {
    m.fill(first);
    graph->launch(stream);
    ASSERT_TRUE(stream.synchronize().ok());
    EXPECT_TRUE(m.arrived());
  }
  const Graph moved = std::move(*graph);
  m.fill(7);
  moved.launch(stream);
  ASSERT_TRUE(stream.synchronize().ok());
  EXPECT_TRUE(m.arrived());
}

TEST(GraphTest, AnErrorOfTheWorkLeavesTheStreamUsable) {
  Memories m;
  Stream stream = Stream::make().value();
  const auto graph = Graph::capture(stream, [&] {
    copy_async(m.to.data(), m.device.data(), kBytes);
    return invalid_argument("no");
  });
  EXPECT_EQ(graph.status().message(), "no");
  // A stream cannot be synchronised during capture.
  EXPECT_FALSE(Graph::capture(stream, [&] { return stream.synchronize(); }).ok());
  StreamScope scope(stream);
  ASSERT_TRUE(m.round_trip().ok());
  ASSERT_TRUE(stream.synchronize().ok());
  EXPECT_TRUE(m.arrived());
}

TEST(GraphTest, OtherThreadsMayAllocateWhileOneRecords) {
  Memories m;
  Stream stream = Stream::make().value();
  const auto graph = Graph::capture(stream, [&] {
    Status other;
    std::thread thread([&] {
      const DeviceScope scope(stream.device());
      other = Buffer::make(kBytes, device_memory()).status();
    });
    thread.join();
    return other.ok() ? m.round_trip() : other;
  });
  EXPECT_TRUE(graph.ok()) << graph.status().message();
}

// from -> device on the main stream, device -> beside on the side stream, beside -> to on the main stream.
TEST(SideStreamTest, WorkIsOrderedByForkAndJoinLaunchedAndRecorded) {
  Memories m;
  const Buffer beside = Buffer::make(kBytes, device_memory()).value();
  Stream stream = Stream::make().value();
  SideStream side = SideStream::make().value();
  const auto work = [&]() -> Status {
    copy_async(m.device.data(), m.from.data(), kBytes);
    {
      const StreamScope scope(side.fork(stream));
      copy_async(beside.data(), m.device.data(), kBytes);
    }
    side.join(stream);
    copy_async(m.to.data(), beside.data(), kBytes);
    return {};
  };
  const StreamScope scope(stream);
  for (const int first : {1, 2, 3}) {
    m.fill(first);
    ASSERT_TRUE(work().ok());
    ASSERT_TRUE(stream.synchronize().ok());
    EXPECT_TRUE(m.arrived()) << "launched, " << first;
  }
  const auto graph = Graph::capture(stream, work);
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  EXPECT_EQ(graph->num_nodes(), 3);
  for (const int first : {4, 5, 6}) {
    m.fill(first);
    graph->launch(stream);
    ASSERT_TRUE(stream.synchronize().ok());
    EXPECT_TRUE(m.arrived()) << "recorded, " << first;
  }
  m.fill(7);
  ASSERT_TRUE(work().ok());  // after a capture that used the same events
  ASSERT_TRUE(stream.synchronize().ok());
  EXPECT_TRUE(m.arrived());
}

TEST(SideStreamTest, WorkBelongsToTheMainStreamsLayerAndPeersAndItsFailureToTheMainStream) {
  Stream stream = Stream::make().value();
  SideStream side = SideStream::make().value();
  stream.begin_layer(7);
  EXPECT_FALSE(side.fork(stream).has_peers());
  side.join(stream);
  EXPECT_TRUE(stream.take_failure().ok());
  stream.set_has_peers();
  Stream& beside = side.fork(stream);
  EXPECT_EQ(beside.layer(), 7);
  EXPECT_TRUE(beside.has_peers());
  beside.keep(internal_error("kernel few_tokens, layer 7: no"));
  EXPECT_TRUE(stream.take_failure().ok());
  side.join(stream);
  EXPECT_EQ(stream.synchronize().message(), "kernel few_tokens, layer 7: no");
  EXPECT_TRUE(beside.synchronize().ok());
}

TEST(EventTest, MeasuresAndOrdersStreams) {
  Memories m;
  Stream stream = Stream::make().value(), other = Stream::make().value();
  Event start = Event::make().value(), end = Event::make().value();
  start.record(stream);
  {
    StreamScope scope(stream);
    copy_async(m.device.data(), m.from.data(), kBytes);
  }
  end.record(stream);
  end.hold(other);
  {
    StreamScope scope(other);
    copy_async(m.to.data(), m.device.data(), kBytes);
  }
  ASSERT_TRUE(other.synchronize().ok());
  EXPECT_TRUE(m.arrived());
  ASSERT_TRUE(end.synchronize().ok());
  EXPECT_GT(*end.microseconds_since(start), 0);
}

}  // namespace
}  // namespace fp4moe
