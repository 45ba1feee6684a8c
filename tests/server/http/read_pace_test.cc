#include "server/http/read_pace.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

using namespace std::chrono_literals;
using Clock = ReadPace::Clock;

const Clock::time_point kStart = Clock::now();

double seconds_after_start(Clock::time_point at) {
  return std::chrono::duration<double>(at - kStart).count();
}

TEST(ReadPace, ABurstDoesNotWait) {
  ReadPace pace(1000, 500);
  EXPECT_LE(pace.take(300, kStart), kStart);
  EXPECT_LE(pace.take(200, kStart), kStart);
  EXPECT_GT(pace.take(1, kStart), kStart);
}

TEST(ReadPace, BeyondABurstTheRateHolds) {
  ReadPace pace(1000, 500);
  Clock::time_point now = kStart;
  for (int i = 0; i < 100; ++i) now = std::max(now, pace.take(100, now));
  EXPECT_NEAR(seconds_after_start(now), (100 * 100 - 500) / 1000.0, 1e-6);
}

TEST(ReadPace, AllConnectionsShareTheRate) {
  ReadPace pace(1000, 0);
  EXPECT_NEAR(seconds_after_start(pace.take(1000, kStart)), 1, 1e-6);
  EXPECT_NEAR(seconds_after_start(pace.take(500, kStart + 100ms)), 1.5, 1e-6);
}

TEST(ReadPace, IdleTimeRestoresNoMoreThanOneBurst) {
  ReadPace pace(1000, 500);
  pace.take(500, kStart);
  const Clock::time_point later = kStart + 1h;
  EXPECT_LE(pace.take(500, later), later);
  EXPECT_NEAR(std::chrono::duration<double>(pace.take(1000, later) - later).count(), 1, 1e-6);
}

}  // namespace
}  // namespace fp4moe
