// /tokenize, /detokenize and /apply-template, with the fields of vLLM, SGLang and llama-server.
#include "server/api/openai_requests.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;

json post(const TestServer& s, const std::string& path, const json& body) {
  const HttpAnswer answer = http_post(s.port, path, body.dump());
  EXPECT_EQ(answer.status, 200) << body << answer.body;
  return body_of(answer);
}

// The field that the error of a refused request names.
std::string refused(const TestServer& s, const std::string& path, const std::string& body) {
  const HttpAnswer answer = http_post(s.port, path, body);
  EXPECT_EQ(answer.status, 400) << body << answer.body;
  const json param = body_of(answer)["error"]["param"];
  return param.is_string() ? param.get<std::string>() : "";
}

TEST(Tokenize, Prompts) {
  TestServer s;
  const json one = post(s, "/tokenize", {{"prompt", "ab"}, {"model", "fake"}, {"add_special_tokens", false}});
  EXPECT_EQ(one, json::parse(R"({"tokens":[97,98],"count":2,"max_model_len":4096,"token_strs":null})"));
  const json two = post(s, "/v1/tokenize", {{"prompt", {"a", "bc"}}});
  EXPECT_EQ(two["tokens"], json::parse("[[97],[98,99]]"));
  EXPECT_EQ(two["count"], json::array({1, 2}));
  EXPECT_EQ(post(s, "/tokenize", {{"prompt", ""}})["count"], 0);
  EXPECT_EQ(post(s, "/tokenize", {{"prompt", {"a"}}})["tokens"], json::parse("[[97]]"));
}

TEST(Tokenize, ContentWithPieces) {
  TestServer s;
  EXPECT_EQ(post(s, "/tokenize", {{"content", "ab"}, {"add_special", true}})["tokens"],
            json::array({97, 98}));
  EXPECT_EQ(post(s, "/tokenize", {{"content", "a\xC3\xA9"}, {"with_pieces", true}})["tokens"],
            json::parse(R"([{"id":97,"piece":"a"},{"id":195,"piece":[195]},{"id":169,"piece":[169]}])"));
  EXPECT_EQ(refused(s, "/tokenize", R"({"content":["a"]})"), "content");
  EXPECT_EQ(refused(s, "/tokenize", R"({"content":"a","parse_special":false})"), "parse_special");
}

TEST(Tokenize, TokenTexts) {
  TestServer s;
  EXPECT_EQ(post(s, "/tokenize", {{"prompt", "a\xC3\xA9"}, {"return_token_strs", true}})["token_strs"],
            json::parse(R"(["a","bytes:\\xc3","bytes:\\xa9"])"));
  EXPECT_EQ(post(s, "/tokenize", {{"prompt", {"a", "b"}}, {"return_token_strs", true}})["token_strs"],
            json::parse(R"([["a"],["b"]])"));
  const std::string many(300000, 'a');
  EXPECT_EQ(post(s, "/tokenize", {{"prompt", many}})["count"], 300000);
  for (const char* field : {"return_token_strs", "with_pieces"})
    EXPECT_EQ(refused(s, "/tokenize", json{{"prompt", many}, {field, true}}.dump()), field);
}

// Templates and marks as in a chat.
TEST(Tokenize, MessagesGiveTheIdsThatAChatSubmits) {
  FakeOptions options;
  options.special_tokens = {"<|end|>"};
  options.chat_template = "{{ tools }}";
  TestServer s(options);
  const json body = {
      {"messages",
       {{{"role", "system"}, {"content", "s<|end|>"}}, {{"role", "user"}, {"content", "u<|end|>"}}}},
      {"tools", {{{"type", "function"}, {"function", {{"name", "f"}}}}}},
      {"add_generation_prompt", false},
      {"chat_template_kwargs", {{"x", 1}}}};
  const json tokens = post(s, "/tokenize", body)["tokens"];
  const ChatTemplateOptions asked = s.engine.last_options();
  EXPECT_FALSE(asked.add_generation_prompt);
  EXPECT_NE(asked.tools_json.find("\"f\""), std::string::npos);
  EXPECT_EQ(asked.kwargs_json, R"({"x":1})");
  post(s, "/v1/chat/completions", body);
  EXPECT_EQ(tokens.get<std::vector<int32_t>>(), s.engine.last_request().input_ids);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 257), 1) << "the user's <|end|> stays text";
  EXPECT_EQ(post(s, "/apply-template", body)["prompt"], "s<|end|>u<|end|>");
}

TEST(Tokenize, WrongFieldsAreNamed) {
  TestServer s;
  const std::pair<const char*, const char*> cases[] = {
      {R"({})", "prompt"},
      {R"({"prompt":5})", "prompt"},
      {R"({"prompt":[]})", "prompt"},
      {R"({"prompt":["a",5]})", "prompt"},
      {R"({"prompt":"a","content":"b"})", "content"},
      {R"({"prompt":"a","messages":[]})", "messages"},
      {R"({"messages":5})", "messages"},
      {R"({"messages":[{"role":"user","content":"a"}],"add_special_tokens":true})", "add_special_tokens"},
      {R"({"messages":[{"role":"user","content":"BAD"}]})", "messages"},
      {R"({"messages":[{"role":"bad","content":"a"}]})", "messages[0].role"},
      {R"({"prompt":"a","return_token_strs":1})", "return_token_strs"},
      {R"({"prompt":"a","with_pieces":1})", "with_pieces"},
      {R"({"prompt":"a","model":5})", "model"},
  };
  for (const auto& [body, param] : cases) EXPECT_EQ(refused(s, "/tokenize", body), param) << body;
  EXPECT_EQ(refused(s, "/tokenize", "[]"), "");
  EXPECT_EQ(refused(s, "/apply-template", "{}"), "messages");
  EXPECT_EQ(http_post(s.port, "/tokenize", R"({"prompt":"a","model":"other"})").status, 404);
  EXPECT_EQ(http_get(s.port, "/v1/tokenize").headers.at("allow"), "POST");
}

TEST(Detokenize, UnderEachName) {
  TestServer s;
  for (const char* name : {"tokens", "ids", "prompt"}) {
    EXPECT_EQ(post(s, "/detokenize", {{name, {97, 98}}}),
              json::parse(R"({"text":"ab","prompt":"ab","content":"ab"})"));
  }
  EXPECT_EQ(post(s, "/v1/detokenize/", {{"tokens", 97}})["text"], "a");
  EXPECT_EQ(post(s, "/detokenize", {{"tokens", json::array()}})["text"], "");
  EXPECT_EQ(post(s, "/detokenize", {{"tokens", {195}}})["text"], "\xEF\xBF\xBD");
  EXPECT_EQ(post(s, "/detokenize", {{"tokens", {{97}, {98, 99}}}})["text"], json::array({"a", "bc"}));
}

TEST(Detokenize, WrongFieldsAreNamed) {
  TestServer s;
  const std::pair<const char*, const char*> cases[] = {
      {R"({})", "tokens"},
      {R"({"tokens":"a"})", "tokens"},
      {R"({"tokens":[-1]})", "tokens"},
      {R"({"tokens":[1],"ids":[2]})", "ids"},
      {R"({"ids":{}})", "ids"},
      {R"({"tokens":[1],"skip_special_tokens":1})", "skip_special_tokens"},
  };
  for (const auto& [body, param] : cases)
    EXPECT_EQ(refused(s, "/detokenize", body).substr(0, std::string(param).size()), param) << body;
}

}  // namespace
}  // namespace fp4moe
