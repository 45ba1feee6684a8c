// The stored responses of /v1/responses, in memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace fp4moe {

constexpr const char* kResponseIdPrefix = "resp_";

// An input or output item of a response.
struct StoredItem {
  std::string id;
  std::string text;  // JSON, including the id
};

// The input and output of one response. Immutable once it is shared. The responses that continue it share it,
// so a conversation of n turns takes the memory of n turns.
class Turn {
 public:
  // `parsed_bytes`: an upper bound on the memory of the parsed JSON of the items.
  Turn(std::shared_ptr<const Turn> previous, std::vector<StoredItem> input, std::vector<StoredItem> output,
       int64_t parsed_bytes);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  const std::vector<StoredItem>& input() const { return input_; }
  const std::vector<StoredItem>& output() const { return output_; }
  // All turns of the conversation, oldest first, ending with this one.
  std::vector<const Turn*> conversation() const;
  int64_t bytes() const { return bytes_; }                             // held by this turn alone
  int64_t conversation_bytes() const { return conversation_bytes_; }   // with those before it
  int64_t conversation_parsed_bytes() const { return parsed_bytes_; }  // with those before it

 private:
  friend class ResponseStore;
  mutable std::shared_ptr<const Turn> previous_;  // changed by destructors only
  const std::vector<StoredItem> input_, output_;
  int64_t bytes_ = 0, conversation_bytes_ = 0, parsed_bytes_ = 0;
  // The total of the store that has counted this turn; null: none has.
  mutable std::shared_ptr<std::atomic<int64_t>> total_;
};

struct StoredResponse {
  std::string id;
  std::string owner;  // a client reads only its own responses
  std::string head;   // the response object's JSON without "output"
  std::shared_ptr<const Turn> turn;
};

// Thread-safe. Evicts the least recently used responses when their memory exceeds the limit. A turn is freed
// when neither a stored response nor a running request continues it.
class ResponseStore {
 public:
  static constexpr size_t kMaxResponses = 65536;

  // max_bytes 0: stores nothing.
  explicit ResponseStore(int64_t max_bytes, size_t max_responses = kMaxResponses)
      : max_bytes_(max_bytes), max_responses_(max_responses) {}

  bool is_on() const { return max_bytes_ > 0; }
  // Returns false, and stores nothing, if the response's conversation alone exceeds the limit.
  bool put(StoredResponse response);
  std::shared_ptr<const StoredResponse> find(const std::string& owner, const std::string& id);
  // The JSON of an item of a stored response.
  std::optional<std::string> find_item(const std::string& owner, const std::string& item_id);
  bool remove(const std::string& owner, const std::string& id);
  int64_t bytes() const;
  size_t size() const;

 private:
  using Order = std::list<std::shared_ptr<const StoredResponse>>;  // most recently used first
  struct ItemPlace {
    Order::iterator response;
    const StoredItem* item;
  };

  int64_t bytes_locked() const { return num_bytes_ + turn_bytes_->load(); }
  void remove_locked(Order::iterator at);
  static std::string key(const std::string& owner, const std::string& id) { return owner + '\n' + id; }

  const int64_t max_bytes_;
  const size_t max_responses_;
  mutable std::mutex mutex_;
  Order order_;
  // Keys: key(owner, id).
  std::unordered_map<std::string, Order::iterator> responses_;
  std::unordered_map<std::string, ItemPlace> items_;
  int64_t num_bytes_ = 0;  // without the turns
  const std::shared_ptr<std::atomic<int64_t>> turn_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace fp4moe
