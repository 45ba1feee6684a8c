// NodeTable: the nodes behind a router, which of them answer, and who gets the next request.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fp4moe/router.h"
#include "server/json.h"
#include "server/server_url.h"

namespace fp4moe {

struct RouterNode {
  std::string name;  // its URL
  ServerUrl url;
  std::string role;  // "prefill", "decode"
  bool knows_port = false;
  int bootstrap_port = 0;  // of a prefill node

  bool is_up = false;
  std::string problem = "not asked yet";  // why it is not up
  int64_t num_running = 0;                // requests that it has now
  int64_t num_requests = 0, num_failed = 0;
};

class NodeTable;

// One request that a node has, until it is destroyed.
class NodeLease {
 public:
  NodeLease() = default;  // of no node
  NodeLease(NodeTable& table, size_t index) : table_(&table), index_(index) {}
  ~NodeLease() { release(); }
  NodeLease(NodeLease&& other) noexcept;
  NodeLease& operator=(NodeLease&& other) noexcept;

  explicit operator bool() const { return table_ != nullptr; }
  size_t index() const { return index_; }
  void release(bool failed = false);

 private:
  NodeTable* table_ = nullptr;
  size_t index_ = 0;
};

// Thread-safe. Nodes are named by their place in the table, which never changes; any other place is refused
// by std::out_of_range.
class NodeTable {
 public:
  Status add(const RouterConfig& config);
  size_t size() const { return nodes_.size(); }
  RouterNode node(size_t index) const;

  // The node of this role that is up and has the fewest requests, the one after the last chosen if several
  // have; not one of `tried`. It has one more until the lease ends. A lease of no node: there is none.
  NodeLease acquire(const std::string& role, const std::set<size_t>& tried = {});
  // Which changes are news: true.
  bool set_up(size_t index);
  bool set_down(size_t index, const std::string& problem);
  void set_bootstrap_port(size_t index, int port);

  bool has(const std::string& role) const;              // one is up
  std::string problems(const std::string& role) const;  // "no decode node is up: URL (why), ..."
  json list() const;
  std::string print_metrics() const;

 private:
  friend class NodeLease;
  void release(size_t index, bool failed);
  Status add_node(const std::string& role, const std::string& url, int bootstrap_port);

  mutable std::mutex mutex_;
  std::vector<RouterNode> nodes_;
  std::map<std::string, size_t> last_;  // chosen, by role
};

}  // namespace fp4moe
