#include "server/api/responses_api.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "server/api/apis.h"
#include "server/api/chat_call.h"
#include "server/api/responses_format.h"
#include "server/http/errors.h"
#include "server/http/route_path.h"

namespace fp4moe {

namespace {

constexpr int64_t kMaxListed = 100, kListedByDefault = 20;  // OpenAI's

// A parameter as a client would write it: 0.7, not 0.699999988.
double rounded(float value) { return std::round(static_cast<double>(value) * 1e6) / 1e6; }

HttpResponse unknown_response(const std::string& id) {
  return error_response(no_such_response(id), "response_id");
}

std::string list_of(const std::vector<const StoredItem*>& items) {
  std::string text = "[";
  for (const StoredItem* item : items) text += (text.size() > 1 ? "," : "") + item->text;
  return text + "]";
}

std::vector<const StoredItem*> pointers(const std::vector<StoredItem>& items) {
  std::vector<const StoredItem*> list;
  for (const StoredItem& item : items) list.push_back(&item);
  return list;
}

HttpResponse retrieve(const StoredResponse& stored) {
  HttpResponse response;
  response.body = stored.head.substr(0, stored.head.size() - 1) +
                  ",\"output\":" + list_of(pointers(stored.turn->output())) + "}";
  return response;
}

std::map<std::string, std::string> query_fields(const std::string& query) {
  std::map<std::string, std::string> fields;
  for (size_t begin = 0; begin < query.size();) {
    const size_t end = std::min(query.find('&', begin), query.size());
    const std::string field = query.substr(begin, end - begin);
    const size_t equals = std::min(field.find('='), field.size());
    fields[field.substr(0, equals)] = field.substr(std::min(equals + 1, field.size()));
    begin = end + 1;
  }
  return fields;
}

// Reads the query field "limit".
Result<size_t> read_limit(const std::map<std::string, std::string>& query) {
  const auto given = query.find("limit");
  if (given == query.end()) return static_cast<size_t>(kListedByDefault);
  const std::string& text = given->second;
  int64_t limit = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), limit);
  if (parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && limit >= 1 &&
      limit <= kMaxListed)
    return static_cast<size_t>(limit);
  return invalid_argument("limit must be in 1.." + std::to_string(kMaxListed) + ", got " + shown(text));
}

HttpResponse list_input(const StoredResponse& stored, const std::string& query_text) {
  const auto query = query_fields(query_text);
  const Result<size_t> limit = read_limit(query);
  if (!limit.ok()) return error_response(limit.status(), "limit");
  const auto order = query.find("order"), after = query.find("after");
  if (order != query.end() && order->second != "asc" && order->second != "desc")
    return error_response(invalid_argument("order must be asc or desc, got " + shown(order->second)),
                          "order");
  std::vector<const StoredItem*> items = pointers(stored.turn->input());
  if (order == query.end() || order->second == "desc") std::reverse(items.begin(), items.end());
  if (after != query.end()) {
    const auto at = std::find_if(items.begin(), items.end(),
                                 [&](const StoredItem* item) { return item->id == after->second; });
    if (at == items.end())
      return error_response(invalid_argument("after must be the id of an input item of this response, got " +
                                             shown(after->second)),
                            "after");
    items.erase(items.begin(), at + 1);
  }
  const bool has_more = items.size() > *limit;
  items.resize(std::min(items.size(), *limit));
  const json ids = {{"object", "list"},
                    {"first_id", items.empty() ? json(nullptr) : json(items.front()->id)},
                    {"last_id", items.empty() ? json(nullptr) : json(items.back()->id)},
                    {"has_more", has_more}};
  HttpResponse response;
  const std::string head = to_text(ids);
  response.body = head.substr(0, head.size() - 1) + ",\"data\":" + list_of(items) + "}";
  return response;
}

}  // namespace

GenerationCall parse_responses(const Engine& engine, const ResponseAccess& access, Fields& fields) {
  GenerationCall call;
  ResponsesRequest translated = read_responses_request(engine, access, fields);
  if (!fields.ok()) return call;
  call.stream = translated.stream;
  Fields chat(translated.chat);
  ChatInput input = read_chat_input(engine, chat);
  for (ToolUse::Function& f : input.tools.functions) f.place = responses_name(translated, f.place);
  const std::string id = make_id(kResponseIdPrefix);
  Request request;
  read_identity(chat, kResponseIdPrefix, request);
  if (chat.find("rid") == nullptr && chat.find("request_id") == nullptr) request.id = id;

  ResponsesFormat::Setup setup{.logprobs = input.sampling.top_logprobs >= 0,
                               .parallel_calls = input.tools.parallel};
  json head = {{"id", id}, {"object", "response"}, {"model", engine.info().name}};
  head.update(translated.head);
  head["temperature"] = rounded(input.sampling.temperature);
  head["top_p"] = rounded(input.sampling.top_p);
  translated.head = std::move(head);
  if (chat.ok()) setup.plan = add_chat(engine, chat, std::move(input), std::move(request), 1, call);
  fields.merge_translated(chat, [&](const std::string& name) { return responses_name(translated, name); });
  translated.chat = json::object();
  if (fields.ok())
    call.format = std::make_unique<ResponsesFormat>(engine, access, std::move(translated), setup);
  return call;
}

HttpResponse stored_response(ResponseStore& store, const std::string& owner, const HttpRequest& request) {
  const std::string rest = path_tail(kResponsesPath, request.path);
  const std::string id = rest.substr(0, rest.find('/')), action = rest.substr(id.size());
  const bool is_get = request.method != "POST" && request.method != "DELETE";
  const bool is_route = action.empty()             ? request.method != "POST"
                        : action == "/input_items" ? is_get
                                                   : action == "/cancel" && request.method == "POST";
  if (!is_route) return error_response(not_found("no route " + request.method + " " + shown(request.path)));
  const auto stored = store.find(owner, id);
  if (stored == nullptr) return unknown_response(id);
  if (request.method == "POST")
    return error_response(unsupported("response " + shown(id) +
                                      " has ended and cannot be cancelled: only a response with background "
                                      "true could be, and this server refuses background"),
                          "response_id");
  if (action == "/input_items") return list_input(*stored, request.query);
  if (is_get) {
    const auto query = query_fields(request.query);
    if (const auto stream = query.find("stream"); stream != query.end() && stream->second == "true")
      return error_response(unsupported("stream must be false: stored responses are not streamed"), "stream");
    return retrieve(*stored);
  }
  store.remove(owner, id);
  HttpResponse response;
  response.body = to_text({{"id", id}, {"object", "response"}, {"deleted", true}});
  return response;
}

}  // namespace fp4moe
