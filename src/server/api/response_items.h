// The items of /v1/responses: reading those of a request, and translating items to chat messages.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "server/api/response_store.h"
#include "server/json.h"

namespace fp4moe {

// The error for an id that the store does not have.
Status no_such_response(const std::string& id);

// A request's access to the stored responses.
struct ResponseAccess {
  ResponseStore& store;
  std::string owner;  // of the responses that the request may read, and of the one that it stores
  std::function<bool(int64_t bytes)> hold;  // HttpExchange::hold

  // Charges the memory of stored items to the request. False, with an error of field `name`: it does not fit.
  bool hold_bytes(int64_t bytes, Fields& fields, const std::string& name) const;
  bool hold_json(const std::string& text, Fields& fields, const std::string& name) const;
};

// Reads "input" as items in the form in which they are stored and listed: complete, each with an id, and with
// references replaced by the items that they name. More than `context_length` items are refused.
std::vector<json> read_items(const ResponseAccess& access, Fields& fields, int64_t context_length);

// Collects items as chat messages.
class ItemMessages {
 public:
  // `splits_calls`: an assistant's text and calls become two messages instead of one.
  explicit ItemMessages(bool splits_calls) : splits_calls_(splits_calls) {}

  // Texts before the first message of another role make one system message.
  void add_system(const std::string& text);
  // `item` is in the form of read_items() or of a response's output.
  void add(const json& item);
  bool has_call(const std::string& call_id) const { return call_ids_.contains(call_id); }
  json take() { return std::move(messages_); }

 private:
  void add_message(const json& item);
  void add_call(const json& item);
  json assistant(json content);

  const bool splits_calls_;
  json messages_ = json::array();
  std::string reasoning_;  // of the assistant's next message
  std::set<std::string> call_ids_;
};

}  // namespace fp4moe
