// /v1/completions, field by field, over a real socket.
#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

TEST(Completions, AllPromptForms) {
  TestServer s;
  const std::pair<const char*, std::vector<std::string>> cases[] = {{R"("ab")", {"ab"}},
                                                                    {R"(["ab","c"])", {"ab", "c"}},
                                                                    {"[97,98]", {"ab"}},
                                                                    {"[[97],[98,99]]", {"a", "bc"}}};
  for (const auto& [prompt, texts] : cases) {
    const HttpAnswer answer = http_post(s.port, kText, std::string(R"({"prompt":)") + prompt + "}");
    ASSERT_EQ(answer.status, 200) << answer.body;
    const json body = body_of(answer);
    EXPECT_EQ(body["object"], "text_completion");
    ASSERT_EQ(body["choices"].size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(body["choices"][i]["text"], texts[i]);
      EXPECT_EQ(body["choices"][i]["index"], i);
      EXPECT_EQ(body["choices"][i]["finish_reason"], "stop");
    }
  }
}

TEST(Completions, WrongPrompts) {
  TestServer s;
  for (const char* prompt : {"null", "5.5", "{}", "[]", "\"\"", "[\"a\",5]", "[[1],[\"x\"]]", "[[1],[]]",
                             "[-1]", "[4294967296]", "true"}) {
    const HttpAnswer answer = http_post(s.port, kText, std::string(R"({"prompt":)") + prompt + "}");
    EXPECT_EQ(answer.status, 400) << prompt;
    EXPECT_EQ(body_of(answer)["error"]["param"], "prompt") << prompt;
  }
  for (const auto& [prompt, param] : {std::pair{"[1,257]", "prompt[1]"}, {"[[1],[2,257]]", "prompt[1][1]"}}) {
    const HttpAnswer answer = http_post(s.port, kText, std::string(R"({"prompt":)") + prompt + "}");
    EXPECT_EQ(answer.status, 400) << prompt;
    EXPECT_EQ(body_of(answer)["error"]["param"], param) << answer.body;
    EXPECT_NE(answer.body.find("out of vocabulary"), std::string::npos) << answer.body;
  }
}

TEST(Completions, DefaultIsSixteenTokens) {
  TestServer s;
  const json body = body_of(http_post(s.port, kText, R"({"prompt":"a","ignore_eos":true})"));
  EXPECT_EQ(body["choices"][0]["text"], std::string(16, 'a'));
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
}

TEST(Completions, Stream) {
  TestServer s;
  const std::string request =
      R"({"prompt":["a","b"],"stream":true,"logprobs":1,"max_tokens":1,"stream_options":{"include_usage":true}})";
  const auto events = parse_events(http_post(s.port, kText, request).body);
  ASSERT_EQ(events.size(), 4u);
  for (int i = 0; i < 2; ++i) {
    const json& choice = events[i]["choices"][0];
    EXPECT_EQ(choice["text"], choice["index"] == 0 ? "a" : "b");
    EXPECT_EQ(choice["finish_reason"], "length");
    EXPECT_EQ(choice["logprobs"]["token_logprobs"], json::array({-0.5}));
    EXPECT_EQ(choice["logprobs"]["top_logprobs"][0],
              choice["index"] == 0 ? (json{{"a", -0.5}}) : (json{{"a", -0.5}, {"b", -0.5}}));
  }
  EXPECT_EQ(events[2]["usage"], (json{{"prompt_tokens", 2},
                                      {"completion_tokens", 2},
                                      {"total_tokens", 4},
                                      {"prompt_tokens_details", {{"cached_tokens", 0}}}}));
  EXPECT_EQ(events[3], "[DONE]");
}

