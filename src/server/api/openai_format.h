// The common envelope of OpenAI's two generation APIs, and the request fields that control it.
#pragma once

#include <ctime>
#include <string>
#include <vector>

#include "server/api/apis.h"

namespace fp4moe {

// OpenAI's form of a token's text. If it is not valid UTF-8: its bytes, "bytes:\\xe2\\x82".
std::string token_text(const std::string& bytes);
// The text that stands for a token beside its log-probability; `by_id`: "token_id:N".
std::string token_name(const TokenLogprob& token, bool by_id);

class OpenAiFormat : public ApiFormat {
 public:
  // Reads the two APIs' common fields, except the sampling parameters, into *this, `call` and `request`.
  void read(GenerationCall& call, Fields& fields, Request& request);
  int64_t n() const { return n_; }
  // Refuses routed experts for several choices: SGLang's response format has room for those of one choice.
  static void check_experts(Fields& fields, const GenerationCall& call);

  std::vector<json> closing(const std::vector<Choice>& choices) final;
  json whole(const std::vector<Choice>& choices) final;

 protected:
  OpenAiFormat(const Engine& engine, const std::string& id_prefix, const char* object,
               const char* event_object)
      : id_prefix_(id_prefix),
        model_(engine.info().name),
        object_(object),
        event_object_(event_object),
        fingerprint_("fp4moe-" FP4MOE_VERSION "-" + engine.info().backend) {}

  virtual json whole_choice(const Choice& choice) const = 0;
  // The output tokens of an ended choice that belong to reasoning; -1: the API does not report them.
  virtual int64_t reasoning_tokens(const Choice&) const { return -1; }
  virtual void add_to_whole(json& /*response*/, const std::vector<Choice>&) const {}
  // An event with one choice.
  json event(const Choice& choice, json entry) const;
  bool returns_token_ids() const { return returns_token_ids_; }
  bool names_tokens_by_id() const { return names_tokens_by_id_; }

 private:
  json head(const char* object, json choices) const;
  json final_usage(const std::vector<Choice>& choices) const;
  static void add_experts(json& response, const std::vector<Choice>& choices);

  const std::string id_prefix_;
  std::string id_;
  const std::string model_;
  const char* const object_;        // "object" in a whole response
  const char* const event_object_;  // "object" in an event
  const std::string fingerprint_;   // changes with the version and the backend
  const int64_t created_ = std::time(nullptr);
  int64_t n_ = 1;
  bool include_usage_ = false, continuous_usage_ = false, returns_token_ids_ = false;
  bool names_tokens_by_id_ = false;
};

}  // namespace fp4moe
