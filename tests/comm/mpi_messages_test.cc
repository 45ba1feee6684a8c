// Tests frames and hellos from other processes: valid ones arrive; invalid ones are rejected and never write
// outside the heap.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "comm/mpi_frame.h"
#include "comm/mpi_hello.h"

namespace fp4moe {
namespace {

using namespace std::chrono_literals;

constexpr int kRanksPerProcess = 2;  // this process has ranks 2 and 3 of 6, the sender (process 2) 4 and 5
constexpr int64_t kHeap = 256;

struct Sink : FrameSink {
  Status hello(int, std::span<const uint8_t> payload) override {
    hellos.emplace_back(payload.begin(), payload.end());
    return {};
  }
  void failed(int, const Status& status) override { failures.push_back(status); }
  void bye(int process) override { byes.push_back(process); }
  std::vector<std::vector<uint8_t>> hellos;
  std::vector<Status> failures;
  std::vector<int> byes;
};

std::unique_ptr<RankMemory> memory() {
  auto made = RankMemory::make({.num_ranks = 6, .first_rank = 2, .num_local_ranks = 2, .heap_bytes = kHeap});
  for (const int rank : {2, 3}) std::memset((*made)->heap(rank), 0xcc, kHeap);
  return std::move(*made);
}

FrameOpHeader put_op(int64_t offset, int64_t num_bytes) {
  return {.op = static_cast<uint32_t>(FrameOp::kPut),
          .src = 4,
          .dst = 3,
          .offset = offset,
          .num_bytes = num_bytes};
}
FrameOpHeader signal_op(uint32_t slot, uint32_t value) {
  return {.op = static_cast<uint32_t>(FrameOp::kSignal), .src = 4, .dst = 3, .slot = slot, .value = value};
}

std::vector<uint8_t> frame_of(const FrameOpHeader& op, const void* payload) {
  std::vector<uint8_t> frame;
  append_op(frame, 2, op, payload);
  return frame;
}

Status apply(const std::vector<uint8_t>& frame, RankMemory& to, Sink& sink) {
  return apply_frame(frame, 2, kRanksPerProcess, to, sink);
}

TEST(MpiFrame, OperationsArriveInOrder) {
  const auto to = memory();
  Sink sink;
  std::vector<uint8_t> frame;
  append_op(frame, 2, put_op(10, 5), "first");
  append_op(frame, 2, put_op(12, 3), "xyz");
  append_op(frame, 2, put_op(kHeap, 0), nullptr);
  append_op(frame, 2, signal_op(15, 7), nullptr);
  append_op(frame, 2, {.op = static_cast<uint32_t>(FrameOp::kHello), .num_bytes = 2}, "hi");
  append_op(frame, 2, {.op = static_cast<uint32_t>(FrameOp::kFail), .value = 8, .num_bytes = 4}, "late");
  append_op(frame, 2, {.op = static_cast<uint32_t>(FrameOp::kBye)}, nullptr);
  ASSERT_TRUE(apply(frame, *to, sink).ok());
  EXPECT_EQ(std::memcmp(to->heap(3) + 9, "\xcc\x66ixyz\xcc", 7), 0);
  EXPECT_EQ(to->heap(2)[10], 0xcc);
  uint32_t seen = 0;
  EXPECT_TRUE(to->wait(3, 4, 15, 7, 0s, &seen).ok());
  EXPECT_EQ(sink.hellos, (std::vector<std::vector<uint8_t>>{{'h', 'i'}}));
  ASSERT_EQ(sink.failures.size(), 1u);
  EXPECT_EQ(sink.failures[0].to_string(), "deadline: late");
  EXPECT_EQ(sink.byes, std::vector<int>{2});
}

void expect_refused(const std::vector<uint8_t>& frame, const std::string& words) {
  const auto to = memory();
  Sink sink;
  const Status status = apply(frame, *to, sink);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("message from process 2: " + words), std::string::npos) << status.message();
  for (const int rank : {2, 3})
    for (int64_t i = 0; i < kHeap; ++i) ASSERT_EQ(to->heap(rank)[i], 0xcc);
}

TEST(MpiFrame, WhatCannotBeIsRefused) {
  const std::vector<uint8_t> payload(512, 1);
  expect_refused(frame_of(put_op(250, 7), payload.data()),
                 "put of 7 bytes: offset=250 must be inside a heap of 256");
  expect_refused(frame_of(put_op(-1, 1), payload.data()), "put of 1 bytes: offset=-1");
  expect_refused(frame_of(put_op(std::numeric_limits<int64_t>::max(), 8), payload.data()),
                 "put of 8 bytes: offset=");
  expect_refused(frame_of(put_op(std::numeric_limits<int64_t>::min(), 8), payload.data()),
                 "put of 8 bytes: offset=");
  expect_refused(frame_of(put_op(0, 257), payload.data()), "put of 257 bytes: offset=0");
  expect_refused(frame_of(signal_op(kSignalSlots, 1), nullptr), "slot=16 must be below 16");
  expect_refused(frame_of({.op = 9}, nullptr), "operation=9");
  for (const uint32_t code : {0u, 10u, 4000000000u})
    expect_refused(frame_of({.op = static_cast<uint32_t>(FrameOp::kFail), .value = code}, nullptr),
                   "status code=");
  for (const auto& [src, dst] :
       {std::pair{3u, 3u}, {6u, 3u}, {4u, 1u}, {4u, 4u}, {4u, 6u}, {4u, 0xffffffffu}}) {
    FrameOpHeader op = put_op(0, 4);
    op.src = src;
    op.dst = dst;
    expect_refused(frame_of(op, payload.data()), dst == 3 ? "source rank=" : "destination rank=");
  }
}

TEST(MpiFrame, BrokenFramesAreRefused) {
  const std::vector<uint8_t> good = frame_of(put_op(0, 16), "0123456789abcdef");
  for (size_t size = 0; size < good.size(); ++size) {
    if (size == sizeof(FrameHeader)) continue;  // a frame without operations is valid
    expect_refused({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}, "");
  }
  const auto with = [&](size_t at, uint32_t value) {
    std::vector<uint8_t> frame = good;
    std::memcpy(frame.data() + at, &value, 4);
    return frame;
  };
  expect_refused(with(0, 1), "magic=1");
  expect_refused(with(4, kFrameVersion + 1), "protocol version=3 must be 2, this process's version");
  expect_refused(with(8, 1), "sender=1 must be 2");
  std::vector<uint8_t> huge = good;
  for (const int64_t bytes : {int64_t{-1}, int64_t{17}, std::numeric_limits<int64_t>::max()}) {
    std::memcpy(huge.data() + sizeof(FrameHeader) + offsetof(FrameOpHeader, num_bytes), &bytes, 8);
    expect_refused(huge, "payload bytes=" + std::to_string(bytes));
  }
}

TEST(MpiFrame, RandomBytesNeverLeaveTheHeap) {  // for the sanitizers
  std::mt19937_64 random(1);
  const auto to = memory();
  std::vector<uint8_t> good;
  append_op(good, 2, put_op(0, 40), std::vector<uint8_t>(40, 7).data());
  append_op(good, 2, signal_op(3, 1), nullptr);
  int accepted = 0;
  for (int i = 0; i < 50'000; ++i) {
    std::vector<uint8_t> frame = good;
    for (uint64_t n = random() % 4; n > 0; --n)
      frame[random() % frame.size()] = static_cast<uint8_t>(random());
    if (random() % 4 == 0) frame.resize(random() % (frame.size() + 1));
    Sink sink;
    accepted += apply(frame, *to, sink).ok();
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 49'000);
}

Hello hello_of(int process) {
  return {.process = process,
          .num_processes = 2,
          .num_ranks = 4,
          .first_signal = 5,
          .heap_bytes = 4096,
          .pid_space = 6,
          .pid = 7,
          .version = "0.1",
          .config = "model demo\nlayers 4\ntp 4",
          .data = std::string("a\0b", 3) + std::to_string(process)};
}

TEST(MpiHello, ComesBackAsItWas) {
  const Result<Hello> back = decode_hello(encode_hello(hello_of(1)));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->process, 1);
  EXPECT_EQ(back->num_processes, 2);
  EXPECT_EQ(back->num_ranks, 4);
  EXPECT_EQ(back->first_signal, 5u);
  EXPECT_EQ(back->heap_bytes, 4096);
  EXPECT_EQ(back->pid_space, 6u);
  EXPECT_EQ(back->pid, 7);
  EXPECT_EQ(back->version, "0.1");
  EXPECT_EQ(back->config, hello_of(1).config);
  EXPECT_EQ(back->data, std::string("a\0b1", 4));
  EXPECT_TRUE(check_same(hello_of(0), *back).ok());  // its data differs
}

TEST(MpiHello, BrokenOnesAreRefused) {
  const std::vector<uint8_t> good = encode_hello(hello_of(1));
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_EQ(decode_hello({good.data(), size}).status().code(), StatusCode::kDataLoss);
  for (const int64_t bytes : {int64_t{-1}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()})
    for (const size_t at : {40u, 48u, 56u}) {
      std::vector<uint8_t> bad = good;
      std::memcpy(bad.data() + at, &bytes, 8);
      EXPECT_EQ(decode_hello(bad).status().code(), StatusCode::kDataLoss);
    }
}

TEST(MpiHello, DifferencesNameBothValues) {  // F11
  const auto message = [](const auto& change) {
    Hello theirs = hello_of(1);
    change(theirs);
    const Status status = check_same(hello_of(0), theirs);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  const std::string start = "processes 0 and 1 of the job disagree on ";
  EXPECT_EQ(message([](Hello& h) { h.version = "0.2"; }),
            start + "the version: 0.1 on process 0, 0.2 on process 1");
  EXPECT_EQ(message([](Hello& h) { h.num_ranks = 8; }), start + "num_ranks: 4 on process 0, 8 on process 1");
  EXPECT_EQ(message([](Hello& h) { h.num_processes = 3; }),
            start + "num_processes: 2 on process 0, 3 on process 1");
  EXPECT_EQ(message([](Hello& h) { h.first_signal = 0; }),
            start + "first_signal: 5 on process 0, 0 on process 1");
  EXPECT_EQ(message([](Hello& h) { h.heap_bytes = 1; }),
            start + "heap_bytes: 4096 on process 0, 1 on process 1");
  EXPECT_EQ(message([](Hello& h) { h.config = "model demo\nlayers 40\ntp 4"; }),
            start + "the configuration: 'layers 4' on process 0, 'layers 40' on process 1");
  EXPECT_EQ(message([](Hello& h) { h.config = "model demo\nlayers 4"; }),
            start + "the configuration: 'tp 4' on process 0, nothing on process 1");
  EXPECT_EQ(message([](Hello& h) { h.config += "\nmore\nand more"; }),
            start + "the configuration: nothing on process 0, 'more' on process 1");
  EXPECT_EQ(message([](Hello& h) { h.config = ""; }),
            start + "the configuration: 'model demo' on process 0, nothing on process 1");
}

}  // namespace
}  // namespace fp4moe
