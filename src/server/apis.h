// The three generation APIs: from a request's fields to submissions and an answer format. Each returns
// through Fields what is wrong (then the call is not to be used).
#pragma once

#include <string>

#include "fp4moe/engine.h"
#include "server/generation.h"
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
// "rid" (SGLang's) or "request_id" (vLLM's), else a fresh id.
void read_identity(Fields& fields, const std::string& id_prefix, Request& request);
// "return_routed_experts", of the tokens from "routed_experts_start_len" on.
void read_routed_experts(Fields& fields, Request& request);
// "n": 1..128.
int64_t read_n(Fields& fields);

// Fails with a status of the tokenizer or the chat template.
void fail_text(Fields& fields, const std::string& name, const Status& status);

// Whether a text of so many bytes may fit the context, before it is encoded; if not, fails under `name`.
bool check_text_size(const Engine& engine, Fields& fields, const std::string& name, size_t num_bytes);
// A prompt's token ids. Errors go to fields under `name`.
std::vector<int32_t> encode(const Engine& engine, Fields& fields, const std::string& name,
                            const std::string& text, bool add_special_tokens);
// Adds n requests for each prompt, which are `common` but for their ids, named after its id, and the
// "timeout" and "priority" that the fields ask for; the k-th of a prompt has seed + k. Fails for a prompt
// that the context cannot hold.
void add_requests(const Engine& engine, GenerationCall& call, Fields& fields, const Request& common,
                  std::vector<std::vector<int32_t>> prompts, int64_t n);

// "bootstrap_host" and "bootstrap_port", which a router adds: the prefill node of all requests of the call. A
// decode node needs them, a prefill node takes no requests, and others know no such fields.
void read_prefill_node(const Engine& engine, Fields& fields, GenerationCall& call);

// Prompts given as text, a list of texts, ids, or a list of id lists; or only as one kind of these.
enum class PromptKind { kAny, kText, kIds };
struct Prompts {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::string> texts;  // as they were given; empty if ids were
  bool is_list = false;            // several were asked for, maybe one
};
Prompts read_prompts(const Engine& engine, Fields& fields, const std::string& name, PromptKind kind);

// The ids' bytes as base64, or null.
json routed_experts_text(const Choice& choice);
const char* finish_reason_name(FinishReason reason);
// The stop string or token id that ended the choice, or null.
json matched_stop(const Choice& choice);

}  // namespace fp4moe
