// An Engine without a model: one token per byte; the output repeats the prompt.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "fp4moe/engine.h"

namespace fp4moe {

struct FakeOptions {
  std::chrono::microseconds step{0};        // pause between tokens
  size_t max_requests = 1000;               // further requests are refused with kUnavailable
  std::string chat_template;                // reported as the source; not rendered
  std::vector<std::string> special_tokens;  // ids 257, 258, ...
  int64_t max_bytes_per_token = 0;          // reported in ModelInfo
  int64_t context_length = 4096;
  bool is_system_first = false;  // the template refuses a system message behind another message
  bool has_grammars = false;     // accepts grammars but ignores them
  std::vector<std::string> aliases;
};

// Ids 0..255 are bytes, 256 is the end token. A prompt that contains "FAIL" fails after two tokens, one with
// "WAITED" fails at once with kUnavailable, and one with "LATE" fails after two tokens with kDeadline. The
// output is the prompt, then the end token; with ignore_eos the prompt repeats. Prompt token p has
// log-probability -p, the best token ('a') has 0. Routed experts from n on are n, 258 and -1. Large because
// Engine is large.
class FakeEngine final : public Engine {
 public:
  static constexpr int32_t kEnd = 256;
  static constexpr int64_t kPage = 4;  // all prompt tokens except the last page count as cached

  explicit FakeEngine(FakeOptions options = {});
  ~FakeEngine() override;

  Result<std::string> submit(Request request, DeltaCallback on_delta) override;
  void cancel(const std::string& id) override;
  Status flush_cache() override;
  // A path with "ABSENT" is refused with kNotFound; one with "LOST" fails, and so does the engine; one with
  // "SLOW" waits for end_update().
  Result<int64_t> update_weights(const WeightSource& source, bool aborts) override;
  WeightSource weight_source() const override;
  Status failure() const override;
  void drain(double timeout_seconds) override;
  const ModelInfo& info() const override { return info_; }
  EngineStats stats() const override;
  ExpertLoad expert_load() const override;
  // The second call fails.
  Result<ExpertMoves> rebalance_experts() override {
    if (rebalances_.fetch_add(1) > 0) return unsupported("no experts to move");
    return ExpertMoves{2, 5, 4096, 1.5, 1.0625, 0.25, 0.125};
  }
  Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special_tokens) const override;
  Result<std::string> detokenize(const std::vector<int32_t>& ids, bool skip_special_tokens) const override;
  std::vector<int32_t> find_special_tokens(std::string_view text) const override;
  std::string token_bytes(int32_t id) const override;
  Result<std::string> apply_chat_template(std::string_view messages_json,
                                          const ChatTemplateOptions& options) const override;

  void set_expert_load(ExpertLoad load);
  Request last_request() const;       // as submitted
  std::string last_messages() const;  // as passed to the template
  ChatTemplateOptions last_options() const;
  int64_t running() const;
  int64_t aborted() const { return aborted_.load(); }
  int64_t flushes() const { return flushes_.load(); }
  int64_t num_updates() const { return num_updates_.load(); }
  void end_update() { may_end_update_.set_value(); }

 private:
  struct Running {
    Request request;
    DeltaCallback on_delta;
    std::string prompt, text, pending;
    int64_t generated = 0;
    bool scored = false;  // the prompt's log-probabilities were delivered
    // Guarded by mutex_; the other members are used only by the thread.
    bool cancelled = false;
    bool has_ended = false;  // the final delta is being delivered
  };
  void loop();
  std::vector<TokenLogprob> listed_ids(const SamplingParams& sampling) const;
  void deliver_scores(const Running& r) const;
  Delta next(Running& r) const;

  const FakeOptions options_;
  ModelInfo info_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<Running>> running_;
  Request last_;
  ExpertLoad load_;
  WeightSource weights_;
  std::atomic<int64_t> num_updates_{0};
  std::promise<void> may_end_update_;
  Status failure_;
  mutable std::string last_messages_;
  mutable ChatTemplateOptions last_options_;
  std::atomic<int64_t> aborted_{0}, generated_{0}, submitted_{0}, flushes_{0}, rebalances_{0};
  bool stopping_ = false, draining_ = false;
  std::thread thread_;
};

}  // namespace fp4moe
