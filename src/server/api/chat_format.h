// Formats chat responses: reasoning, content and tool calls, whole or as deltas.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/api/openai_format.h"
#include "server/chat/output_dialect.h"

namespace fp4moe {

// The log-probabilities of one token in the chat APIs' shape.
json position_logprobs(const PositionLogprobs& position, bool by_id = false);

class ChatFormat final : public OpenAiFormat {
 public:
  bool logprobs = false;
  bool parallel_calls = true;  // else only the first call is reported
  bool legacy_calls = false;   // report the call as "function_call"
  bool includes_reasoning = true;
  OutputPlan plan;

  explicit ChatFormat(const Engine& engine)
      : OpenAiFormat(engine, "chatcmpl-", "chat.completion", "chat.completion.chunk"), engine_(engine) {}

  std::vector<json> events(const Choice& choice, const Delta& delta) override;

 private:
  // One choice's stream.
  struct Stream {
    std::unique_ptr<OutputParser> parser;
    int64_t num_calls = 0;
  };

  json whole_choice(const Choice& choice) const override;
  int64_t reasoning_tokens(const Choice& choice) const override;
  // Counts calls in `num_calls`. Returns whether the part belongs to the response.
  bool is_returned(const OutputPart& part, int64_t& num_calls) const;
  json logprobs_object(const std::vector<PositionLogprobs>& positions) const;
  void add_to_whole(json& response, const std::vector<Choice>& choices) const override;
  json chunk(const Choice& choice, json delta, json positions) const;
  json last_chunk(const Choice& choice, int64_t num_calls) const;
  json part_delta(const OutputPart& part, Stream& stream) const;
  std::string finish_reason(const Choice& choice, int64_t num_calls) const;

  const Engine& engine_;
  std::vector<Stream> streams_;  // indexed by choice
};

}  // namespace fp4moe
