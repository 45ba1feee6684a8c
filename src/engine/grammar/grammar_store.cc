#include "engine/grammar/grammar_store.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_cpu.h"
#include "engine/grammar/grammar_cache.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// A compilation takes seconds for a large vocabulary. At this nice value it gets a seventh of a core when the
// engine's threads use all cores.
constexpr int kCompileNice = 8;

std::string key_of(const GrammarSpec& spec) {
  return std::to_string(static_cast<int>(spec.kind)) + ":" + spec.text;
}

// One compilation: queued, running or ended.
struct Job {
  std::string key;
  GrammarSpec spec;
  std::vector<std::string> clients;  // clients whose queues hold the job
  std::weak_ptr<GrammarTicket::Wait> wait;
  std::promise<GrammarResult> promise;
  std::shared_future<GrammarResult> result = promise.get_future().share();
  std::atomic<bool> is_cancelled{false};
  bool is_delivered = false;
  // Set while it runs.
  std::string client;  // the client whose turn the job used
  Clock::time_point deadline;
  std::thread thread;
};
using JobPtr = std::shared_ptr<Job>;

int64_t text_bytes(const Job& job) { return static_cast<int64_t>(job.spec.text.size()); }

}  // namespace

// Shared by the tickets of one compilation.
struct GrammarTicket::Wait {
  explicit Wait(std::shared_future<GrammarResult> a_result) : result(std::move(a_result)) {}
  std::shared_future<GrammarResult> result;
  std::function<void()> abandon;
  ~Wait() {
    if (abandon) abandon();
  }
};

