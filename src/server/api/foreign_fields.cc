#include "server/api/foreign_fields.h"

#include <string>

namespace fp4moe {

namespace {

struct Refused {
  const char* name;
  const char* neutral;  // JSON: the value without effect; null: only an absent field has none
};

constexpr Refused kRefused[] = {
    // vLLM
    {"allowed_token_ids", "null"},
    {"bad_words", "[]"},
    {"cache_salt", "null"},
    {"early_stopping", "false"},
    {"kv_transfer_params", "null"},
    {"length_penalty", "1.0"},
    {"logits_processors", "null"},
    {"bad_words_token_ids", "[]"},
    {"prompt_embeds", "[]"},
    {"prompt_logprobs", "null"},
    {"thinking_token_budget", "null"},
    {"truncate_prompt_tokens", "null"},
    {"use_beam_search", "false"},
    {"vllm_xargs", "null"},
    // SGLang
    {"audio_data", "[]"},
    {"custom_logit_processor", "null"},
    {"custom_params", "null"},
    {"extra_key", R"("")"},
    {"image_data", "[]"},
    {"input_embeds", "[]"},
    {"lora_id", R"("")"},
    {"lora_path", "null"},
    {"positional_embed_overrides", "[]"},
    {"return_hidden_states", "false"},
    {"session_params", "null"},
    {"token_ids_logprob", "null"},
    {"video_data", "[]"},
    // llama-server
    {"dry_multiplier", "0.0"},
    {"dynatemp_range", "0.0"},
    {"lora", "[]"},
    {"mirostat", "0"},
    {"n_indent", "0"},
    {"n_probs", "0"},
    {"repeat_last_n", "-1"},
    {"samplers", "null"},
    {"tfs_z", "1.0"},
    {"top_a", "0.0"},
    {"top_n_sigma", "-1.0"},
    {"typical_p", "1.0"},
    {"xtc_probability", "0.0"},
    // OpenAI
    {"audio", "null"},
    {"modalities", R"(["text"])"},
    {"web_search_options", "null"},
};

constexpr const char* kMoot[] = {
    // OpenAI: identification and caching, and hints about speed
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    // vLLM and SGLang: where and how a request runs
    "data_parallel_rank",
    "guided_decoding_backend",
    "mm_processor_kwargs",
    "spaces_between_special_tokens",
    // llama-server: slots, timing, and parameters of the samplers refused above
    "cache_prompt",
    "id_slot",
    "timings_per_token",
    "min_keep",
    "t_max_predict_ms",
    "mirostat_tau",
    "mirostat_eta",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "xtc_threshold",
};

}  // namespace

void read_foreign_fields(Fields& fields, std::string_view except) {
  for (const auto& [name, neutral] : kRefused)
    if (name != except) fields.refuse(name, json::parse(neutral));
  for (const char* name : kMoot) fields.find(name);
}

}  // namespace fp4moe
