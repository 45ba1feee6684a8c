// The one path from a parsed request to its answer: submit, collect, and print as the API wants it, whole or
// as server-sent events.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fp4moe/engine.h"
#include "fp4moe/server.h"
#include "server/http.h"
#include "server/json.h"
#include "server/metrics.h"

namespace fp4moe {

// A prompt's token ids; the n answers to it share them.
using PromptIds = std::shared_ptr<const std::vector<int32_t>>;

// What is known of one submission so far.
struct Choice {
  int64_t index = 0;
  std::string request_id;
  PromptIds prompt_ids;
  std::vector<PositionLogprobs> prompt_logprobs;  // if asked for: of the last so many of prompt_ids
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<PositionLogprobs> logprobs;
  std::shared_ptr<const std::vector<int32_t>> routed_experts;  // as Delta's
  FinishReason finish_reason = FinishReason::kNone;
  std::string matched_stop;
  int32_t matched_stop_token = -1;
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  bool started = false;  // some news went into events
  double seconds = 0;    // from the request's arrival to the latest news
};

// How one API prints answers.
class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;
  // The events that tell `delta`, already merged into `choice`.
  virtual std::vector<json> news(const Choice& choice, const Delta& delta) = 0;
  // The events after the last choice's end, before [DONE].
  virtual std::vector<json> closing(const std::vector<Choice>& choices) = 0;
  virtual json whole(const std::vector<Choice>& choices) = 0;
};

struct GenerationCall {
  std::string name;  // the HTTP request's id, for /abort_request; empty: only its requests have ids
  std::vector<Request> requests;   // one for each choice: prompts x n; input_ids are filled in when submitted
  std::vector<PromptIds> prompts;  // of each request
  bool stream = false;
  std::unique_ptr<AnswerFormat> format;
};

// Submissions whose last delta has not come; the engine holds callbacks into the server until then.
class LiveRequests {
 public:
  // `name` is that of the HTTP request which submission `id` is part of.
  void add(const std::string& id, const std::string& name);
  void done(const std::string& id, const std::string& name);
  void wait_for_none();
  // The submission `id`, and all those of the HTTP request `id`.
  std::vector<std::string> of(const std::string& id) const;
  std::vector<std::string> all() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable none_;
  // Ids, each with the HTTP request's name; one that the engine refuses may have the id of a running one.
  std::multiset<std::pair<std::string, std::string>> live_;
};

struct GenerationContext {
  Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  const ServerConfig* config = nullptr;
  std::shared_ptr<LiveRequests> live;
};

// Answers on `exchange`; aborts the submissions if the client goes away, or if their news waits for the
// exchange with more than config->max_unsent_bytes. From the exchange's handler.
void run_generation(const GenerationContext& context, std::shared_ptr<HttpExchange> exchange,
                    GenerationCall call);

}  // namespace fp4moe
