// NodeTable: the nodes behind a router and their health; selects the node for the next request.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fp4moe/router.h"
#include "server/http/server_url.h"
#include "server/json.h"

namespace fp4moe {

struct RouterNode {
  std::string name;  // its URL
  ServerUrl url;
  std::string role;         // "prefill", "decode"
  bool knows_port = false;  // bootstrap_port comes from the configuration
  int bootstrap_port = 0;   // 0: none, or not known yet

  bool is_up = false;
  std::string problem = "not checked yet";  // why the node is down
  int64_t num_running = 0;                  // current number of leases
  // Requests sent to it. The router sends none to a prefill node itself: there, requests that name it to a
  // decode node, and no failures, which are the decode node's to report.
  int64_t num_requests = 0, num_failed = 0;
};

class NodeTable;

// One request assigned to a node, until release() or destruction.
class NodeLease {
 public:
  NodeLease() = default;  // empty
  NodeLease(NodeTable& table, size_t index) : table_(&table), index_(index) {}
  ~NodeLease() { release(); }
  NodeLease(NodeLease&& other) noexcept;
  NodeLease& operator=(NodeLease&& other) noexcept;

  explicit operator bool() const { return table_ != nullptr; }
  size_t index() const { return index_; }
  void count_request();  // the request is sent to the node
  void release(bool failed = false);

 private:
  NodeTable* table_ = nullptr;
  size_t index_ = 0;
};

// Thread-safe. Nodes are identified by their index in the table, which never changes; an invalid index throws
// std::out_of_range.
class NodeTable {
 public:
  Status add(const RouterConfig& config);
  size_t size() const { return nodes_.size(); }
  RouterNode node(size_t index) const;

  // Leases the node of this role that is up, not in `tried`, and has the fewest requests; ties are resolved
  // round-robin. The lease is empty if there is no such node.
  NodeLease acquire(const std::string& role, const std::set<size_t>& tried = {});
  // Return whether to log the change: set_up() if the node was down, set_down() if the problem is a new one.
  bool set_up(size_t index);
  bool set_down(size_t index, const std::string& problem);
  void set_bootstrap_port(size_t index, int port);

  bool has(const std::string& role) const;              // whether a node of this role is up
  std::string problems(const std::string& role) const;  // "no decode node is up: URL (why), ..."
  json list() const;
  std::string print_metrics() const;

 private:
  friend class NodeLease;
  void count_request(size_t index);
  void release(size_t index, bool failed);
  Status add_node(const std::string& role, const std::string& url, int bootstrap_port);

  mutable std::mutex mutex_;
  std::vector<RouterNode> nodes_;
  std::map<std::string, size_t> last_;  // last chosen node, by role
};

}  // namespace fp4moe