TEST(Completions, LogprobOffsets) {
  TestServer s;
  const json body = body_of(http_post(s.port, kText, R"({"prompt":"abc","logprobs":0,"max_tokens":3})"));
  const json& logprobs = body["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], json::array({"a", "b", "c"}));
  EXPECT_EQ(logprobs["text_offset"], json::array({0, 1, 2}));
  EXPECT_EQ(logprobs["top_logprobs"][0], (json{{"a", -0.5}}));  // the chosen token
}

TEST(Completions, EchoIsThePromptInFront) {
  TestServer s;
  const auto texts = [&](const std::string& request) {
    std::vector<std::string> found;
    const json body = body_of(http_post(s.port, kText, request));
    for (const json& choice : body["choices"]) found.push_back(choice["text"]);
    return found;
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts(R"({"prompt":"abc","echo":true})"), Texts{"abcabc"});
  EXPECT_EQ(texts(R"({"prompt":[97,98],"echo":true,"max_tokens":1})"), Texts{"aba"});
  EXPECT_EQ(texts(R"({"prompt":["a","bc"],"n":2,"echo":true,"max_tokens":0})"),
            (Texts{"a", "a", "bc", "bc"}));
  const auto events = parse_events(
      http_post(s.port, kText, R"({"prompt":["ab","c"],"echo":true,"max_tokens":2,"stream":true})").body);
  std::map<int, std::string> streamed;
  for (const json& event : events)
    if (event.is_object()) streamed[event["choices"][0]["index"]] += event["choices"][0]["text"];
  EXPECT_EQ(streamed, (std::map<int, std::string>{{0, "abab"}, {1, "cc"}}));
}

TEST(Completions, EchoWithLogprobs) {
  TestServer s;
  const std::string request =
      R"({"prompt":[98,99,100],"echo":true,"logprobs":1,"max_tokens":1,"temperature":0)";
  const json body = body_of(http_post(s.port, kText, request + "}"));
  const json& logprobs = body["choices"][0]["logprobs"];
  EXPECT_EQ(body["choices"][0]["text"], "bcdb");
  EXPECT_EQ(logprobs["tokens"], json::array({"b", "c", "d", "b"}));
  EXPECT_EQ(logprobs["token_logprobs"], json::parse("[null,-1.0,-2.0,-0.5]"));
  EXPECT_EQ(logprobs["top_logprobs"],
            json::parse(R"([null,{"a":0.0,"c":-1.0},{"a":0.0,"d":-2.0},{"a":-0.5,"b":-0.5}])"));
  EXPECT_EQ(logprobs["text_offset"], json::array({0, 1, 2, 3}));
  EXPECT_EQ(s.engine.last_request().prompt_logprobs_from, 0);

  const auto events = parse_events(http_post(s.port, kText, request + R"(,"stream":true})").body);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["choices"][0]["logprobs"], logprobs);

  const json none = body_of(
      http_post(s.port, kText, R"({"prompt":"bc","echo":true,"logprobs":0,"max_tokens":0})"))["choices"][0];
  EXPECT_EQ(none["text"], "bc");
  EXPECT_EQ(none["logprobs"]["token_logprobs"], json::parse("[null,-1.0]"));
  EXPECT_EQ(none["logprobs"]["top_logprobs"], json::parse(R"([null,{"c":-1.0}])"));  // the chosen token
  EXPECT_EQ(none["finish_reason"], "length");
}

TEST(Completions, TokensThatAreNoTextAreNamedByTheirBytes) {
  TestServer s;
  const json body = body_of(http_post(s.port, kText, R"({"prompt":[195,188],"logprobs":1,"max_tokens":2})"));
  EXPECT_EQ(body["choices"][0]["text"], "\xC3\xBC");
  const json& logprobs = body["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], json::array({"bytes:\\xc3", "bytes:\\xbc"}));
  EXPECT_EQ(logprobs["top_logprobs"][0], (json{{"a", -0.5}, {"bytes:\\xc3", -0.5}}));
}

TEST(Completions, TokenIds) {
  TestServer s;
  const std::string request = R"({"prompt":"ab","max_tokens":3,"return_token_ids":true)";
  const json choice = body_of(http_post(s.port, kText, request + "}"))["choices"][0];
  EXPECT_EQ(choice["prompt_token_ids"], json::array({97, 98}));
  EXPECT_EQ(choice["token_ids"], json::array({97, 98, 256}));
  json streamed = json::array();
  int num_prompts = 0;
  for (const json& event : parse_events(http_post(s.port, kText, request + R"(,"stream":true})").body)) {
    if (!event.is_object()) continue;
    num_prompts += event["choices"][0].contains("prompt_token_ids");
    for (const json& id : event["choices"][0]["token_ids"]) streamed.push_back(id);
  }
  EXPECT_EQ(streamed, choice["token_ids"]);
  EXPECT_EQ(num_prompts, 1);
}

TEST(Completions, NoTokensAtAll) {
  TestServer s;
  const json body = body_of(http_post(s.port, kText, R"({"prompt":"abc","max_tokens":0})"));
  EXPECT_EQ(body["choices"][0]["text"], "");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["usage"]["completion_tokens"], 0);
}

}  // namespace
}  // namespace fp4moe
