// A response from an OpenAI-compatible server as a load client sees it: the times at which text arrived, the
// number of tokens, and any error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/event_reader.h"
#include "fp4moe/status.h"

namespace fp4moe {

struct ServingResponse {
  Status error;                // why the response is incomplete; ok if it is complete
  double first_text_s = -1;    // from sending to the first text; -1: not streamed, or no text
  double latency_s = 0;        // from sending to the end
  std::vector<double> gaps_s;  // times between consecutive pieces of text
  std::string text;
  bool has_usage = false;      // the token counts are from the server
  int64_t prompt_tokens = -1;  // -1: unknown
  int64_t output_tokens = 0;   // without usage: pieces of text, which can be several tokens or part of one
};

// Reads an event stream. A stream is complete when it ends with [DONE].
class ResponseReader {
 public:
  // `seconds`: time since the request was sent.
  void read(std::string_view bytes, double seconds);
  bool is_over() const { return is_done_ || !response_.error.ok(); }
  // `closed`: the error that ended the connection; ok if the HTTP message is complete.
  ServingResponse finish(const Status& closed, double seconds);

 private:
  void on_event(const std::string& data, double seconds);

  EventReader events_;
  ServingResponse response_;
  double latest_text_s_ = 0;
  bool is_done_ = false;
};

// Reads a response that is not streamed: one JSON object, which must have usage.
ServingResponse read_whole_response(const std::string& body, double seconds);

}  // namespace fp4moe
