#include "bench/serving_report.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fp4moe {
namespace {

TEST(Summarise, LinearBetweenValues) {
  const Summary s = summarise({4, 1, 3, 2, 5});
  EXPECT_DOUBLE_EQ(s.mean, 3);
  EXPECT_DOUBLE_EQ(s.median, 3);
  EXPECT_DOUBLE_EQ(s.stddev, std::sqrt(2.0));
  EXPECT_DOUBLE_EQ(s.p90, 4.6);
  EXPECT_DOUBLE_EQ(s.p95, 4.8);
  EXPECT_DOUBLE_EQ(s.p99, 4.96);
  EXPECT_DOUBLE_EQ(s.max, 5);
  EXPECT_DOUBLE_EQ(summarise({1, 2}).median, 1.5);
  EXPECT_DOUBLE_EQ(summarise({7}).p99, 7);
  EXPECT_DOUBLE_EQ(summarise({}).mean, 0);
}

ServingResponse streamed(double first_text_s, double latency_s, int64_t output_tokens) {
  ServingResponse answer;
  answer.first_text_s = first_text_s;
  answer.latency_s = latency_s;
  answer.output_tokens = output_tokens;
  return answer;
}

TEST(ServingReport, ByHand) {
  LoadRun run;
  run.seconds = 2;
  run.responses = {streamed(0.5, 1.5, 11), streamed(0.1, 0.3, 1), {}, streamed(0.2, 1.0, 3)};
  run.responses[0].has_usage = true;
  run.responses[0].prompt_tokens = 8;
  run.responses[0].gaps_s = {0.1, 0.3};
  run.responses[2].error = unavailable("gone");
  run.responses[2].latency_s = 9;
  run.responses[2].output_tokens = 100;
  const ServingReport report = make_serving_report(run, {{7, 12}, {5, 1}, {5, 100}, {-1, 4}});
  EXPECT_EQ(report.completed, 3);
  EXPECT_EQ(report.failed, 1);
  EXPECT_EQ(report.total_input, 8 + 5);  // from usage and from ids; the third is unknown
  EXPECT_EQ(report.total_output, 15);
  EXPECT_EQ(report.counted_pieces, 2);
  EXPECT_EQ(report.unknown_inputs, 1);
  EXPECT_EQ(report.short_outputs, 1);  // only responses with usage count as short
  EXPECT_DOUBLE_EQ(report.concurrency, (1.5 + 0.3 + 1.0) / 2);
  EXPECT_DOUBLE_EQ(report.ttft_ms.median, 200);
  EXPECT_DOUBLE_EQ(report.tpot_ms.mean, (100.0 + 400) / 2);  // undefined for a response of one token
  EXPECT_DOUBLE_EQ(report.itl_ms.mean, 200);
  const auto result = to_json(report);
  EXPECT_DOUBLE_EQ(result["output_throughput"], 7.5);
  EXPECT_DOUBLE_EQ(result["request_throughput"], 1.5);
  EXPECT_DOUBLE_EQ(result["max_e2e_latency_ms"], 1500);
}

TEST(ServingReport, WithoutStreamsTimesAreNull) {
  LoadRun run;
  run.seconds = 1;
  run.responses = {streamed(-1, 0.5, 4)};
  const auto result = to_json(make_serving_report(run, {{3, 4}}));
  EXPECT_TRUE(result["mean_ttft_ms"].is_null());
  EXPECT_TRUE(result["p99_itl_ms"].is_null());
  EXPECT_DOUBLE_EQ(result["mean_e2e_latency_ms"], 500);
}

}  // namespace
}  // namespace fp4moe
