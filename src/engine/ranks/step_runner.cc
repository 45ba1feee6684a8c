#include "engine/ranks/step_runner.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/guarded.h"
#include "base/log.h"
#include "comm/communicator.h"

namespace fp4moe {
namespace {

constexpr int kStep = 12, kDone = 13, kLogits = 14, kTaken = 15;  // signal slots
// For the length of the encoded step that follows. Negative: that of a task's text; 0: the ranks end.
constexpr int64_t kLengthBytes = 64;

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

Status no_thread_for(int rank, const Status& reason) {
  return guarded([&] { return reason.with_context("cannot start a thread for " + rank_name(rank)); },
                 reason.code());
}

int64_t StepRegion::step_bytes(const StepLimits& limits) {
  return kLengthBytes + StepBatches::max_bytes(limits);
}

StepRunner::StepRunner(Job& job, const StepRunnerOptions& options, RankForward forward, RankTask task)
    : job_(job),
      options_(options),
      forward_(std::move(forward)),
      task_(std::move(task)),
      last_step_(options.first_signal),
      pieces_(static_cast<size_t>(options.limits.num_groups), options.first_signal) {
  FP4MOE_CHECK(options.layout.dp == options.limits.num_groups,
               std::to_string(options.layout.dp) + " groups, but the limits are for " +
                   std::to_string(options.limits.num_groups) + " groups");
}

StepRunner::~StepRunner() {
  if (started_ && job_failure().ok()) {
    ends_ = true;
    encoded_.clear();
    // A rank that cannot be signalled has failed and therefore ends anyway.
    if (!announce(last_step_ + 1).ok()) log_warning("could not signal the ranks to stop");
  }
  for (std::thread& thread : threads_) thread.join();
}

bool StepRunner::is_local(int rank) const {
  return rank >= job_.first_rank() && rank - job_.first_rank() < job_.num_local_ranks();
}

int64_t StepRunner::piece_offset(int group, uint32_t piece) const {
  return options_.region.logits_offset + (2 * group + piece % 2) * options_.region.piece_bytes;
}

// Fails the job and returns its first failure, which may differ from `status`.
Status StepRunner::fail(const Status& status) {
  Endpoint& endpoint = job_.endpoint(job_.first_rank());
  endpoint.fail(status);
  return endpoint.failure();
}

// ---- process 0 ------------------------------------------------------------------------------------

Status StepRunner::start() {
  FP4MOE_CHECK(job_.process() == 0, "process " + std::to_string(job_.process()) + " cannot lead");
  FP4MOE_RETURN_IF_ERROR(start_threads());
  started_ = true;
  Endpoint& endpoint = job_.endpoint(0);
  for (int rank = 1; rank < options_.layout.tp; ++rank) {
    uint32_t seen = 0;
    FP4MOE_RETURN_IF_ERROR(endpoint.wait(rank, kDone, last_step_ + 1, kNoDeadline, &seen));
  }
  return {};
}

// Starts a thread for each rank of this process except the first.
Status StepRunner::start_threads() {
  const int first = job_.first_rank(), end = first + job_.num_local_ranks();
  threads_.reserve(static_cast<size_t>(end - first));
  const auto start = [&]() -> Status {
    for (int rank = first + 1; rank < end; ++rank) threads_.emplace_back([this, rank] { rank_loop(rank); });
    return {};
  };
  const Status started = guarded(start, StatusCode::kDoesNotFit);
  return started.ok() ? started : fail(no_thread_for(first + 1 + static_cast<int>(threads_.size()), started));
}

Status StepRunner::failure() const {
  std::lock_guard lock(mutex_);
  return step_failure_.ok() ? job_failure() : step_failure_;
}

Status StepRunner::run_on_ranks(std::span<const Batch> groups, float* logits) {
  FP4MOE_CHECK(started_, "run_on_ranks() was called before start()");
  if (const Status failed = failure(); !failed.ok()) return failed;
  return keep_failure("step", run_step(groups, logits));
}

Status StepRunner::keep_failure(const char* op, const Status& status) {
  if (status.ok()) return status;
  std::lock_guard lock(mutex_);
  return step_failure_ =
             status.with_context(std::string("op ") + op + " " + std::to_string(last_step_) + " on rank 0");
}

Status StepRunner::run_task(const std::string& text) {
  FP4MOE_CHECK(started_, "run_task() was called before start()");
  if (const Status failed = failure(); !failed.ok()) return failed;
  const int64_t most = StepBatches::max_bytes(options_.limits);
  if (std::ssize(text) > most)
    return invalid_argument("a text of " + std::to_string(text.size()) + " bytes does not fit in the " +
                            std::to_string(most) + " bytes of a step");
  const uint32_t step = ++last_step_;
  task_text_ = text;
  encoded_.assign(text.begin(), text.end());
  Status status = announce(step);
  status = status.ok() ? task_guarded(0, text) : fail(status);
  for (int rank = 1; rank < options_.layout.tp && status.ok(); ++rank)
    if (const Status done = wait_done(rank, step, kNoDeadline); !done.ok()) status = fail(done);
  if (status.ok()) task_text_.clear();  // after an error, a late rank may still read it
  return keep_failure("task", status);
}

Status StepRunner::run_step(std::span<const Batch> groups, float* logits) {
  const uint32_t step = ++last_step_;
  logits_ = logits;
  step_.assign(groups);
  if (job_.num_processes() > 1) step_.encode(encoded_);
  if (const Status status = announce(step); !status.ok()) return fail(status);
  FP4MOE_RETURN_IF_ERROR(forward_guarded(0, groups[0], logits));
  for (int group = 0; group < options_.layout.dp; ++group) {
    const int rank = group * options_.layout.attention_tp();
    if (is_local(rank)) continue;
    const int64_t vocab_size = options_.limits.vocab_of(step_.model());
    const int64_t row_bytes = vocab_size * int64_t{sizeof(float)};
    float* rows = logits + step_.first_logit_row(group) * vocab_size;
    if (const Status status = take_logits(group, rows, step_.num_logit_rows(group) * row_bytes); !status.ok())
      return fail(status);
  }
  for (int rank = 1; rank < options_.layout.tp; ++rank)
    if (const Status status = wait_done(rank, step, options_.timeout); !status.ok()) return fail(status);
  return {};
}

// Signals step number `step`, or the end, to all other ranks.
Status StepRunner::announce(uint32_t step) {
  Endpoint& endpoint = job_.endpoint(0);
  for (int rank = 1; rank < options_.layout.tp; ++rank) {
    if (!is_local(rank)) {
      const int64_t length = ends_ ? 0 : static_cast<int64_t>(encoded_.size());
      const int64_t sent = task_text_.empty() ? length : -length;
      const int64_t offset = options_.region.step_offset;
      FP4MOE_RETURN_IF_ERROR(endpoint.put(rank, offset, &sent, sizeof sent));
      if (length > 0)
        FP4MOE_RETURN_IF_ERROR(endpoint.put(rank, offset + kLengthBytes, encoded_.data(), length));
    }
    FP4MOE_RETURN_IF_ERROR(endpoint.signal(rank, kStep, step));
  }
  return {};
}

Status StepRunner::wait_done(int rank, uint32_t step, std::chrono::nanoseconds timeout) {
  uint32_t seen = 0;
  Endpoint& endpoint = job_.endpoint(0);
  const Status status = endpoint.wait(rank, kDone, step + 1, timeout, &seen);
  if (status.ok() || !endpoint.failure().ok()) return status;
  return {status.code(), "rank 0 waited " + std::to_string(std::chrono::duration<double>(timeout).count()) +
                             " s for " + rank_name(rank) + " at the end of step " + std::to_string(step) +
                             " (op step_end: expected " + std::to_string(step + 1) + ", seen " +
                             std::to_string(seen) + ")"};
}

// ---- all ranks ------------------------------------------------------------------------------------

Status StepRunner::forward_guarded(int rank, const Batch& batch, float* logits) {
  return run_guarded(rank, [&] { return forward_(rank, batch, logits); });
}

Status StepRunner::task_guarded(int rank, const std::string& text) {
  FP4MOE_CHECK(task_ != nullptr, "a task for ranks without tasks");
  return run_guarded(rank, [&] { return task_(rank, text); });
}

// Runs one rank's part of a step or task. An error or exception fails the rank and therefore the job.
Status StepRunner::run_guarded(int rank, const std::function<Status()>& part) {
  const Status status = guarded(part);
  if (status.ok()) return status;
  if (!job_failure().ok()) return job_failure();
  return fail(status.with_context(rank_name(rank)));
}

Status StepRunner::follow() {
  FP4MOE_CHECK(job_.process() != 0, "process 0 cannot follow");
  FP4MOE_RETURN_IF_ERROR(start_threads());
  rank_loop(job_.first_rank());
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return job_failure();
}

// Runs steps until the job ends or fails; an error fails the job.
void StepRunner::rank_loop(int rank) {
  const Status status = guarded([&] { return run_steps(rank); });
  if (!status.ok()) job_.endpoint(rank).fail(status);
}

// Returns OK when the job ends.
Status StepRunner::run_steps(int rank) {
  Endpoint& endpoint = job_.endpoint(rank);
  StepBatches received;  // not used in process 0
  FP4MOE_RETURN_IF_ERROR(endpoint.signal(0, kDone, options_.first_signal + 1));
  for (uint32_t step = options_.first_signal + 1;; ++step) {
    uint32_t seen = 0;
    FP4MOE_RETURN_IF_ERROR(endpoint.wait(0, kStep, step, kNoDeadline, &seen));
    std::string text;
    if (job_.process() == 0) {
      if (ends_) return {};
      text = task_text_;
    } else {
      int64_t length = 0;
      const uint8_t* region = endpoint.heap() + options_.region.step_offset;
      std::memcpy(&length, region, sizeof length);
      if (length == 0) return {};
      const bool is_task = length < 0;
      length = std::clamp<int64_t>(is_task ? -length : length, 0, StepBatches::max_bytes(options_.limits));
      const std::span encoded(region + kLengthBytes, static_cast<size_t>(length));
      if (is_task) text.assign(encoded.begin(), encoded.end());
      const Status status = is_task ? Status() : received.decode(encoded, options_.limits);
      FP4MOE_RETURN_IF_ERROR(status.with_context(rank_name(rank)));
    }
    const StepBatches& step_of = job_.process() == 0 ? step_ : received;
    FP4MOE_RETURN_IF_ERROR(text.empty() ? run_rank(rank, step_of) : task_guarded(rank, text));
    FP4MOE_RETURN_IF_ERROR(endpoint.signal(0, kDone, step + 1));
  }
}

Status StepRunner::run_rank(int rank, const StepBatches& step) {
  const int attention_tp = options_.layout.attention_tp(), group = rank / attention_tp;
  const bool has_logits = rank % attention_tp == 0;
  const int64_t row_elems = options_.limits.vocab_of(step.model());
  if (job_.process() == 0 || !has_logits) {
    float* logits = has_logits ? logits_ + step.first_logit_row(group) * row_elems : nullptr;
    return forward_guarded(rank, step.batch(group), logits);
  }
  std::vector<float> logits(static_cast<size_t>(step.num_logit_rows(group) * row_elems));
  FP4MOE_RETURN_IF_ERROR(forward_guarded(rank, step.batch(group), logits.data()));
  const Status status = send_logits(rank, logits.data(), static_cast<int64_t>(logits.size() * sizeof(float)));
  return status.ok() ? status : fail(status);
}

Status StepRunner::send_logits(int rank, const float* logits, int64_t num_bytes) {
  const int group = rank / options_.layout.attention_tp();
  Endpoint& endpoint = job_.endpoint(rank);
  uint32_t& piece = pieces_[static_cast<size_t>(group)];
  const auto* bytes = reinterpret_cast<const uint8_t*>(logits);
  for (int64_t at = 0; at < num_bytes; at += options_.region.piece_bytes) {
    uint32_t seen = 0;
    FP4MOE_RETURN_IF_ERROR(endpoint.wait(0, kTaken, piece - 1, options_.timeout, &seen));
    const int64_t length = std::min(options_.region.piece_bytes, num_bytes - at);
    FP4MOE_RETURN_IF_ERROR(endpoint.put(0, piece_offset(group, piece), bytes + at, length));
    FP4MOE_RETURN_IF_ERROR(endpoint.signal(0, kLogits, ++piece));
  }
  return {};
}

Status StepRunner::take_logits(int group, float* logits, int64_t num_bytes) {
  const int rank = group * options_.layout.attention_tp();
  Endpoint& endpoint = job_.endpoint(0);
  uint32_t& piece = pieces_[static_cast<size_t>(group)];
  auto* bytes = reinterpret_cast<uint8_t*>(logits);
  for (int64_t at = 0; at < num_bytes; at += options_.region.piece_bytes) {
    uint32_t seen = 0;
    const Status status = endpoint.wait(rank, kLogits, piece + 1, options_.timeout, &seen);
    if (!status.ok()) return status.with_context("rank 0, logits of " + rank_name(rank));
    const int64_t length = std::min(options_.region.piece_bytes, num_bytes - at);
    std::memcpy(bytes + at, endpoint.heap() + piece_offset(group, piece), static_cast<size_t>(length));
    FP4MOE_RETURN_IF_ERROR(endpoint.signal(rank, kTaken, ++piece));
  }
  return {};
}

}  // namespace fp4moe
