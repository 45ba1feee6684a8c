// Fields of OpenAI's legacy API, vLLM and llama-server: mapped to ours, or refused by name.
#include <gtest/gtest.h>

#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;
using Kind = GrammarSpec::Kind;

const FakeOptions kGrammars{.chat_template = "{{ tools }}<tool_call></tool_call>", .has_grammars = true};

json with(const std::string& text, const json& more) {
  json body = {{"messages", {{{"role", "user"}, {"content", text}}}}};
  body.update(more);
  return body;
}
json ok(TestServer& s, const std::string& path, const json& body) {
  const HttpAnswer answer = http_post(s.port, path, body.dump());
  EXPECT_EQ(answer.status, 200) << body << answer.body;
  return json::parse(answer.body);
}
json refused(TestServer& s, const std::string& path, const json& body) {
  const HttpAnswer answer = http_post(s.port, path, body.dump());
  EXPECT_EQ(answer.status, 400) << body << answer.body;
  return json::parse(answer.body)["error"];
}

TEST(ForeignConstraints, BecomeGrammars) {
  TestServer s(FakeOptions{.chat_template = "", .has_grammars = true});
  const json null_schema = {{"type", "null"}};
  const std::tuple<json, Kind, std::string> cases[] = {
      {{{"guided_json", null_schema}}, Kind::kJsonSchema, R"({"type":"null"})"},
      {{{"guided_json", R"({"type": "null"})"}}, Kind::kJsonSchema, R"({"type":"null"})"},
      {{{"guided_regex", "a+"}}, Kind::kRegex, "a+"},
      {{{"guided_grammar", "root ::= \"a\""}}, Kind::kEbnf, "root ::= \"a\""},
      {{{"guided_choice", {"yes", "n\"o\\\n"}}}, Kind::kEbnf, R"(root ::= "yes" | "n\"o\\\x0a")"},
      {{{"grammar", "root ::= \"b\""}}, Kind::kEbnf, "root ::= \"b\""},
      {{{"structured_outputs", {{"json", null_schema}}}}, Kind::kJsonSchema, R"({"type":"null"})"},
      {{{"structured_outputs", {{"regex", "b"}}}}, Kind::kRegex, "b"},
      {{{"structured_outputs", {{"choice", {"x"}}}}}, Kind::kEbnf, R"(root ::= "x")"},
      {{{"structured_outputs", {{"grammar", "root ::= \"c\""}}}}, Kind::kEbnf, "root ::= \"c\""},
      {{{"structured_outputs", {{"json_object", true}}}}, Kind::kJsonSchema, R"({"type":"object"})"},
      {{{"structured_outputs", {{"structural_tag", {{"format", {{"type", "any_text"}}}}}}}},
       Kind::kStructuralTag,
       R"({"format":{"type":"any_text"}})"},
      {{{"structured_outputs", json::object()}}, Kind::kNone, ""},
      {{{"response_format", {{"type", "json_object"}, {"schema", null_schema}}}},
       Kind::kJsonSchema,
       R"({"type":"null"})"},
      {{{"response_format", {{"type", "json_schema"}, {"schema", null_schema}}}},
       Kind::kJsonSchema,
       R"({"type":"null"})"},
  };
  for (const auto& [fields, kind, text] : cases) {
    ok(s, kChat, with("x", fields));
    EXPECT_EQ(s.engine.last_request().sampling.grammar, (GrammarSpec{kind, text})) << fields;
    json completion = fields;
    completion["prompt"] = "x";
    ok(s, kText, completion);
    EXPECT_EQ(s.engine.last_request().sampling.grammar, (GrammarSpec{kind, text})) << completion;
  }
}

