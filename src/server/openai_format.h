// What OpenAI's two generation APIs print around their choices, and the fields that ask for it.
#pragma once

#include <ctime>
#include <string>
#include <vector>

#include "server/apis.h"

namespace fp4moe {

class OpenAiFormat : public AnswerFormat {
 public:
  // Reads what the two APIs have in common beside the sampling into itself, `call` and `request`.
  void read(GenerationCall& call, Fields& fields, Request& request);
  int64_t n() const { return n_; }
  // SGLang's place for routed experts, beside the choices, has room for those of one.
  static void check_experts(Fields& fields, const GenerationCall& call);

  std::vector<json> closing(const std::vector<Choice>& choices) final;
  json whole(const std::vector<Choice>& choices) final;

 protected:
  OpenAiFormat(const Engine& engine, const std::string& id_prefix, const char* object,
               const char* event_object)
      : id_prefix_(id_prefix), model_(engine.info().name), object_(object), event_object_(event_object) {}

  virtual json whole_choice(const Choice& choice) const = 0;
  virtual void add_to_whole(json& /*answer*/, const std::vector<Choice>&) const {}
  json event(json choice) const;
  bool returns_token_ids() const { return returns_token_ids_; }

 private:
  json head(const char* object, json choices) const;
  static void add_experts(json& answer, const std::vector<Choice>& choices);

  const std::string id_prefix_;
  std::string id_;
  const std::string model_;
  const char* const object_;        // the name of a whole answer
  const char* const event_object_;  // and of a part of one
  const int64_t created_ = std::time(nullptr);
  int64_t n_ = 1;
  bool include_usage_ = false, returns_token_ids_ = false;
};

}  // namespace fp4moe
