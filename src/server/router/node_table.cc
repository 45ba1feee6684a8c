#include "server/router/node_table.h"

#include <utility>

namespace fp4moe {

NodeLease::NodeLease(NodeLease&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)), index_(other.index_) {}

NodeLease& NodeLease::operator=(NodeLease&& other) noexcept {
  std::swap(table_, other.table_);
  std::swap(index_, other.index_);
  return *this;
}

void NodeLease::count_request() {
  if (table_ != nullptr) table_->count_request(index_);
}

void NodeLease::release(bool failed) {
  if (NodeTable* const table = std::exchange(table_, nullptr)) table->release(index_, failed);
}

Status NodeTable::add(const RouterConfig& config) {
  for (const auto& [url, port] : config.prefill)
    if (Status status = add_node("prefill", url, port); !status.ok()) return status;
  for (const std::string& url : config.decode)
    if (Status status = add_node("decode", url, 0); !status.ok()) return status;
  if (config.prefill.empty() || config.decode.empty())
    return invalid_argument(
        std::to_string(config.prefill.size()) + " prefill nodes and " + std::to_string(config.decode.size()) +
        " decode nodes; a router needs at least one of each (--prefill URL --decode URL)");
  return {};
}

Status NodeTable::add_node(const std::string& role, const std::string& url, int bootstrap_port) {
  auto parsed = parse_server_url(url);
  if (!parsed.ok()) return parsed.status().with_context("--" + role);
  if (bootstrap_port < 0 || bootstrap_port > 65535)
    return invalid_argument("--prefill " + url + ": bootstrap port " + std::to_string(bootstrap_port) +
                            " is outside the range 1 to 65535");
  nodes_.push_back({.name = parsed->text(),
                    .url = *parsed,
                    .role = role,
                    .knows_port = bootstrap_port > 0,
                    .bootstrap_port = bootstrap_port});
  return {};
}

RouterNode NodeTable::node(size_t index) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return nodes_.at(index);
}

NodeLease NodeTable::acquire(const std::string& role, const std::set<size_t>& tried) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t none = nodes_.size();
  size_t best = none;
  for (size_t i = 1; i <= nodes_.size(); ++i) {
    const size_t index = (last_[role] + i) % nodes_.size();
    const RouterNode& node = nodes_[index];
    if (node.role != role || !node.is_up || tried.count(index) > 0) continue;
    if (best == none || node.num_running < nodes_[best].num_running) best = index;
  }
  if (best == none) return {};
  last_[role] = best;
  ++nodes_[best].num_running;
  return {*this, best};
}

void NodeTable::count_request(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++nodes_.at(index).num_requests;
}

void NodeTable::release(size_t index, bool failed) {
  std::lock_guard<std::mutex> lock(mutex_);
  RouterNode& node = nodes_.at(index);
  --node.num_running;
  node.num_failed += failed ? 1 : 0;
}

bool NodeTable::set_up(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  RouterNode& node = nodes_.at(index);
  node.problem.clear();
  return !std::exchange(node.is_up, true);
}

bool NodeTable::set_down(size_t index, const std::string& problem) {
  std::lock_guard<std::mutex> lock(mutex_);
  RouterNode& node = nodes_.at(index);
  node.is_up = false;
  return std::exchange(node.problem, problem) != problem;
}

void NodeTable::set_bootstrap_port(size_t index, int port) {
  std::lock_guard<std::mutex> lock(mutex_);
  RouterNode& node = nodes_.at(index);
  if (!node.knows_port) node.bootstrap_port = port;
}

bool NodeTable::has(const std::string& role) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const RouterNode& node : nodes_)
    if (node.role == role && node.is_up) return true;
  return false;
}

std::string NodeTable::problems(const std::string& role) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const RouterNode& node : nodes_) {
    if (node.role != role) continue;
    text += (text.empty() ? "no " + role + " node is up: " : ", ") + node.name;
    if (!node.problem.empty()) text += " (" + node.problem + ")";
  }
  return text;
}

json NodeTable::list() const {
  std::lock_guard<std::mutex> lock(mutex_);
  json list = json::array();
  for (const RouterNode& node : nodes_) {
    json entry = {{"url", node.name},
                  {"role", node.role},
                  {"is_up", node.is_up},
                  {"problem", node.problem},
                  {"num_running_reqs", node.num_running},
                  {"num_requests", node.num_requests},
                  {"num_failed_requests", node.num_failed}};
    if (node.role == "prefill") entry["bootstrap_port"] = node.bootstrap_port;
    list.push_back(std::move(entry));
  }
  return list;
}

std::string NodeTable::print_metrics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const struct {
    const char *name, *type, *help;
    int64_t (*value)(const RouterNode&);
  } samples[] = {
      {"node_up", "gauge", "Whether the node is up (1) or down (0).",
       [](const RouterNode& n) { return int64_t{n.is_up}; }},
      {"node_running_reqs", "gauge", "Requests running on the node.",
       [](const RouterNode& n) { return n.num_running; }},
      {"node_requests_total", "counter", "Requests sent to the node.",
       [](const RouterNode& n) { return n.num_requests; }},
      {"node_failed_requests_total", "counter", "Requests to the decode node that failed.",
       [](const RouterNode& n) { return n.num_failed; }},
  };
  std::string text;
  for (const auto& sample : samples) {
    const std::string name = std::string("fp4moe_router_") + sample.name;
    text += "# HELP " + name + " " + sample.help + "\n# TYPE " + name + " " + sample.type + "\n";
    for (const RouterNode& node : nodes_)
      text += name + "{role=\"" + node.role + "\",url=\"" + node.name + "\"} " +
              std::to_string(sample.value(node)) + "\n";
  }
  return text;
}

}  // namespace fp4moe
