#include "server/api/tokenize_api.h"

#include <string>
#include <utility>
#include <vector>

#include "server/api/apis.h"
#include "server/api/chat_call.h"
#include "server/api/openai_format.h"
#include "server/http/errors.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxShownTokens = 1 << 18;  // whose texts are returned, several hundred bytes of JSON each

using IdLists = std::vector<std::vector<int32_t>>;

// Returns the one of `names` that the request has. If it has none or several, records an error and returns
// "".
std::string only_field(Fields& fields, const std::vector<std::string>& names) {
  std::string found, list;
  for (const std::string& name : names) {
    list += (list.empty() ? "" : ", ") + name;
    if (fields.find(name) == nullptr) continue;
    if (!found.empty()) fields.fail(name, "cannot be combined with \"" + found + "\"");
    found = name;
  }
  if (found.empty()) fields.fail(names.front(), "is missing; send one of: " + list);
  return fields.ok() ? found : "";
}

std::vector<int32_t> chat_ids(const Engine& engine, Fields& fields) {
  fields.refuse("add_special_tokens", false);  // the template contains them
  const ChatInput input = read_chat_input(engine, fields);
  if (!fields.ok()) return {};
  return render_chat(engine, fields, input).ids;
}

IdLists text_ids(const Engine& engine, Fields& fields, const std::string& name, bool add_special_tokens) {
  IdLists lists;
  for (const std::string& text : fields.strings(name)) {
    Result<std::vector<int32_t>> ids = engine.tokenize(text, add_special_tokens);
    if (!ids.ok()) {
      fields.fail(name, ids.status());
      break;
    }
    lists.push_back(std::move(ids).value());
  }
  return lists;
}

IdLists read_ids(const Engine& engine, Fields& fields) {
  const std::string name = only_field(fields, {"prompt", "content", "messages"});
  if (name == "messages") return {chat_ids(engine, fields)};
  if (name == "prompt") return text_ids(engine, fields, name, fields.boolean("add_special_tokens", true));
  if (name != "content") return {};
  fields.refuse("parse_special", true);
  if (!fields.find("content")->is_string()) fields.fail("content", "must be a string");
  return text_ids(engine, fields, name, fields.boolean("add_special", false));
}

// llama-server's piece of a token: a string, or the bytes of a part of a character.
json piece(const std::string& bytes) {
  if (token_text(bytes) == bytes) return bytes;
  json list = json::array();
  for (const char byte : bytes) list.push_back(static_cast<unsigned char>(byte));
  return list;
}

// Calls `print` for each id, as one array for each list; the array alone if the request is not a list.
template <class Print>
json print_lists(const IdLists& lists, bool is_list, Print print) {
  json arrays = json::array();
  for (const std::vector<int32_t>& ids : lists) {
    json array = json::array();
    for (const int32_t id : ids) array.push_back(print(id));
    arrays.push_back(std::move(array));
  }
  return is_list ? std::move(arrays) : std::move(arrays.front());
}

void check_shown_tokens(Fields& fields, const char* name, const IdLists& lists) {
  size_t count = 0;
  for (const std::vector<int32_t>& ids : lists) count += ids.size();
  if (fields.boolean(name, false) && count > kMaxShownTokens)
    fields.fail(name, "would return the texts of " + std::to_string(count) + " tokens; the limit is " +
                          std::to_string(kMaxShownTokens));
}

}  // namespace

HttpResponse tokenize_response(const RouteContext& context, const HttpRequest& request) {
  const Result<json> body = parse_json(request.body);
  if (!body.ok()) return error_response(body.status());
  const Engine& engine = context.engine;
  Fields fields(*body);
  check_model(engine.info(), context.config, fields);
  const IdLists lists = fields.ok() ? read_ids(engine, fields) : IdLists();
  const bool shows_strings = fields.boolean("return_token_strs", false);
  const bool shows_pieces = fields.boolean("with_pieces", false);
  for (const char* name : {"return_token_strs", "with_pieces"}) check_shown_tokens(fields, name, lists);
  if (fields.ok() && lists.empty()) fields.fail("prompt", "is an empty list");
  if (!fields.ok()) return error_response(fields.error(), fields.param());
  const json* const prompt = fields.find("prompt");
  const bool is_list = prompt != nullptr && prompt->is_array();
  const auto shown_id = [&](int32_t id) {
    return shows_pieces ? json{{"id", id}, {"piece", piece(engine.token_bytes(id))}} : json(id);
  };
  json counts = json::array(), strings;
  for (const std::vector<int32_t>& ids : lists) counts.push_back(ids.size());
  if (shows_strings)
    strings = print_lists(lists, is_list, [&](int32_t id) { return token_text(engine.token_bytes(id)); });
  return json_response({{"tokens", print_lists(lists, is_list, shown_id)},
                        {"count", is_list ? counts : counts.front()},
                        {"max_model_len", engine.info().context_length},
                        {"token_strs", std::move(strings)}});
}

HttpResponse detokenize_response(const RouteContext& context, const HttpRequest& request) {
  const Result<json> body = parse_json(request.body);
  if (!body.ok()) return error_response(body.status());
  Fields fields(*body);
  check_model(context.engine.info(), context.config, fields);
  const bool skip = fields.boolean("skip_special_tokens", true);
  const std::string name = only_field(fields, {"tokens", "ids", "prompt"});
  Prompts prompts;
  if (fields.ok() && *fields.find(name) == json::array())
    prompts.ids.emplace_back();
  else if (fields.ok())
    prompts = read_prompts(context.engine, fields, name, PromptKind::kIds);
  json texts = json::array();
  for (const std::vector<int32_t>& ids : prompts.ids) {
    if (!fields.ok()) break;
    const Result<std::string> text = context.engine.detokenize(ids, skip);
    if (text.ok())
      texts.push_back(*text);
    else
      fields.fail(name, text.status());
  }
  if (!fields.ok()) return error_response(fields.error(), fields.param());
  const json text = prompts.is_list ? std::move(texts) : std::move(texts.front());
  return json_response({{"text", text}, {"prompt", text}, {"content", text}});
}

HttpResponse apply_template_response(const RouteContext& context, const HttpRequest& request) {
  const Result<json> body = parse_json(request.body);
  if (!body.ok()) return error_response(body.status());
  Fields fields(*body);
  check_model(context.engine.info(), context.config, fields);
  const ChatInput input = read_chat_input(context.engine, fields);
  const ChatPrompt prompt = fields.ok() ? render_chat(context.engine, fields, input) : ChatPrompt();
  if (!fields.ok()) return error_response(fields.error(), fields.param());
  return json_response({{"prompt", without_marks(prompt.text, input.messages.mark)}});
}

}  // namespace fp4moe
