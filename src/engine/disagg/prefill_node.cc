#include "engine/disagg/prefill_node.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/guarded.h"
#include "engine/disagg/prefill_connection.h"

namespace fp4moe {

PrefillNode::PrefillNode(StepLoop& loop, KvHello hello, NodeLinkOptions options)
    : loop_(loop), options_(std::move(options)), hello_(std::move(hello)) {}

Result<std::unique_ptr<PrefillNode>> PrefillNode::make(StepLoop& loop, KvHello hello, const std::string& host,
                                                       int port, NodeLinkOptions options) {
  std::unique_ptr<PrefillNode> node(new PrefillNode(loop, std::move(hello), std::move(options)));
  FP4MOE_RETURN_IF_ERROR(node->listener_.listen(host, port).with_context("disaggregation bootstrap port"));
  FP4MOE_RETURN_IF_ERROR(guarded([&]() -> Status {
    node->thread_ = std::thread([raw = node.get()] { raw->accept(); });
    return {};
  }));
  return node;
}

PrefillNode::~PrefillNode() {
  listener_.shut_down();
  if (thread_.joinable()) thread_.join();
  for (const auto& connection : connections_) connection->shut_down();
  for (const auto& connection : connections_) connection->join();
}

void PrefillNode::accept() noexcept {
  for (;;) {
    const KvListener::Accepted accepted = listener_.accept();
    if (accepted.event == KvListener::Event::kEnded) return;
    const Status status = guarded([&]() -> Status {
      reap();
      if (accepted.event == KvListener::Event::kNoDescriptors) {
        end_oldest_greeting();
        return unavailable("no file descriptor is left (ulimit -n)");
      }
      if (accepted.event == KvListener::Event::kConnection) add(accepted.descriptor);
      return {};
    });
    if (accepted.event == KvListener::Event::kConnection) wait_to_accept();
    if (status.ok()) continue;
    static_cast<void>(guarded([&]() -> Status {
      log(LogLevel::kWarning, "a connection from a decode node was closed: " + status.message());
      return {};
    }));
  }
}

// Limits the CPU time that a flood of strangers takes from the model, and gives each connection time for its
// hello.
void PrefillNode::wait_to_accept() {
  const auto now = Connection::Clock::now();
  accepts_from_ = std::max(accepts_from_, now - kAcceptBurst * kAcceptInterval) + kAcceptInterval;
  std::this_thread::sleep_until(accepts_from_);
}

// Throws if there is no memory or no thread; the connection is then closed.
void PrefillNode::add(int descriptor) {
  std::unique_ptr<KvSocket> socket;
  try {
    socket = std::make_unique<KvSocket>(
        descriptor, KvSocketOptions{.timeout_seconds = options_.timeout_seconds, .budget = budget_});
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  if (num_greeting() >= kMaxGreeting) end_oldest_greeting();
  const auto connection = std::make_shared<Connection>(*this, std::move(socket));
  std::lock_guard lock(mutex_);
  // Ending connections count here too, which bounds the number of threads.
  if (connections_.size() >= static_cast<size_t>(options_.max_connections) + 2 * kMaxGreeting)
    throw std::system_error(EAGAIN, std::generic_category(), "earlier connections are still closing");
  connections_.reserve(connections_.size() + 1);
  connection->start();
  connections_.push_back(connection);
}

// Removes connections whose threads have ended, which frees their descriptors.
void PrefillNode::reap() {
  std::lock_guard lock(mutex_);
  std::erase_if(connections_, [this](const auto& c) {
    if (c->state() != Connection::State::kEnded) return false;
    c->join();
    return true;
  });
}

size_t PrefillNode::num_greeting() const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::ranges::count(connections_, Connection::State::kGreeting,
                                                [](const auto& c) { return c->state(); }));
}

// Keeps the port usable under a flood: a decode node's hello takes two round trips, while a stranger stays in
// its hello until its connection is ended.
void PrefillNode::end_oldest_greeting() {
  std::lock_guard lock(mutex_);
  const auto oldest =
      std::ranges::find(connections_, Connection::State::kGreeting, [](const auto& c) { return c->state(); });
  if (oldest != connections_.end()) (*oldest)->shut_down();
}

void PrefillNode::set_hello(KvHello hello, const Status& reason) {
  std::lock_guard lock(mutex_);
  hello_ = std::move(hello);
  ++num_hellos_;
  for (const auto& connection : connections_) connection->end(reason);
}

// Copies the present facts to `hello`; returns their number for admit().
uint64_t PrefillNode::hello_of_connection(KvHello& hello) const {
  std::lock_guard lock(mutex_);
  hello.facts = hello_.facts;
  return num_hellos_;
}

// Called on the connection's thread after its hello, the one with number `num_hellos`.
Status PrefillNode::admit(Connection& connection, uint64_t num_hellos) {
  std::lock_guard lock(mutex_);
  if (num_hellos != num_hellos_) return unavailable("this prefill node has updated its weights meanwhile");
  const auto is_open = [](const auto& c) { return c->state() == Connection::State::kOpen; };
  if (std::ranges::count_if(connections_, is_open) >= options_.max_connections) {
    Connection* idlest = nullptr;
    auto since = Connection::Clock::time_point::max();
    for (const auto& c : connections_)
      if (const auto its = c->idle_since(); is_open(c) && its < since) {
        idlest = c.get();
        since = its;
      }
    if (idlest == nullptr)
      return unavailable("this prefill node has " + std::to_string(options_.max_connections) +
                         " connections with requests (--disaggregation-max-connections)");
    idlest->shut_down();
  }
  return connection.open() ? Status() : unavailable("too many connections are exchanging their hello");
}

int PrefillNode::num_connections() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(std::ranges::count_if(
      connections_, [](const auto& c) { return c->state() != Connection::State::kEnded; }));
}

}  // namespace fp4moe
