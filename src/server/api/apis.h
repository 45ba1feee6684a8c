// The three generation APIs: translate a request's fields into submissions and a response format. Errors are
// recorded in Fields; if there is one, discard the returned call.
#pragma once

#include <string>

#include "fp4moe/engine.h"
#include "server/api/generation.h"
#include "server/json.h"

namespace fp4moe {

GenerationCall parse_chat(const Engine& engine, Fields& fields);        // POST /v1/chat/completions
GenerationCall parse_completion(const Engine& engine, Fields& fields);  // POST /v1/completions
GenerationCall parse_generate(const Engine& engine, Fields& fields);    // POST /generate, SGLang's shape

GenerationCall make_health_probe();  // GET /health_generate: one token

constexpr int64_t kMaxTopLogprobs = 20;

// A fresh unguessable id such as "chatcmpl-3f...".
std::string make_id(const std::string& prefix);

// The sampling fields that have the same name in all APIs, over the model's defaults.
SamplingParams read_sampling(Fields& fields, const SamplingParams& defaults);
// Sets request.id from "rid" (SGLang's, which wins) or "request_id" (vLLM's), else to a fresh id.
void read_identity(Fields& fields, const std::string& id_prefix, Request& request);
// "return_routed_experts", for tokens from index "routed_experts_start_len" on.
void read_routed_experts(Fields& fields, Request& request);
// "n": 1..128.
int64_t read_n(Fields& fields);

// Records a status of the tokenizer or the chat template as the error of field `name`.
void fail_text(Fields& fields, const std::string& name, const Status& status);

// Checks before tokenizing whether a text of `num_bytes` bytes can fit the context; if not, fails under
// `name`.
bool check_text_size(const Engine& engine, Fields& fields, const std::string& name, size_t num_bytes);
// A prompt's token ids. Errors go to fields under `name`.
std::vector<int32_t> encode(const Engine& engine, Fields& fields, const std::string& name,
                            const std::string& text, bool add_special_tokens);
// Adds n copies of `common` for each prompt, with ids derived from common.id, seed + k for the k-th copy, and
// the "timeout" and "priority" fields. Fails if a prompt does not fit the context.
void add_requests(const Engine& engine, GenerationCall& call, Fields& fields, const Request& common,
                  std::vector<std::vector<int32_t>> prompts, int64_t n);

// "bootstrap_host" and "bootstrap_port", which a router adds: the prefill node for all requests of the call.
// Required on a decode node; a prefill node refuses every request; other servers don't read these fields.
void read_prefill_node(const Engine& engine, Fields& fields, GenerationCall& call);

// Which prompts a field accepts: a text, a list of texts, ids or a list of id lists; or only texts or only
// ids.
enum class PromptKind { kAny, kText, kIds };
struct Prompts {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::string> texts;  // as given; empty if the prompts were given as ids
  bool is_list = false;            // the field was a list of prompts, possibly of one
};
Prompts read_prompts(const Engine& engine, Fields& fields, const std::string& name, PromptKind kind);

// The routed expert ids (int32, little-endian) as base64, or null.
json routed_experts_text(const Choice& choice);
const char* finish_reason_name(FinishReason reason);
// The stop string or token id that ended the choice, or null.
json matched_stop(const Choice& choice);

}  // namespace fp4moe
