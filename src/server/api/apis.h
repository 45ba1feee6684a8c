// The generation APIs: translate a request's fields into submissions and a response format. Errors are
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

GenerationCall parse_messages(const Engine& engine, Fields& fields);  // POST /v1/messages, Anthropic's shape
// POST /v1/messages/count_tokens: the number of prompt tokens of the message that parse_messages() would
// read.
int64_t count_message_tokens(const Engine& engine, Fields& fields);

GenerationCall make_health_probe();  // GET /health_generate: one token

constexpr int64_t kMaxTopLogprobs = 20;

// A fresh unguessable id such as "chatcmpl-3f...".
std::string make_id(const std::string& prefix);

// Reads the sampling fields that have the same name in all APIs; absent fields have the model's defaults.
SamplingParams read_sampling(Fields& fields, const SamplingParams& defaults);
// Sets request.id from "rid" (SGLang's name, which takes precedence) or "request_id" (vLLM's name), else to a
// fresh id.
void read_identity(Fields& fields, const std::string& id_prefix, Request& request);
// Reads "return_routed_experts" and "routed_experts_start_len", the index of the first token to report.
void read_routed_experts(Fields& fields, Request& request);
// Reads "max_tokens", or "n_predict" (llama-server's, where -1 means no limit).
int64_t read_max_tokens(Fields& fields, int64_t otherwise);
// Reads "n", 1..128.
int64_t read_n(Fields& fields);

// Records an error of the tokenizer or the chat template as the error of field `name`.
void fail_text(Fields& fields, const std::string& name, const Status& status);

// The error of a prompt that is too long, in the words that clients of OpenAI's API look for.
Status context_overflow(const Engine& engine, const std::string& fact);
// Checks before tokenizing whether a text of `num_bytes` bytes can fit the context; if not, records an error
// of field `name`.
bool check_text_size(const Engine& engine, Fields& fields, const std::string& name, size_t num_bytes);
// Tokenizes a prompt. Records errors as those of field `name`.
std::vector<int32_t> encode(const Engine& engine, Fields& fields, const std::string& name,
                            const std::string& text, bool add_special_tokens);
// Adds n requests for each prompt: copies of its entry in `common` (a single entry is for all prompts; all
// have the same id) with ids derived from that id, seed + k for the k-th copy, and the "timeout" and
// "priority" fields. Fails if a prompt does not fit the context.
void add_requests(const Engine& engine, GenerationCall& call, Fields& fields,
                  const std::vector<Request>& common, std::vector<std::vector<int32_t>> prompts, int64_t n);

// Reads "bootstrap_host" and "bootstrap_port", in which a router names the prefill node for all requests of
// the call. A decode node requires the host, a prefill node refuses every request, and other servers don't
// read these fields.
void read_prefill_node(const Engine& engine, Fields& fields, GenerationCall& call);

// The prompts that a field accepts. kAny: a text, a list of texts, one list of ids or a list of such lists.
enum class PromptKind { kAny, kText, kIds };
struct Prompts {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::string> texts;  // as given; empty if the prompts were given as ids
  bool is_list = false;            // the field was a list of prompts, possibly with one element
};
Prompts read_prompts(const Engine& engine, Fields& fields, const std::string& name, PromptKind kind,
                     bool add_special_tokens = true);

// The routed expert ids (int32, little-endian) as base64, or null.
json routed_experts_text(const Choice& choice);
const char* finish_reason_name(FinishReason reason);
// The stop string or token id that ended the choice, or null.
json matched_stop(const Choice& choice);

}  // namespace fp4moe
