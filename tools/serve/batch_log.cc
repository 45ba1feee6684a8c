#include "serve/batch_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace fp4moe {
namespace {

// Returns the acceptance of draft tokens since `last`, and adds it to `fields`. Without speculative decoding,
// returns "".
std::string drafts_text(const EngineStats& now, const EngineStats& last, nlohmann::ordered_json& fields) {
  const auto since = [&](int64_t EngineStats::*count) {
    return static_cast<double>(now.*count - last.*count);
  };
  const double verified = since(&EngineStats::spec_verify_calls_total);
  const double correct = since(&EngineStats::spec_correct_drafts_total);
  if (verified == 0) return "";
  const double length = 1 + correct / verified;
  const double rate = correct / std::max(since(&EngineStats::spec_proposed_drafts_total), 1.0);
  std::vector<double> by_position;  // no further than the longest draft
  std::string text = fmt::format("accept len: {:.2f}, accept rate: {:.2f}", length, rate);
  for (size_t i = 0; i < now.spec_proposed_by_position.size(); ++i) {
    const auto at = [&](const std::vector<int64_t>& counts) { return i < counts.size() ? counts[i] : 0; };
    const int64_t num_proposed = now.spec_proposed_by_position[i] - at(last.spec_proposed_by_position);
    const int64_t num_correct = now.spec_correct_by_position[i] - at(last.spec_correct_by_position);
    if (num_proposed == 0) break;
    by_position.push_back(static_cast<double>(num_correct) / static_cast<double>(num_proposed));
    text += fmt::format("{}{:.2f}", i == 0 ? ", by position: " : " ", by_position.back());
  }
  fields["accept_len"] = length;
  fields["accept_rate"] = rate;
  fields["accept_rate_by_position"] = by_position;
  return text + ", ";
}

}  // namespace

void BatchLog::tick(const EngineStats& now) {
  using json = nlohmann::ordered_json;
  const EngineStats last = std::exchange(last_, now);
  if (interval_ <= 0) return;
  const double usage = static_cast<double>(now.num_used_tokens) /
                       static_cast<double>(std::max<int64_t>(now.max_total_num_tokens, 1));
  if (now.num_prompts_total > last.num_prompts_total) {
    const int64_t prompts = now.num_prompts_total - last.num_prompts_total;
    const int64_t cached = now.cached_tokens_total - last.cached_tokens_total;
    const int64_t tokens = now.prompt_tokens_total - last.prompt_tokens_total - cached;
    log_.event("batch.prefill",
               fmt::format("Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: {}, token usage: "
                           "{:.2f}, #running-req: {}, #queue-req: {}",
                           prompts, tokens, cached, usage, now.num_running_reqs, now.num_queue_reqs),
               json{{"num_new_seq", prompts},
                    {"num_new_tokens", tokens},
                    {"num_cached_tokens", cached},
                    {"token_usage", usage},
                    {"num_running_reqs", now.num_running_reqs},
                    {"num_queue_reqs", now.num_queue_reqs}}
                   .dump());
  }
  if (now.num_running_reqs == 0) return;
  const auto num_rows = [](const EngineStats& s) {
    return static_cast<double>(s.generation_tokens_total - s.spec_correct_drafts_total);
  };
  steps_ += (num_rows(now) - num_rows(last)) / static_cast<double>(now.num_running_reqs);
  if (steps_ < static_cast<double>(interval_)) return;
  steps_ = 0;
  json fields = {{"num_running_reqs", now.num_running_reqs},
                 {"num_used_tokens", now.num_used_tokens},
                 {"token_usage", usage},
                 {"gen_throughput", now.gen_throughput},
                 {"num_queue_reqs", now.num_queue_reqs}};
  const std::string drafts = drafts_text(now, std::exchange(last_decode_, now), fields);
  log_.event("batch.decode",
             fmt::format("Decode batch, #running-req: {}, #token: {}, token usage: {:.2f}, {}gen throughput "
                         "(token/s): {:.2f}, #queue-req: {}",
                         now.num_running_reqs, now.num_used_tokens, usage, drafts, now.gen_throughput,
                         now.num_queue_reqs),
             fields.dump());
}

}  // namespace fp4moe