TEST(ForeignConstraints, SglangsOlderStructuralTagIsTranslated) {
  TestServer s(FakeOptions{.chat_template = "", .has_grammars = true});
  const json schema = {{"type", "null"}};
  const json structure = {{"begin", "<f>"}, {"schema", schema}, {"end", "</f>"}};
  const json tag = {{"type", "structural_tag"}, {"structures", {structure}}, {"triggers", {"<f"}}};
  for (const json& fields :
       {json{{"response_format", tag}}, json{{"structural_tag", tag}}, json{{"structural_tag", tag.dump()}},
        json{{"structured_outputs", {{"structural_tag", tag}}}}}) {
    ok(s, kChat, with("x", fields));
    const GrammarSpec grammar = s.engine.last_request().sampling.grammar;
    ASSERT_EQ(grammar.kind, Kind::kStructuralTag);
    const json format = json::parse(grammar.text)["format"];
    EXPECT_EQ(format["type"], "triggered_tags");
    EXPECT_EQ(format["triggers"], json({"<f"}));
    EXPECT_EQ(format["tags"][0]["begin"], "<f>");
    EXPECT_EQ(format["tags"][0]["end"], "</f>");
    EXPECT_EQ(format["tags"][0]["content"]["json_schema"], schema);
  }
  const auto wrong = [&](const char* name, const json& value) {
    json changed = tag;
    changed[name] = value;
    return refused(s, kChat, with("x", {{"response_format", changed}}))["param"];
  };
  EXPECT_EQ(wrong("structures", nullptr), "response_format.format");
  EXPECT_EQ(wrong("structures", json::array()), "response_format.structures");
  EXPECT_EQ(wrong("structures", {{{"begin", "<f>"}}}), "response_format.structures[0].schema");
  EXPECT_EQ(wrong("structures", {{{"begin", 5}, {"schema", schema}}}), "response_format.structures[0].begin");
  EXPECT_EQ(wrong("triggers", nullptr), "response_format.triggers");
  EXPECT_EQ(wrong("triggers", 5), "response_format.triggers");
}

TEST(ForeignConstraints, WrongOnesAreNamed) {
  TestServer s(FakeOptions{.chat_template = "", .has_grammars = true}), without;
  const std::pair<json, std::string> cases[] = {
      {{{"guided_choice", "x"}}, "guided_choice"},
      {{{"guided_choice", json::array()}}, "guided_choice"},
      {{{"guided_choice", {"a", ""}}}, "guided_choice"},
      {{{"guided_choice", {"a", 5}}}, "guided_choice"},
      {{{"guided_regex", 5}}, "guided_regex"},
      {{{"grammar", ""}}, "grammar"},
      {{{"grammar", "root ::= \"a\""}, {"guided_regex", "b"}}, "grammar"},
      {{{"structured_outputs", "json"}}, "structured_outputs"},
      {{{"structured_outputs", {{"regex", "a"}, {"json", {{"type", "null"}}}}}}, "structured_outputs.regex"},
      {{{"structured_outputs", {{"whitespace_pattern", " *"}}}}, "structured_outputs.whitespace_pattern"},
      {{{"structured_outputs", {{"disable_any_whitespace", false}}}},
       "structured_outputs.disable_any_whitespace"},
      {{{"structured_outputs", {{"disable_additional_properties", true}}}},
       "structured_outputs.disable_additional_properties"},
      {{{"guided_whitespace_pattern", " "}}, "guided_whitespace_pattern"},
      {{{"response_format", {{"type", "json_object"}, {"schema", 5}}}}, "response_format.schema"},
  };
  for (const auto& [fields, param] : cases) EXPECT_EQ(refused(s, kChat, with("x", fields))["param"], param);
  EXPECT_EQ(refused(without, kChat, with("x", {{"guided_regex", "a"}}))["code"], "unsupported");
}

