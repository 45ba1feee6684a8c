#include "server/api/response_store.h"

#include <algorithm>
#include <utility>

namespace fp4moe {

namespace {

constexpr int64_t kTurnBytes = sizeof(Turn) + 64;
// Per stored response and item: the objects, their entries in the maps and the allocator's overhead.
constexpr int64_t kResponseBytes = sizeof(StoredResponse) + 384;
constexpr int64_t kItemBytes = sizeof(StoredItem) + 256;

int64_t item_bytes(const std::vector<StoredItem>& items) {
  int64_t bytes = 0;
  for (const StoredItem& item : items) bytes += kItemBytes + 2 * std::ssize(item.id) + std::ssize(item.text);
  return bytes;
}

int64_t bytes_of(const StoredResponse& response) {
  return kResponseBytes + 2 * std::ssize(response.id) + 2 * std::ssize(response.owner) +
         std::ssize(response.head);
}

}  // namespace

Turn::Turn(std::shared_ptr<const Turn> previous, std::vector<StoredItem> input,
           std::vector<StoredItem> output, int64_t parsed_bytes)
    : previous_(std::move(previous)),
      input_(std::move(input)),
      output_(std::move(output)),
      bytes_(kTurnBytes + item_bytes(input_) + item_bytes(output_)),
      conversation_bytes_(bytes_),
      parsed_bytes_(parsed_bytes) {
  if (previous_ == nullptr) return;
  conversation_bytes_ += previous_->conversation_bytes_;
  parsed_bytes_ += previous_->parsed_bytes_;
}

// Frees a long conversation in a loop: nested destructors would overflow the stack.
Turn::~Turn() {
  if (total_ != nullptr) total_->fetch_sub(bytes_);
  std::shared_ptr<const Turn> last = std::move(previous_);
  while (last != nullptr && last.use_count() == 1) {
    std::shared_ptr<const Turn> before = std::move(last->previous_);
    last = std::move(before);
  }
}

std::vector<const Turn*> Turn::conversation() const {
  std::vector<const Turn*> turns;
  for (const Turn* turn = this; turn != nullptr; turn = turn->previous_.get()) turns.push_back(turn);
  std::reverse(turns.begin(), turns.end());
  return turns;
}

bool ResponseStore::put(StoredResponse response) {
  const int64_t own_bytes = bytes_of(response);
  if (response.turn->conversation_bytes() + own_bytes > max_bytes_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto& turn = response.turn;
  turn->total_ = turn_bytes_;
  turn_bytes_->fetch_add(turn->bytes());
  const std::string id = key(response.owner, response.id);
  order_.push_front(std::make_shared<const StoredResponse>(std::move(response)));
  num_bytes_ += own_bytes;
  const StoredResponse& stored = *order_.front();
  responses_[id] = order_.begin();
  for (const auto* items : {&stored.turn->input(), &stored.turn->output()})
    for (const StoredItem& item : *items) items_[key(stored.owner, item.id)] = {order_.begin(), &item};
  while (order_.size() > max_responses_ || (bytes_locked() > max_bytes_ && !order_.empty()))
    remove_locked(std::prev(order_.end()));
  return true;
}

std::shared_ptr<const StoredResponse> ResponseStore::find(const std::string& owner, const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = responses_.find(key(owner, id));
  if (at == responses_.end()) return nullptr;
  order_.splice(order_.begin(), order_, at->second);
  return order_.front();
}

std::optional<std::string> ResponseStore::find_item(const std::string& owner, const std::string& item_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = items_.find(key(owner, item_id));
  if (at == items_.end()) return std::nullopt;
  order_.splice(order_.begin(), order_, at->second.response);
  return at->second.item->text;
}

bool ResponseStore::remove(const std::string& owner, const std::string& id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = responses_.find(key(owner, id));
  if (at == responses_.end()) return false;
  remove_locked(at->second);
  return true;
}

void ResponseStore::remove_locked(Order::iterator at) {
  const StoredResponse& response = **at;
  responses_.erase(key(response.owner, response.id));
  for (const auto* items : {&response.turn->input(), &response.turn->output()})
    for (const StoredItem& item : *items) {
      const auto entry = items_.find(key(response.owner, item.id));
      if (entry != items_.end() && entry->second.response == at) items_.erase(entry);
    }
  num_bytes_ -= bytes_of(response);
  order_.erase(at);
}

int64_t ResponseStore::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_locked();
}

size_t ResponseStore::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return order_.size();
}

}  // namespace fp4moe
