// The output items of /v1/responses, built from the parts of an output, and the events that report them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fp4moe/engine.h"
#include "server/api/response_tools.h"
#include "server/chat/output_parser.h"
#include "server/json.h"

namespace fp4moe {

// Numbers the events of a stream.
class EventList {
 public:
  explicit EventList(bool is_streamed) : is_streamed_(is_streamed) {}
  // Appends an event, unless the response is not streamed.
  void add(const char* type, json fields);
  std::vector<json> take() { return std::exchange(events_, {}); }
  bool is_streamed() const { return is_streamed_; }
  bool has_begun() const { return next_number_ > 0; }

 private:
  const bool is_streamed_;
  int64_t next_number_ = 0;
  std::vector<json> events_;
};

// A run of reasoning becomes a reasoning item, a run of content a message, and each call a function_call.
class OutputItems {
 public:
  // Calls of functions in a namespace are reported with their own name and namespace.
  OutputItems(EventList& events, const ResponseTools& tools) : events_(events), tools_(tools) {}

  void add(const OutputPart& part);
  // Adds the log-probabilities of output tokens whose text is in parts that are added later.
  void hold_logprobs(const std::vector<PositionLogprobs>& positions);
  // Ends the last item with status "completed" or "incomplete".
  void finish(const char* status);
  const json& items() const { return items_; }

 private:
  using Kind = OutputPart::Kind;
  void begin(const OutputPart& part);  // not kArguments
  void end(const char* status);
  json place() const;       // the fields that name the open item in an event
  json text_place() const;  // ... and its text
  json take_logprobs(size_t num_bytes);

  EventList& events_;
  const ResponseTools& tools_;
  json items_ = json::array();
  bool is_open_ = false;
  Kind kind_ = Kind::kContent;                   // of the open item; kArguments: a call
  std::vector<PositionLogprobs> held_logprobs_;  // of tokens whose text was not added yet
};

}  // namespace fp4moe