TEST(ForeignFields, WhatIsNotHereIsRefusedByName) {
  TestServer s;
  const json fields = json::parse(R"({
    "allowed_token_ids": [1], "bad_words": ["x"], "cache_salt": "s", "early_stopping": true,
    "kv_transfer_params": {"do_remote_decode": true}, "length_penalty": 0.5, "logits_processors": ["a"],
    "prompt_logprobs": 1, "thinking_token_budget": 5, "truncate_prompt_tokens": 4, "use_beam_search": true,
    "vllm_xargs": {"a": 1}, "custom_logit_processor": "x", "custom_params": {"a": 1}, "lora_path": "x",
    "return_hidden_states": true, "session_params": {"id": "x"}, "token_ids_logprob": [1],
    "dry_multiplier": 0.8, "dynatemp_range": 0.5, "lora": [{"id": 0}], "mirostat": 2, "n_indent": 2,
    "n_probs": 3, "repeat_last_n": 64, "samplers": ["top_k"], "top_n_sigma": 1.5, "typical_p": 0.5,
    "xtc_probability": 0.1, "audio": {"voice": "a"}, "modalities": ["text", "audio"],
    "web_search_options": {}, "bad_words_token_ids": [[1]], "prompt_embeds": "x", "audio_data": ["x"],
    "image_data": "x", "video_data": ["x"], "extra_key": "k", "input_embeds": [[0.5]], "lora_id": "x",
    "positional_embed_overrides": {"a": 1}, "tfs_z": 0.5, "top_a": 0.2})");
  for (const auto& [name, value] : fields.items()) {
    EXPECT_EQ(refused(s, kChat, with("x", {{name, value}}))["param"], name);
    EXPECT_EQ(refused(s, kText, {{"prompt", "x"}, {name, value}})["param"], name);
    EXPECT_EQ(refused(s, "/generate", {{"text", "x"}, {"sampling_params", {{name, value}}}})["param"],
              "sampling_params." + name);
    if (name == "token_ids_logprob") continue;  // a field of /generate
    EXPECT_EQ(refused(s, "/generate", {{"text", "x"}, {name, value}})["param"], name);
  }
  const json chat_only = {{"echo", true},
                          {"documents", {{{"text", "a"}}}},
                          {"chat_template", "{{ x }}"},
                          {"parse_tool_calls", false},
                          {"add_special_tokens", true},
                          {"input_ids", {1, 2}},
                          {"thinking_forced_open", true},
                          {"reasoning_format", "xml"}};
  for (const auto& [name, value] : chat_only.items())
    EXPECT_EQ(refused(s, kChat, with("x", {{name, value}}))["param"], name);
}

TEST(ForeignFields, ValuesWithoutEffectAreAccepted) {
  ServerConfig config;
  config.strict_requests = true;
  TestServer s({}, config);
  const json fields = json::parse(R"({
    "allowed_token_ids": null, "bad_words": [], "early_stopping": false, "length_penalty": 1,
    "use_beam_search": false, "dry_multiplier": 0, "mirostat": 0, "typical_p": 1, "xtc_probability": 0,
    "repeat_last_n": -1, "modalities": ["text"], "echo": false, "parse_tool_calls": true,
    "cache_prompt": true, "id_slot": -1, "timings_per_token": false, "prediction": {"type": "content"},
    "metadata": {"a": "b"}, "spaces_between_special_tokens": true, "reasoning_format": "auto",
    "add_special_tokens": false, "input_ids": null, "tfs_z": 1, "top_a": 0, "bad_words_token_ids": [],
    "image_data": null, "input_embeds": [], "lora_id": "", "extra_key": null})");
  ok(s, kChat, with("x", fields));
}

TEST(ForeignFields, OtherNamesReachTheEngine) {
  TestServer s;
  ok(s, kChat, with("x", {{"n_predict", 7}, {"repeat_penalty", 1.5}, {"include_stop_str_in_output", true}}));
  SamplingParams p = s.engine.last_request().sampling;
  EXPECT_EQ(p.max_new_tokens, 7);
  EXPECT_EQ(p.repetition_penalty, 1.5f);
  EXPECT_TRUE(p.no_stop_trim);
  ok(s, kText, {{"prompt", "x"}, {"n_predict", -1}});
  EXPECT_EQ(s.engine.last_request().sampling.max_new_tokens, INT32_MAX);
  ok(s, kText, {{"prompt", "x"}, {"n_predict", 5}, {"max_tokens", 3}});
  EXPECT_EQ(s.engine.last_request().sampling.max_new_tokens, 3);
}