bool GrammarTicket::is_ready() const {
  return wait_->result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

const GrammarResult& GrammarTicket::get() const { return wait_->result.get(); }

namespace {

GrammarTicket ready_ticket(GrammarResult result) {
  std::promise<GrammarResult> promise;
  promise.set_value(std::move(result));
  return GrammarTicket(std::make_shared<GrammarTicket::Wait>(promise.get_future().share()));
}

// Queued jobs by client. A job that several clients wait for is in the queue of each, and runs at the first
// client's turn.
class JobQueue {
 public:
  explicit JobQueue(const GrammarLimits& limits) : limits_(limits) {}

  // Returns OK, or the reason why the client's job is refused.
  Status check_room(const std::string& client, int64_t num_bytes) const {
    const auto own = clients_.find(client);
    const int64_t number = own == clients_.end() ? 0 : std::ssize(own->second.jobs);
    const int64_t bytes = own == clients_.end() ? 0 : own->second.waiting_bytes;
    if (number >= limits_.max_waiting_of_client || bytes + num_bytes > limits_.max_waiting_bytes_of_client)
      return refuse("of this client", number, bytes);
    if (num_waiting_ >= limits_.max_waiting || waiting_bytes_ + num_bytes > limits_.max_waiting_bytes)
      return refuse("in total", num_waiting_, waiting_bytes_);
    return {};
  }

  void add(const JobPtr& job, const std::string& client) {
    if (std::ranges::find(job->clients, client) != job->clients.end()) return;
    job->clients.push_back(client);
    Client& own = clients_[client];
    if (own.jobs.empty()) turns_.push_back(client);
    own.jobs.push_back(job);
    own.waiting_bytes += text_bytes(*job);
    ++num_waiting_;
    waiting_bytes_ += text_bytes(*job);
  }

  // Removes the job from all queues.
  void remove(const JobPtr& job) {
    for (const std::string& client : std::exchange(job->clients, {})) {
      Client& own = clients_[client];
      std::erase(own.jobs, job);
      own.waiting_bytes -= text_bytes(*job);
      --num_waiting_;
      waiting_bytes_ -= text_bytes(*job);
      if (!own.jobs.empty()) continue;
      std::erase(turns_, client);
      if (own.num_compiling == 0) clients_.erase(client);
    }
  }

  // Dequeues the next job whose client may compile; that client moves to the end of the turn order. Returns
  // null if no client may.
  JobPtr take_next() {
    const auto may_run = [&](const std::string& client) {
      return clients_[client].num_compiling < limits_.max_compiling_of_client;
    };
    const auto turn = std::ranges::find_if(turns_, may_run);
    if (turn == turns_.end()) return nullptr;
    const std::string client = *turn;
    Client& own = clients_[client];
    const JobPtr job = own.jobs.front();
    ++own.num_compiling;
    turns_.erase(turn);
    if (own.jobs.size() > 1) turns_.push_back(client);
    remove(job);
    job->client = client;
    return job;
  }

  void end(const Job& job) {
    Client& own = clients_[job.client];
    --own.num_compiling;
    if (own.num_compiling == 0 && own.jobs.empty()) clients_.erase(job.client);
  }

  std::vector<JobPtr> all() const {
    std::vector<JobPtr> jobs;
    for (const auto& [name, client] : clients_)
      jobs.insert(jobs.end(), client.jobs.begin(), client.jobs.end());
    return jobs;
  }

 private:
  struct Client {
    std::deque<JobPtr> jobs;
    int64_t waiting_bytes = 0;  // of jobs
    int num_compiling = 0;
  };
  static Status refuse(const char* whose, int64_t number, int64_t bytes) {
    return unavailable(std::to_string(number) + " grammars " + whose + " are waiting to be compiled (" +
                       std::to_string(bytes) + " bytes); no more are accepted");
  }

  const GrammarLimits& limits_;
  std::map<std::string, Client> clients_;
  std::deque<std::string> turns_;  // the clients that have jobs
  int64_t num_waiting_ = 0, waiting_bytes_ = 0;
};

}  // namespace

// Shared with the tickets, which may outlive the store.
struct GrammarStore::State {
  State(std::unique_ptr<GrammarCompiler> a_compiler, const GrammarLimits& a_limits,
        std::function<void()> a_on_ready)
      : compiler(std::move(a_compiler)),
        limits(a_limits),
        on_ready(std::move(a_on_ready)),
        cache(a_limits.max_cache_bytes),
        failures(a_limits.failure_time, a_limits.max_failures, a_limits.max_failure_bytes),
        waiting(limits) {}

  void manage();
  Clock::time_point watch(Clock::time_point now);
  void start(const JobPtr& job, Clock::time_point now);
  void compile(const JobPtr& job);
  void take(const JobPtr& job, GrammarResult result);
  void deliver(Job& job, GrammarResult result);
  void abandon(const JobPtr& job);
  void stop();

  const std::unique_ptr<GrammarCompiler> compiler;
  const GrammarLimits limits;
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> on_ready;
  GrammarCache cache;
  GrammarFailures failures;
  std::map<std::string, JobPtr> jobs;  // by key; not yet delivered
  JobQueue waiting;
  std::vector<JobPtr> compiling;
  std::vector<std::thread> ended;  // threads of ended jobs, to be joined
  bool stopping = false;
  std::thread manager;  // starts compilations and enforces their time limits
};

// ---- the manager's thread -------------------------------------------------------------------------

void GrammarStore::State::manage() {
  std::unique_lock lock(mutex);
  while (!stopping || !compiling.empty() || !ended.empty()) {
    if (!ended.empty()) {
      std::vector<std::thread> threads = std::exchange(ended, {});
      lock.unlock();
      for (std::thread& thread : threads) thread.join();
      lock.lock();
      continue;
    }
    const auto now = Clock::now();
    const auto may_start = [&] { return !stopping && std::ssize(compiling) < limits.max_compiling; };
    while (may_start()) {
      const JobPtr job = waiting.take_next();
      if (job == nullptr) break;
      start(job, now);
    }
    const auto next = watch(now);
    if (next == Clock::time_point::max())
      changed.wait(lock);
    else
      changed.wait_until(lock, next);
  }
}

// Fails compilations that have passed their deadline; returns the time of the next check.
Clock::time_point GrammarStore::State::watch(Clock::time_point now) {
  auto next = Clock::time_point::max();
  for (const JobPtr& job : compiling) {
    if (job->is_delivered) continue;  // cancelled; it ends soon
    if (now >= job->deadline) {
      char text[64];
      std::snprintf(text, sizeof text, "the grammar was not compiled within %g s",
                    Seconds(limits.timeout).count());
      const Status late(StatusCode::kDeadline, text);
      failures.add(job->key, late, now);
      deliver(*job, late);
      job->is_cancelled.store(true);
      continue;
    }
    next = std::min(next, job->deadline);
  }
  return next;
}

void GrammarStore::State::start(const JobPtr& job, Clock::time_point now) {
  job->deadline = now + limits.timeout;
  compiling.push_back(job);
  try {
    job->thread = std::thread([this, job] { compile(job); });
  } catch (const std::exception& error) {
    std::erase(compiling, job);
    waiting.end(*job);
    deliver(*job, unavailable(std::string("cannot start a thread to compile the grammar: ") + error.what()));
  }
}

// ---- a compilation's thread -----------------------------------------------------------------------

void GrammarStore::State::compile(const JobPtr& job) {
  ThreadCpu::current().lower_priority(kCompileNice);
  GrammarResult result = internal_error("no grammar");
  try {
    result = compiler->compile(job->spec, {.max_steps = limits.max_steps,
                                           .max_bytes = limits.max_compile_bytes,
                                           .is_cancelled = &job->is_cancelled});
  } catch (const std::exception& error) {  // out of memory
    result = unavailable(std::string("compiling the grammar failed: ") + error.what());
  }
  if (result.ok() && (*result)->num_bytes() > limits.max_grammar_bytes)
    result = invalid_argument("the compiled grammar takes " + std::to_string((*result)->num_bytes()) +
                              " bytes; at most " + std::to_string(limits.max_grammar_bytes) + " are allowed");
  take(job, std::move(result));
}

void GrammarStore::State::take(const JobPtr& job, GrammarResult result) {
  std::vector<GrammarCache::GrammarPtr> gone;  // freed outside of the lock
  std::lock_guard lock(mutex);
  const auto now = Clock::now();
  if (result.ok()) gone = cache.add(job->key, *result);
  if (result.status().code() == StatusCode::kInvalidArgument) failures.add(job->key, result.status(), now);
  std::erase(compiling, job);
  waiting.end(*job);
  ended.push_back(std::move(job->thread));
  deliver(*job, std::move(result));
  changed.notify_all();
}

// ---- any thread, with the lock --------------------------------------------------------------------

void GrammarStore::State::deliver(Job& job, GrammarResult result) {
  if (std::exchange(job.is_delivered, true)) return;
  if (const auto own = jobs.find(job.key); own != jobs.end() && own->second.get() == &job) jobs.erase(own);
  job.promise.set_value(std::move(result));
  if (on_ready) on_ready();
}

// ---- tickets and requests -------------------------------------------------------------------------

// Called when the last ticket of the job is destroyed.
void GrammarStore::State::abandon(const JobPtr& job) {
  std::lock_guard lock(mutex);
  if (std::exchange(job->is_delivered, true)) return;
  if (const auto own = jobs.find(job->key); own != jobs.end() && own->second == job) jobs.erase(own);
  waiting.remove(job);
  job->is_cancelled.store(true);
}

void GrammarStore::State::stop() {
  {
    std::lock_guard lock(mutex);
    stopping = true;
    on_ready = nullptr;
    for (const JobPtr& job : compiling) job->is_cancelled.store(true);
    for (const JobPtr& job : waiting.all()) {
      waiting.remove(job);
      deliver(*job, unavailable("the engine is stopping"));
    }
    changed.notify_all();
  }
  manager.join();
}

GrammarStore::GrammarStore(std::unique_ptr<GrammarCompiler> compiler, const GrammarLimits& limits,
                           std::function<void()> on_ready)
    : state_(std::make_shared<State>(std::move(compiler), limits, std::move(on_ready))) {
  state_->manager = std::thread([state = state_.get()] { state->manage(); });
}

GrammarStore::~GrammarStore() { state_->stop(); }

GrammarTicket GrammarStore::ask(const GrammarSpec& spec, const std::string& client) {
  State& s = *state_;
  const auto size = static_cast<int64_t>(spec.text.size());
  if (size > s.limits.max_text_bytes)
    return ready_ticket(invalid_argument("the grammar has " + std::to_string(size) + " bytes; at most " +
                                         std::to_string(s.limits.max_text_bytes) + " are allowed"));
  std::string key = key_of(spec);
  std::shared_ptr<GrammarTicket::Wait> wait;
  std::lock_guard lock(s.mutex);
  if (auto grammar = s.cache.find(key)) return ready_ticket(std::move(grammar));
  if (Status failure = s.failures.find(key, Clock::now()); !failure.ok())
    return ready_ticket(std::move(failure));
  const auto same = s.jobs.find(key);
  if (same != s.jobs.end()) wait = same->second->wait.lock();
  if (wait != nullptr && same->second->clients.empty()) return GrammarTicket(std::move(wait));  // running
  if (Status room = s.waiting.check_room(client, size); !room.ok()) return ready_ticket(std::move(room));
  if (wait != nullptr) {
    s.waiting.add(same->second, client);
    return GrammarTicket(std::move(wait));
  }
  const auto job = std::make_shared<Job>();
  job->key = key;
  job->spec = spec;
  wait = std::make_shared<GrammarTicket::Wait>(job->result);
  wait->abandon = [state = std::weak_ptr(state_), job] {
    if (const auto alive = state.lock()) alive->abandon(job);
  };
  job->wait = wait;
  s.jobs[std::move(key)] = job;
  s.waiting.add(job, client);
  s.changed.notify_all();
  return GrammarTicket(std::move(wait));
}

}  // namespace fp4moe
