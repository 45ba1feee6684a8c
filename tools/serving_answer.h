// One answer of an OpenAI-compatible server as a load client sees it: when text came, how many tokens, and
// what was wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "event_reader.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct ServingAnswer {
  Status error;                // ok, or why this is no whole answer
  double first_text_s = -1;    // from sending to the first text; -1: not streamed, or no text came
  double latency_s = 0;        // from sending to the end
  std::vector<double> gaps_s;  // between one piece of text and the next
  std::string text;
  bool has_usage = false;      // the tokens are the server's own count; else as below
  int64_t prompt_tokens = -1;  // -1: unknown
  int64_t output_tokens = 0;   // pieces of text, of which each may hold several tokens or part of one
};

// Reads a stream of events. A stream is whole when it ends with [DONE].
class AnswerReader {
 public:
  // `seconds` since the request was sent.
  void read(std::string_view bytes, double seconds);
  bool is_over() const { return is_done_ || !answer_.error.ok(); }
  // `closed`: why the connection is over, ok where the HTTP message is whole.
  ServingAnswer finish(const Status& closed, double seconds);

 private:
  void on_event(const std::string& data, double seconds);

  EventReader events_;
  ServingAnswer answer_;
  double latest_text_s_ = 0;
  bool is_done_ = false;
};

// An answer that came as one JSON object; it must have usage.
ServingAnswer read_whole_answer(const std::string& body, double seconds);

}  // namespace fp4moe