TEST(LegacyFunctions, AreToolsAndComeBackAsAFunctionCall) {
  TestServer s(kGrammars);
  const std::string call = R"(<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>)";
  const json functions = {{"functions", {{{"name", "look"}, {"parameters", {{"type", "object"}}}}}}};
  const json choice = ok(s, kChat, with(call + call, functions))["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "function_call");
  EXPECT_EQ(choice["message"]["function_call"], (json{{"name", "look"}, {"arguments", "{\"x\": 1}"}}));
  EXPECT_FALSE(choice["message"].contains("tool_calls"));
  EXPECT_EQ(
      json::parse(s.engine.last_options().tools_json),
      json::parse(R"([{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}])"));

  json body = with(call, functions);
  body["stream"] = true;
  std::string name, arguments;
  for (const json& event : parse_events(http_post(s.port, kChat, body.dump()).body)) {
    if (event.is_string() || !event["choices"][0]["delta"].contains("function_call")) continue;
    const json& delta = event["choices"][0]["delta"]["function_call"];
    name += delta.value("name", "");
    arguments += delta.value("arguments", "");
  }
  EXPECT_EQ(name, "look");
  EXPECT_EQ(arguments, "{\"x\": 1}");
}

TEST(LegacyFunctions, FunctionCallChoosesOne) {
  TestServer s(kGrammars);
  json body = with("x", {{"functions", {{{"name", "look"}}, {{"name", "wait"}}}}});
  body["function_call"] = "none";
  ok(s, kChat, body);
  EXPECT_TRUE(s.engine.last_options().tools_json.empty());
  body["function_call"] = {{"name", "wait"}};
  ok(s, kChat, body);
  EXPECT_EQ(s.engine.last_request().sampling.grammar.kind, Kind::kStructuralTag);
  EXPECT_NE(s.engine.last_request().sampling.grammar.text.find("wait"), std::string::npos);
  EXPECT_EQ(s.engine.last_request().sampling.grammar.text.find("look"), std::string::npos);
  body["function_call"] = {{"name", "other"}};
  EXPECT_EQ(refused(s, kChat, body)["param"], "function_call.name");
  body["function_call"] = "required";
  EXPECT_EQ(refused(s, kChat, body)["param"], "function_call");
  body = with("x", {{"functions", {{{"name", "a b"}}}}});
  EXPECT_EQ(refused(s, kChat, body)["param"], "functions[0].name");
}

TEST(LegacyFunctions, CallsAndResultsInTheHistory) {
  TestServer s(kGrammars);
  const json body = {{"messages",
                      {{{"role", "user"}, {"content", "q"}},
                       {{"role", "assistant"},
                        {"content", nullptr},
                        {"function_call", {{"name", "look"}, {"arguments", "{\"x\":1}"}}}},
                       {{"role", "function"}, {"name", "look"}, {"content", "r"}}}}};
  ok(s, kChat, body);
  const json messages = json::parse(s.engine.last_messages());
  EXPECT_EQ(messages[1]["tool_calls"][0]["function"], (json{{"name", "look"}, {"arguments", {{"x", 1}}}}));
  EXPECT_FALSE(messages[1].contains("function_call"));
  EXPECT_EQ(messages[2]["role"], "tool");
}

TEST(ChatFields, ReasoningUnderBothNames) {
  TestServer s(FakeOptions{.chat_template = "<think></think>"});
  const std::string text = "<think>Hm.</think>Yes.";
  json message = ok(s, kChat, with(text, json::object()))["choices"][0]["message"];
  EXPECT_EQ(message["reasoning"], "Hm.");
  EXPECT_EQ(message["reasoning_content"], "Hm.");
  message = ok(s, kChat, with("Yes.", json::object()))["choices"][0]["message"];
  ASSERT_TRUE(message.contains("reasoning") && message.contains("reasoning_content"));
  EXPECT_TRUE(message["reasoning"].is_null() && message["reasoning_content"].is_null());
  message = ok(s, kChat, with(text, {{"include_reasoning", false}}))["choices"][0]["message"];
  EXPECT_TRUE(message["reasoning"].is_null());
  EXPECT_EQ(message["content"], "Yes.");
  message = ok(s, kChat, with(text, {{"reasoning_format", "none"}}))["choices"][0]["message"];
  EXPECT_EQ(message["content"], text);
}

TEST(ChatFields, UsageCountsReasoningTokens) {
  TestServer s(FakeOptions{.chat_template = "<think></think>"});
  json body = with("<think>Hm.</think>Yes.", json::object());
  const json details = {{"reasoning_tokens", 3}};  // one token per byte
  EXPECT_EQ(ok(s, kChat, body)["usage"]["completion_tokens_details"], details);
  body.update({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
  const auto events = parse_events(http_post(s.port, kChat, body.dump()).body);
  EXPECT_EQ(events.at(events.size() - 2)["usage"]["completion_tokens_details"], details);
  const json plain = ok(s, kChat, with("Yes.", json::object()));
  EXPECT_EQ(plain["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
  EXPECT_FALSE(ok(s, kText, {{"prompt", "Yes."}})["usage"].contains("completion_tokens_details"));
}

TEST(OpenAiFields, UsageInEveryEvent) {
  TestServer s;
  json body = with("abc", {{"stream", true},
                           {"stream_options", {{"include_usage", true}, {"continuous_usage_stats", true}}}});
  const auto events = parse_events(http_post(s.port, kChat, body.dump()).body);
  int64_t latest = 0;
  for (const json& event : events) {
    if (event.is_string()) continue;
    ASSERT_TRUE(event["usage"].is_object()) << event;
    EXPECT_GE(event["usage"]["completion_tokens"], latest);
    latest = event["usage"]["completion_tokens"];
  }
  EXPECT_EQ(latest, 4);  // three bytes and the end token
  body["stream_options"].erase("include_usage");
  for (const json& event : parse_events(http_post(s.port, kChat, body.dump()).body))
    EXPECT_FALSE(event.is_object() && event.contains("usage"));
}

TEST(OpenAiFields, TokensNamedByTheirIds) {
  TestServer s;
  json body = with("a", {{"logprobs", true}, {"top_logprobs", 1}, {"return_tokens_as_token_ids", true}});
  const json position = ok(s, kChat, body)["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(position["token"], "token_id:97");
  EXPECT_EQ(position["top_logprobs"][0]["token"], "token_id:97");
  const json lists = ok(s, kText, {{"prompt", "a"}, {"logprobs", 0}, {"return_tokens_as_token_ids", true}});
  EXPECT_EQ(lists["choices"][0]["logprobs"]["tokens"][0], "token_id:97");
}

TEST(OpenAiFields, AFingerprintNamesVersionAndBackend) {
  TestServer s;
  const json whole = ok(s, kChat, with("a", json::object()));
  EXPECT_EQ(whole["system_fingerprint"].get<std::string>().rfind("fp4moe-", 0), 0u);
  EXPECT_EQ(ok(s, kText, {{"prompt", "a"}})["system_fingerprint"], whole["system_fingerprint"]);
}

TEST(GenerateFields, ListsHaveOneEntryPerPrompt) {
  TestServer s;
  const json body = {{"text", {"ab", "cd"}},
                     {"sampling_params", {{{"max_new_tokens", 1}}, {{"max_new_tokens", 2}}}},
                     {"return_logprob", {true, false}},
                     {"logprob_start_len", {0, -1}},
                     {"top_logprobs_num", {1, 0}},
                     {"token_ids_logprob", {{97, 98}, {99}}}};
  const json outputs = ok(s, "/generate", body);
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_EQ(outputs[0]["meta_info"]["completion_tokens"], 1);
  EXPECT_EQ(outputs[1]["meta_info"]["completion_tokens"], 2);
  EXPECT_EQ(outputs[0]["meta_info"]["input_token_logprobs"].size(), 2u);
  EXPECT_EQ(outputs[0]["meta_info"]["output_top_logprobs"].size(), 1u);
  EXPECT_EQ(outputs[0]["meta_info"]["output_token_ids_logprobs"][0].size(), 2u);
  EXPECT_FALSE(outputs[1]["meta_info"].contains("output_token_logprobs"));
  EXPECT_FALSE(outputs[1]["meta_info"].contains("output_token_ids_logprobs"));
}

TEST(GenerateFields, ListedIdsAreForAllPromptsOrForOne) {
  TestServer s;
  const auto ids = [&](const json& listed, const json& more = json::object()) {
    json body = {{"text", {"ab", "cd"}}, {"return_logprob", true}, {"token_ids_logprob", listed}};
    body.update(more);
    json found = json::array();
    for (const json& output : ok(s, "/generate", body)) {
      const json& meta = output["meta_info"];
      found.push_back(nullptr);
      if (!meta.contains("output_token_ids_logprobs")) continue;
      found.back() = json::array();
      for (const json& entry : meta["output_token_ids_logprobs"][0]) found.back().push_back(entry[1]);
    }
    return found;
  };
  EXPECT_EQ(ids({7, 8}), json::parse("[[7,8],[7,8]]"));
  EXPECT_EQ(ids(json::parse("[[7,8],[9]]")), json::parse("[[7,8],[9]]"));
  EXPECT_EQ(ids(json::parse("[null,[9]]")), json::parse("[null,[9]]"));
  EXPECT_EQ(ids(json::parse("[[9],[]]")), json::parse("[[9],null]"));
  EXPECT_EQ(ids(json::parse("[[7],[8]]"), {{"sampling_params", {{"n", 2}}}}),
            json::parse("[[7],[7],[8],[8]]"));
  json body = {{"text", "a"}, {"return_logprob", true}, {"token_ids_logprob", std::vector<int>(129, 5)}};
  EXPECT_EQ(refused(s, "/generate", body)["message"],
            "token_ids_logprob: must have at most 128 token ids, got 129");
  body = {{"text", {"a", "b"}}, {"token_ids_logprob", {{5}, {6, 257}}}};
  const json error = refused(s, "/generate", body);
  EXPECT_EQ(error["param"], "token_ids_logprob[1]");
  EXPECT_EQ(error["message"], "token_ids_logprob[1]: must have ids of the vocabulary of 257 tokens, got 257");
}

TEST(GenerateFields, WrongListsAreNamed) {
  TestServer s;
  const std::pair<json, std::string> cases[] = {
      {{{"return_logprob", {true}}}, "return_logprob"},
      {{{"return_logprob", {true, 5}}}, "return_logprob[1]"},
      {{{"sampling_params", {json::object(), {{"temperature", -1}}}}}, "sampling_params[1].temperature"},
      {{{"sampling_params", {{{"n", 2}}, {{"n", 3}}}}}, "sampling_params[1].n"},
      {{{"top_logprobs_num", {1, 99}}}, "top_logprobs_num[1]"},
  };
  for (const auto& [fields, param] : cases) {
    json body = {{"text", {"a", "b"}}};
    body.update(fields);
    EXPECT_EQ(refused(s, "/generate", body)["param"], param);
  }
}

TEST(ContextOverflow, HasTheWordsThatClientsLookFor) {
  TestServer s(FakeOptions{.context_length = 8});
  const json error = refused(s, kChat, with("a prompt that is too long", json::object()));
  EXPECT_EQ(error["code"], "context_length_exceeded");
  const std::string message = error["message"];
  EXPECT_TRUE(message.starts_with("prompt is too long: ")) << message;
  EXPECT_NE(message.find("This model's maximum context length is 8 tokens"), std::string::npos) << message;
}

}  // namespace
}  // namespace fp4moe
