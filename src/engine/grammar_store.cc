#include "engine/grammar_store.h"

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;
using GrammarResult = Result<std::shared_ptr<const Grammar>>;

GrammarTicket ready_ticket(GrammarResult result) {
  std::promise<GrammarResult> promise;
  promise.set_value(std::move(result));
  return promise.get_future().share();
}

std::string key_of(const GrammarSpec& spec) {
  return std::to_string(static_cast<int>(spec.kind)) + ":" + spec.text;
}

// Compiled grammars by their text, the one used last in front.
class GrammarCache {
 public:
  explicit GrammarCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  std::shared_ptr<const Grammar> find(const std::string& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return entries_.front().grammar;
  }

  void add(const std::string& key, std::shared_ptr<const Grammar> grammar) {
    if (by_key_.contains(key)) return;
    const int64_t num_bytes = grammar->num_bytes() + static_cast<int64_t>(key.size());
    entries_.push_front({key, std::move(grammar), num_bytes});
    by_key_[key] = entries_.begin();
    num_bytes_ += num_bytes;
    while (num_bytes_ > max_bytes_) {
      num_bytes_ -= entries_.back().num_bytes;
      by_key_.erase(entries_.back().key);
      entries_.pop_back();
    }
  }

 private:
  struct Entry {
    std::string key;
    std::shared_ptr<const Grammar> grammar;
    int64_t num_bytes = 0;
  };
  const int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  std::list<Entry> entries_;
  std::map<std::string, std::list<Entry>::iterator> by_key_;
};

struct Job {
  std::string key;
  GrammarSpec spec;
  std::promise<GrammarResult> promise;
  GrammarTicket ticket = promise.get_future().share();
  Clock::time_point deadline;
  bool is_answered = false;
};

}  // namespace

bool is_ready(const GrammarTicket& ticket) {
  return ticket.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// Shared with the threads that compile: overdue ones may outlive the store.
struct GrammarStore::State {
  State(std::unique_ptr<GrammarCompiler> a_compiler, const GrammarLimits& a_limits,
        std::function<void()> a_on_ready)
      : compiler(std::move(a_compiler)),
        limits(a_limits),
        on_ready(std::move(a_on_ready)),
        cache(a_limits.max_cache_bytes) {}

  void manage();
  void start(std::shared_ptr<Job> job);
  void answer(Job& job, GrammarResult result);
  void take(const std::shared_ptr<Job>& job, GrammarResult result);

  const std::unique_ptr<GrammarCompiler> compiler;
  const GrammarLimits limits;
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> on_ready;  // empty once the store is gone
  GrammarCache cache;
  std::map<std::string, std::shared_ptr<Job>> jobs;  // by key: waiting, compiling and in time
  std::deque<std::shared_ptr<Job>> waiting;
  std::vector<std::shared_ptr<Job>> compiling;  // in time
  int num_overdue = 0;
  bool stopping = false;
  std::shared_ptr<State> self;  // until the store is gone
  std::thread manager;          // starts compilations and watches their time
};

void GrammarStore::State::answer(Job& job, GrammarResult result) {
  if (std::exchange(job.is_answered, true)) return;
  jobs.erase(job.key);
  job.promise.set_value(std::move(result));
  if (on_ready) on_ready();
}

void GrammarStore::State::manage() {
  std::unique_lock lock(mutex);
  while (!stopping) {
    const auto now = Clock::now();
    auto next = Clock::time_point::max();
    std::erase_if(compiling, [&](const auto& job) {
      if (now < job->deadline) {
        next = std::min(next, job->deadline);
        return false;
      }
      const std::chrono::duration<double> seconds = limits.timeout;
      answer(*job, Status(StatusCode::kDeadline, "the grammar was not compiled within " +
                                                     std::to_string(seconds.count()).substr(0, 5) + " s"));
      ++num_overdue;
      return true;
    });
    while (!waiting.empty() && num_overdue >= limits.max_overdue) {
      answer(*waiting.front(), unavailable("no grammar is compiled now: " + std::to_string(num_overdue) +
                                           " take longer than they may and are still at it"));
      waiting.pop_front();
    }
    while (!waiting.empty() && std::ssize(compiling) < limits.max_compiling) {
      const std::shared_ptr<Job> job = waiting.front();
      waiting.pop_front();
      job->deadline = now + limits.timeout;
      next = std::min(next, job->deadline);
      compiling.push_back(job);
      start(job);
    }
    if (next == Clock::time_point::max())
      changed.wait(lock);
    else
      changed.wait_until(lock, next);
  }
}

void GrammarStore::State::start(std::shared_ptr<Job> job) {
  try {
    std::thread([state = self, job] {
      GrammarResult result = internal_error("no grammar");
      try {
        result = state->compiler->compile(job->spec);
      } catch (const std::exception& error) {  // out of memory
        result = unavailable(std::string("the grammar's compilation: ") + error.what());
      }
      state->take(job, std::move(result));
    }).detach();
  } catch (const std::exception& error) {
    std::erase(compiling, job);
    answer(*job, unavailable(std::string("no thread to compile a grammar: ") + error.what()));
  }
}

// From the compilation's thread.
void GrammarStore::State::take(const std::shared_ptr<Job>& job, GrammarResult result) {
  std::lock_guard lock(mutex);
  if (result.ok() && (*result)->num_bytes() > limits.max_grammar_bytes)
    result = invalid_argument("the compiled grammar takes " + std::to_string((*result)->num_bytes()) +
                              " bytes; at most " + std::to_string(limits.max_grammar_bytes) + " are allowed");
  if (result.ok()) cache.add(job->key, *result);
  if (job->is_answered)
    --num_overdue;
  else
    std::erase(compiling, job);
  answer(*job, std::move(result));
  changed.notify_all();
}

GrammarStore::GrammarStore(std::unique_ptr<GrammarCompiler> compiler, const GrammarLimits& limits,
                           std::function<void()> on_ready)
    : state_(std::make_shared<State>(std::move(compiler), limits, std::move(on_ready))) {
  state_->self = state_;
  state_->manager = std::thread([state = state_.get()] { state->manage(); });
}

GrammarStore::~GrammarStore() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->on_ready = nullptr;
    state_->changed.notify_all();
  }
  state_->manager.join();
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, state_->limits.timeout, [this] { return state_->compiling.empty(); });
  state_->changed.wait_for(lock, std::chrono::seconds(1), [this] { return state_->num_overdue == 0; });
  state_->self.reset();
}

GrammarTicket GrammarStore::ask(const GrammarSpec& spec) {
  if (const auto size = static_cast<int64_t>(spec.text.size()); size > state_->limits.max_text_bytes)
    return ready_ticket(invalid_argument("a grammar of " + std::to_string(size) + " bytes; at most " +
                                         std::to_string(state_->limits.max_text_bytes) + " are allowed"));
  std::string key = key_of(spec);
  std::lock_guard lock(state_->mutex);
  if (auto grammar = state_->cache.find(key)) return ready_ticket(std::move(grammar));
  if (const auto job = state_->jobs.find(key); job != state_->jobs.end()) return job->second->ticket;
  if (std::ssize(state_->waiting) >= state_->limits.max_waiting)
    return ready_ticket(unavailable(std::to_string(state_->waiting.size()) +
                                    " grammars wait to be compiled; more are not taken"));
  auto job = std::make_shared<Job>();
  job->key = key;
  job->spec = spec;
  state_->jobs[std::move(key)] = job;
  state_->waiting.push_back(job);
  state_->changed.notify_all();
  return job->ticket;
}

}  // namespace fp4moe
