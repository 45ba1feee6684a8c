// The one path from a parsed request to its response: submit, collect the deltas, and print them in the API's
// format, whole or as server-sent events.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fp4moe/engine.h"
#include "fp4moe/server.h"
#include "server/http/http.h"
#include "server/json.h"
#include "server/observe/metrics.h"

namespace fp4moe {

// A prompt's token ids, shared by its n choices.
using PromptIds = std::shared_ptr<const std::vector<int32_t>>;

// The accumulated state of one submission.
struct Choice {
  int64_t index = 0;
  std::string request_id;
  PromptIds prompt_ids;
  std::vector<PositionLogprobs> prompt_logprobs;  // if requested: for the last entries of prompt_ids
  std::string text;
  std::vector<int32_t> token_ids;
  std::vector<PositionLogprobs> logprobs;
  std::shared_ptr<const std::vector<int32_t>> routed_experts;  // as Delta::routed_experts
  FinishReason finish_reason = FinishReason::kNone;
  std::string matched_stop;
  int32_t matched_stop_token = -1;
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  int64_t spec_verify_ct = 0, spec_num_proposed_drafts = 0, spec_num_correct_drafts = 0;
  std::vector<int64_t> spec_correct_drafts_histogram;
  bool started = false;  // an event was sent
  double seconds = 0;    // from the request's arrival to the latest delta
};

// How a stream's events are framed.
enum class StreamStyle {
  kData,   // "data: JSON" per event, then "data: [DONE]"
  kNamed,  // "event: TYPE" before each "data: JSON", where TYPE is the JSON's "type"; no [DONE]
};

// Formats the responses of one API.
class ApiFormat {
 public:
  virtual ~ApiFormat() = default;
  virtual StreamStyle style() const { return StreamStyle::kData; }
  // Sent in a stream that has been quiet for a while.
  virtual std::string keep_alive() const { return ": keep-alive\n\n"; }
  // The response to an error before anything was sent.
  virtual HttpResponse refusal(const Status& status) const;
  // The events for an error within a stream, before [DONE].
  virtual std::vector<json> failure(const Status& status);
  // Called for each delta of a response that is not streamed, after it was merged into `choice`.
  virtual void collect(const Choice& /*choice*/, const Delta& /*delta*/) {}
  // Whether a choice's event repeats everything that its earlier events contain. Then events() depends only
  // on the choice, and events that the client is too slow for are left out.
  virtual bool is_cumulative() const { return false; }
  // The events for `delta`, which is already merged into `choice`.
  virtual std::vector<json> events(const Choice& choice, const Delta& delta) = 0;
  // The events after the last choice has ended, before [DONE].
  virtual std::vector<json> closing(const std::vector<Choice>& choices) = 0;
  virtual json whole(const std::vector<Choice>& choices) = 0;
};

struct GenerationCall {
  std::string name;  // the HTTP request's id, for /abort_request; empty: only the submissions have ids
  std::vector<Request> requests;   // one per choice (prompts x n); input_ids are set at submission
  std::vector<PromptIds> prompts;  // one per element of requests
  bool stream = false;
  std::unique_ptr<ApiFormat> format;
};

// Submissions that await their final delta; until then the engine holds callbacks into the server.
class LiveRequests {
 public:
  // `name`: the id of the HTTP request that submission `id` belongs to.
  void add(const std::string& id, const std::string& name);
  void done(const std::string& id, const std::string& name);
  void wait_for_none();
  // Reserves `id` for an HTTP request until add() has that name or release() is called. Returns a ticket for
  // release(), or 0 if the id is reserved or live.
  uint64_t reserve(const std::string& id);
  void release(const std::string& id, uint64_t ticket);
  // The ids of the live submission with this id and of all live submissions of the HTTP request with this id.
  std::vector<std::string> of(const std::string& id) const;
  std::vector<std::string> all() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable none_;
  // (submission id, HTTP request id). A multiset: a submission about to be refused may have the id of a
  // running one.
  std::multiset<std::pair<std::string, std::string>> live_;
  std::map<std::string, uint64_t> reserved_;  // tickets by id
  uint64_t last_ticket_ = 0;
};

struct GenerationContext {
  Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  const ServerConfig* config = nullptr;
  std::shared_ptr<LiveRequests> live;
};

// Responds on `exchange`; call it from the exchange's handler. Cancels the submissions if the client
// disconnects or if more than config->max_unsent_bytes of deltas await processing.
void run_generation(const GenerationContext& context, std::shared_ptr<HttpExchange> exchange,
                    GenerationCall call);

}  // namespace fp4moe
