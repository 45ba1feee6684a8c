// Formats responses of Anthropic's Messages API: content blocks, whole or as named events.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/api/generation.h"
#include "server/api/messages_request.h"
#include "server/chat/output_dialect.h"

namespace fp4moe {

class MessagesFormat final : public ApiFormat {
 public:
  OutputPlan plan;
  bool parallel_calls = true;  // else only the first call is reported
  ThinkingDisplay thinking = ThinkingDisplay::kNone;
  int64_t max_tokens = 0;  // as requested

  MessagesFormat(std::string id, std::string model) : id_(std::move(id)), model_(std::move(model)) {}

  StreamStyle style() const override { return StreamStyle::kNamed; }
  std::string keep_alive() const override;
  HttpResponse refusal(const Status& status) const override;
  std::vector<json> failure(const Status& status) override;
  std::vector<json> events(const Choice& choice, const Delta& delta) override;
  std::vector<json> closing(const std::vector<Choice>& choices) override;
  json whole(const std::vector<Choice>& choices) override;

 private:
  bool is_returned(const OutputPart& part, int64_t& num_calls) const;
  json new_block(const OutputPart& part) const;
  json message(const Choice& choice, json content) const;
  json stop(const Choice& choice, int64_t num_calls) const;
  void add_part(const OutputPart& part, std::vector<json>& events);
  void begin_block(const OutputPart& part, std::vector<json>& events);
  void end_block(std::vector<json>& events);
  json block_event(const char* type) const;
  json delta_event(const char* type, const char* field, const std::string& text) const;

  const std::string id_, model_;
  // The stream.
  std::unique_ptr<OutputParser> parser_;
  std::optional<OutputPart::Kind> open_;  // the kind of parts that the open block takes
  int64_t num_blocks_ = 0;                // begun blocks
  int64_t num_calls_ = 0;
};

}  // namespace fp4moe
