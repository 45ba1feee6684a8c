// The stored responses of /v1/responses. The fake engine's output is its prompt.
#include <gtest/gtest.h>

#include "server/api/responses_requests.h"

namespace fp4moe {
namespace {

using nlohmann::json;

HttpAnswer http_delete(int port, const std::string& path, const std::string& headers = "") {
  HttpClient client(port);
  client.send("DELETE " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n");
  return client.receive();
}
std::string path_of(const json& response) { return kResponses + "/" + response["id"].get<std::string>(); }
std::string key(const std::string& name) { return "Authorization: Bearer " + name + "\r\n"; }

TEST(StoredResponses, AreReadAndDeleted) {
  TestServer s;
  const json response = respond(s, {{"input", "a"}, {"instructions", "b"}});
  const HttpAnswer read = http_get(s.port, path_of(response));
  EXPECT_EQ(read.status, 200);
  EXPECT_EQ(json::parse(read.body), response);
  const HttpAnswer deleted = http_delete(s.port, path_of(response));
  EXPECT_EQ(deleted.status, 200);
  EXPECT_EQ(json::parse(deleted.body),
            (json{{"id", response["id"]}, {"object", "response"}, {"deleted", true}}));
  for (const HttpAnswer& answer :
       {http_get(s.port, path_of(response)), http_delete(s.port, path_of(response))}) {
    EXPECT_EQ(answer.status, 404);
    EXPECT_EQ(json::parse(answer.body)["error"]["param"], "response_id");
  }
}

TEST(StoredResponses, OfAStream) {
  TestServer s;
  const json response = stream(s, {{"input", "a"}}).back()["response"];
  EXPECT_EQ(json::parse(http_get(s.port, path_of(response)).body), response);
}

TEST(StoredResponses, ContinueTheWholeConversation) {
  TestServer s;
  json response = respond(s, {{"input", "a"}, {"instructions", "I"}});
  response = respond(s, {{"input", "b"}, {"previous_response_id", response["id"]}});
  EXPECT_EQ(json::parse(s.engine.last_messages()),  // without the instructions
            json::parse(R"([{"role":"user","content":"a"},{"role":"assistant","content":"Ia"},
                            {"role":"user","content":"b"}])"));
  const json third = {{"input", "c"}, {"previous_response_id", response["id"]}, {"instructions", "J"}};
  for (int branch = 0; branch < 2; ++branch) {
    response = respond(s, third);
    EXPECT_EQ(json::parse(s.engine.last_messages()),
              json::parse(R"([{"role":"system","content":"J"},{"role":"user","content":"a"},
                              {"role":"assistant","content":"Ia"},{"role":"user","content":"b"},
                              {"role":"assistant","content":"aIab"},{"role":"user","content":"c"}])"));
  }
  EXPECT_EQ(response["previous_response_id"], third["previous_response_id"]);
  respond(s, {{"previous_response_id", response["id"]}});  // no new items
  EXPECT_EQ(json::parse(s.engine.last_messages()).back()["role"], "assistant");
}

TEST(StoredResponses, KeepCallsForTheirOutputs) {
  TestServer s({.chat_template = "{{ tools }}<tool_call></tool_call>"});
  const json tools = {{{"type", "function"}, {"name", "f"}}};
  const json called =
      respond(s, {{"input", R"(<tool_call>{"name": "f", "arguments": {}}</tool_call>)"}, {"tools", tools}});
  const json& call = called["output"][0];
  ASSERT_EQ(call["type"], "function_call");
  const json result = {{"type", "function_call_output"}, {"call_id", call["call_id"]}, {"output", "done"}};
  respond(s, {{"input", {result}}, {"previous_response_id", called["id"]}, {"tools", tools}});
  const json messages = json::parse(s.engine.last_messages());
  EXPECT_EQ(messages[1]["tool_calls"][0]["id"], call["call_id"]);
  EXPECT_EQ(messages[2]["content"], "done");
  respond(s, {{"input", {{{"type", "item_reference"}, {"id", call["id"]}}, result}}});
  EXPECT_EQ(json::parse(s.engine.last_messages())[0]["tool_calls"][0]["id"], call["call_id"]);
  respond(s, {{"input", {{{"id", call["id"]}}, result}}});
  const json unknown = refused(s, {{"input", {{{"type", "item_reference"}, {"id", "fc_x"}}}}}, 404);
  EXPECT_EQ(unknown["param"], "input[0].id");
}

TEST(StoredResponses, ListInputItems) {
  TestServer s;
  const json response = respond(s, {{"input",
                                     {{{"role", "user"}, {"content", "a"}, {"id", "msg_a"}},
                                      {{"role", "assistant"}, {"content", "b"}},
                                      {{"role", "user"}, {"content", "c"}}}}});
  const std::string path = path_of(response) + "/input_items";
  const json newest = json::parse(http_get(s.port, path).body);
  EXPECT_EQ(newest["object"], "list");
  ASSERT_EQ(newest["data"].size(), 3u);
  EXPECT_EQ(newest["data"][0]["content"], json::parse(R"([{"type":"input_text","text":"c"}])"));
  EXPECT_EQ(newest["data"][1]["content"][0]["type"], "output_text");
  EXPECT_EQ(newest["first_id"], newest["data"][0]["id"]);
  EXPECT_EQ(newest["last_id"], "msg_a");
  EXPECT_EQ(newest["has_more"], false);
  const json first = json::parse(http_get(s.port, path + "?order=asc&limit=1").body);
  EXPECT_EQ(first["data"][0]["id"], "msg_a");
  EXPECT_EQ(first["has_more"], true);
  const json rest = json::parse(http_get(s.port, path + "?order=asc&after=msg_a").body);
  EXPECT_EQ(rest["data"].size(), 2u);
  const json none = json::parse(http_get(s.port, path + "?after=msg_a").body);
  EXPECT_EQ(none["data"], json::array());
  EXPECT_EQ(none["first_id"], nullptr);
  for (const char* query : {"limit=0", "limit=101", "limit=x", "order=up", "after=msg_x"}) {
    const HttpAnswer answer = http_get(s.port, path + "?" + query);
    EXPECT_EQ(answer.status, 400) << query;
    EXPECT_EQ(json::parse(answer.body)["error"]["param"], std::string(query, std::string(query).find('=')));
  }
}

TEST(StoredResponses, CannotBeCancelledOrStreamed) {
  TestServer s;
  const json response = respond(s, {{"input", "a"}});
  EXPECT_EQ(http_post(s.port, path_of(response) + "/cancel", "").status, 400);
  EXPECT_EQ(http_post(s.port, kResponses + "/resp_x/cancel", "").status, 404);
  EXPECT_EQ(http_get(s.port, path_of(response) + "?stream=true").status, 400);
  EXPECT_EQ(http_get(s.port, path_of(response) + "/other").status, 404);
  EXPECT_EQ(http_get(s.port, path_of(response) + "/cancel").status, 404);
  EXPECT_EQ(http_post(s.port, path_of(response), "{}").status, 404);
  EXPECT_EQ(http_post(s.port, path_of(response) + "/input_items", "{}").status, 404);
}

TEST(StoredResponses, OnlyIfRequested) {
  TestServer s;
  const json response = respond(s, {{"input", "a"}, {"store", false}});
  EXPECT_EQ(response["store"], false);
  EXPECT_EQ(http_get(s.port, path_of(response)).status, 404);
  const json error = refused(s, {{"input", "b"}, {"previous_response_id", response["id"]}}, 404);
  EXPECT_EQ(error["param"], "previous_response_id");
  const json no_id = refused(s, {{"input", "b"}, {"previous_response_id", "bad"}});
  EXPECT_NE(no_id["message"].get<std::string>().find("must start with \"resp_\""), std::string::npos)
      << no_id;
  stream(s, {{"input", "FAIL"}});
  EXPECT_EQ(refused(s, {{"input", "b"}, {"previous_response_id", ""}, {"max_output_tokens", -1}})["param"],
            "max_output_tokens");
}

TEST(StoredResponses, CanBeTurnedOff) {
  ServerConfig config;
  config.max_stored_response_bytes = 0;
  TestServer s({}, config);
  const json response = respond(s, {{"input", "a"}, {"store", true}});
  EXPECT_EQ(response["store"], false);
  EXPECT_EQ(http_get(s.port, path_of(response)).status, 404);
  const json error = refused(s, {{"input", "b"}, {"previous_response_id", response["id"]}});
  EXPECT_EQ(error["code"], "unsupported");
  EXPECT_NE(error["message"].get<std::string>().find("--max-stored-response-bytes"), std::string::npos);
}

TEST(StoredResponses, AreEvicted) {
  ServerConfig config;
  config.max_stored_response_bytes = 20000;
  TestServer s({}, config);
  const json first = respond(s, {{"input", "a"}});
  for (int i = 0; i < 20; ++i) respond(s, {{"input", "b"}});
  EXPECT_EQ(http_get(s.port, path_of(first)).status, 404);
}

TEST(StoredResponses, BelongToAKey) {
  ServerConfig config;
  config.api_keys = {"one", "two"};
  TestServer s({}, config);
  const json response = respond(s, {{"input", "a"}}, key("one"));
  const json& item = response["output"][0];
  EXPECT_EQ(http_get(s.port, path_of(response)).status, 401);
  EXPECT_EQ(http_get(s.port, path_of(response), key("two")).status, 404);
  EXPECT_EQ(http_delete(s.port, path_of(response), key("two")).status, 404);
  EXPECT_EQ(http_get(s.port, path_of(response), "x-api-key: one\r\n").status, 200);
  const json next = {{"input", "b"}, {"previous_response_id", response["id"]}};
  refused(s, next, 404, key("two"));
  refused(s, {{"input", {{{"type", "item_reference"}, {"id", item["id"]}}}}}, 404, key("two"));
  respond(s, next, key("one"));
}

TEST(StoredResponses, OneThatDoesNotFitSaysSo) {
  ServerConfig config;
  config.max_stored_response_bytes = 8192;
  TestServer s({.context_length = 1 << 20}, config);
  const json large = respond(s, {{"input", std::string(20000, 'a')}, {"max_output_tokens", 1}});
  EXPECT_EQ(large["store"], false);
  EXPECT_EQ(http_get(s.port, path_of(large)).status, 404);
  const json small = respond(s, {{"input", "a"}, {"max_output_tokens", 1}});
  EXPECT_EQ(small["store"], true);
  EXPECT_EQ(http_get(s.port, path_of(small)).status, 200);
}

TEST(StoredResponses, DoNotExceedTheRequestMemory) {
  ServerConfig config;
  config.max_body_bytes = 1 << 20;
  config.max_buffered_bytes = 1 << 20;
  TestServer s({.context_length = 1 << 20}, config);
  json response = respond(s, {{"input", std::string(200000, 'a')}, {"max_output_tokens", 1}});
  int refusals = 0;
  for (int turn = 0; turn < 8 && refusals == 0; ++turn) {
    const json body = {{"input", std::string(200000, 'a')},
                       {"max_output_tokens", 1},
                       {"previous_response_id", response["id"]}};
    const HttpAnswer answer = http_post(s.port, kResponses, body.dump());
    if (answer.status == 200) response = json::parse(answer.body);
    refusals += answer.status == 503 ? 1 : 0;
  }
  EXPECT_EQ(refusals, 1);
}

}  // namespace
}  // namespace fp4moe
