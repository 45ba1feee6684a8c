// Formats and stores the responses of /v1/responses.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "server/api/generation.h"
#include "server/api/response_output.h"
#include "server/api/response_store.h"
#include "server/api/responses_request.h"
#include "server/chat/output_dialect.h"
#include "server/chat/reasoning_tokens.h"

namespace fp4moe {

class ResponsesFormat final : public ApiFormat {
 public:
  struct Setup {
    OutputPlan plan;
    bool logprobs = false;
    bool parallel_calls = true;  // else only the first call is reported
  };
  // `request.head` includes the id.
  ResponsesFormat(const Engine& engine, const ResponseAccess& access, ResponsesRequest request,
                  const Setup& setup);

  StreamStyle style() const override { return StreamStyle::kNamed; }
  std::vector<json> failure(const Status& status) override;
  void collect(const Choice& choice, const Delta& delta) override { parse(choice, delta); }
  std::vector<json> events(const Choice& choice, const Delta& delta) override;
  std::vector<json> closing(const std::vector<Choice>& choices) override;
  json whole(const std::vector<Choice>& choices) override;

 private:
  void begin();
  void parse(const Choice& choice, const Delta& delta);
  json response(const char* status) const;  // without a result
  json finished(const Choice& choice);
  // Returns false if the conversation does not fit the store.
  bool store(const json& response) const;

  ResponseStore& store_;
  const std::string owner_;
  const ResponsesRequest request_;
  const Setup setup_;
  const int64_t created_ = std::time(nullptr);
  const std::unique_ptr<OutputParser> parser_;
  ReasoningTokens reasoning_tokens_;
  EventList events_;
  OutputItems output_{events_, request_.tools};
  int64_t num_calls_ = 0;
};

}  // namespace fp4moe
