#include "engine/ranks/process_group.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "comm/communicator.h"

namespace fp4moe {
namespace {

// Signal slots (comm/endpoint.h): from process 0, and to it.
constexpr int kThere = 12, kThereTaken = 13, kBack = 14, kBackTaken = 15;
constexpr int64_t kMaxCommandBytes = int64_t{1} << 30;

PipePlace there_place(int rank) {
  return {.sender = 0, .receiver = rank, .data_slot = kThere, .taken_slot = kThereTaken, .offset = 0};
}
PipePlace back_place(int rank) {
  return {.sender = rank,
          .receiver = 0,
          .data_slot = kBack,
          .taken_slot = kBackTaken,
          .offset = (rank - 1) * kPipeBytes};
}

template <class T>
std::vector<T> copy_of(std::span<const T> from) {
  return {from.begin(), from.end()};
}

}  // namespace

int64_t process_group_heap_bytes(int num_ranks) { return std::max(num_ranks - 1, 1) * kPipeBytes; }

ProcessGroup::ProcessGroup(std::shared_ptr<Job> job, std::unique_ptr<NcclComm> nccl,
                           std::unique_ptr<RankGroup> local, const ProcessGroupOptions& options)
    : job_(std::move(job)), nccl_(std::move(nccl)), local_(std::move(local)), options_(options) {
  const int first = rank() == 0 ? 1 : rank(), last = rank() == 0 ? options.layout.tp - 1 : rank();
  for (int r = first; r <= last; ++r) {
    there_.emplace_back(endpoint(), there_place(r));
    back_.emplace_back(endpoint(), back_place(r));
  }
}

ProcessGroup::~ProcessGroup() {
  if (failure().ok()) {
    end();
    return;
  }
  if (job_->num_processes() == 1) return;
  if (rank() != 0) std::this_thread::sleep_for(kAbortGrace);
  abort();
}

// No rank may close its communicator before all ranks' exchanges are complete, nor while another rank's
// thread watches it: the second command says that all have replied to the first one.
void ProcessGroup::end() {
  if (rank() != 0) return;
  std::vector<uint8_t> none;
  Status status = local_->finish_steps();
  if (status.ok()) status = send({.kind = CommandKind::kEnd});
  for (MessagePipe& back : back_)
    if (status.ok()) status = back.receive(0, options_.timeout, none);
  if (nccl_ != nullptr) nccl_->stop_watching();
  if (status.ok()) status = send({.kind = CommandKind::kEnd});
  if (!status.ok()) log_warning("could not end the other processes: " + status.message());
}

Status ProcessGroup::end_rank() {
  FP4MOE_RETURN_IF_ERROR(local_->finish_steps());
  if (nccl_ != nullptr) nccl_->stop_watching();
  FP4MOE_RETURN_IF_ERROR(back_[0].send({}, options_.timeout));
  std::vector<uint8_t> bytes;
  FP4MOE_RETURN_IF_ERROR(there_[0].receive(kMaxCommandBytes, options_.timeout, bytes));
  has_ended_ = true;
  return {};
}

// Makes an error the job's failure, and returns the job's first failure.
Status ProcessGroup::keep(const Status& status) {
  if (status.ok()) return status;
  endpoint().fail(status.with_context("rank " + std::to_string(rank())));
  return endpoint().failure();
}

Status ProcessGroup::failure() const {
  const Status failed = endpoint().failure();
  return failed.ok() ? local_->failure() : failed;
}

// ---- process 0 ------------------------------------------------------------------------------------

Status ProcessGroup::send(const GroupCommand& command) {
  FP4MOE_CHECK(rank() == 0, "rank " + std::to_string(rank()) + " sends a command");
  const std::vector<uint8_t> bytes = encode_command(command);
  for (MessagePipe& there : there_) FP4MOE_RETURN_IF_ERROR(there.send(bytes, options_.timeout));
  return {};
}

Status ProcessGroup::execute_step(std::span<const Batch> groups) {
  FP4MOE_RETURN_IF_ERROR(failure());
  num_logit_rows_.clear();
  for (const Batch& batch : groups) num_logit_rows_.push_back(batch.logit_rows.size());
  if (rank() == 0) {
    GroupCommand command{.kind = CommandKind::kStep};
    step_.assign(groups);
    step_.encode(command.step);
    FP4MOE_RETURN_IF_ERROR(keep(send(command)));
  }
  return keep(local_->execute_step(groups));
}

Status ProcessGroup::set_masked_ids(std::span<const int32_t> ids) {
  FP4MOE_RETURN_IF_ERROR(failure());
  if (rank() == 0) FP4MOE_RETURN_IF_ERROR(keep(send({.kind = CommandKind::kMask, .ids = copy_of(ids)})));
  return keep(local_->set_masked_ids(ids));
}

Status ProcessGroup::start_sample(std::span<const SampleRowParams> rows, std::span<const LogitEdit> edits,
                                  std::span<const uint32_t> allowed, std::span<const int32_t> logprob_ids) {
  FP4MOE_RETURN_IF_ERROR(failure());
  count_sampled(rows);
  if (rank() == 0)
    FP4MOE_RETURN_IF_ERROR(keep(send({.kind = CommandKind::kSample,
                                      .rows = copy_of(rows),
                                      .edits = copy_of(edits),
                                      .allowed = copy_of(allowed),
                                      .ids = copy_of(logprob_ids)})));
  return keep(local_->start_sample(rows, edits, allowed, logprob_ids));
}

// Keeps how many rows and ids each group samples; the groups' rows follow each other.
void ProcessGroup::count_sampled(std::span<const SampleRowParams> rows) {
  std::vector<Counts>& counts = sampled_.emplace_back();
  for (const size_t num_rows : num_logit_rows_) {
    const auto own = rows.first(std::min(num_rows, rows.size()));
    rows = rows.subspan(own.size());
    size_t num_ids = 0;
    for (const SampleRowParams& row : own) num_ids += static_cast<size_t>(row.num_logprob_ids);
    counts.push_back({own.size(), num_ids});
  }
}

std::vector<ProcessGroup::Counts> ProcessGroup::take_counts(size_t num_rows, size_t num_ids) {
  FP4MOE_CHECK(!sampled_.empty(), "no rows were sampled");
  std::vector<Counts> counts = std::move(sampled_.front());
  sampled_.pop_front();
  if (counts.size() == 1) counts[0] = {num_rows, num_ids};  // the caller may take fewer
  return counts;
}

Status ProcessGroup::take_sampled(std::span<SampledRow> out, std::span<float> id_logprobs) {
  FP4MOE_CHECK(rank() == 0, "rank " + std::to_string(rank()) + " takes tokens by itself");
  FP4MOE_RETURN_IF_ERROR(failure());
  const std::vector<Counts> counts = take_counts(out.size(), id_logprobs.size());
  FP4MOE_RETURN_IF_ERROR(keep(
      send({.kind = CommandKind::kTake, .num_rows = std::ssize(out), .num_ids = std::ssize(id_logprobs)})));
  FP4MOE_RETURN_IF_ERROR(keep(local_->take_sampled(out, id_logprobs)));
  size_t row = counts[0].rows, id = counts[0].ids;
  for (int g = 1; g < options_.layout.dp; ++g) {
    const Counts& own = counts[static_cast<size_t>(g)];
    FP4MOE_RETURN_IF_ERROR(keep(
        receive_sampled(first_rank_of(g), out.subspan(row, own.rows), id_logprobs.subspan(id, own.ids))));
    row += own.rows, id += own.ids;
  }
  return {};
}

Status ProcessGroup::receive_sampled(int from, std::span<SampledRow> out, std::span<float> id_logprobs) {
  std::vector<uint8_t> bytes;
  const size_t num_bytes = out.size_bytes() + id_logprobs.size_bytes();
  FP4MOE_RETURN_IF_ERROR(
      back_[static_cast<size_t>(from - 1)].receive(static_cast<int64_t>(num_bytes), options_.timeout, bytes));
  if (bytes.size() != num_bytes)
    return data_loss("rank " + std::to_string(from) + " sends " + std::to_string(bytes.size()) +
                     " bytes of tokens instead of " + std::to_string(num_bytes));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size_bytes());
  if (!id_logprobs.empty())
    std::memcpy(id_logprobs.data(), bytes.data() + out.size_bytes(), id_logprobs.size_bytes());
  return {};
}

// ---- other processes ------------------------------------------------------------------------------

Status ProcessGroup::follow() {
  FP4MOE_CHECK(rank() != 0, "process 0 cannot follow");
  while (!has_ended_) {
    std::vector<uint8_t> bytes;
    FP4MOE_RETURN_IF_ERROR(keep(there_[0].receive(kMaxCommandBytes, kNoDeadline, bytes)));
    const Result<GroupCommand> command = decode_command(bytes, options_.limits);
    FP4MOE_RETURN_IF_ERROR(keep(command.ok() ? run(*command) : command.status()));
  }
  return {};
}

Status ProcessGroup::run(const GroupCommand& command) {
  switch (command.kind) {
    case CommandKind::kStep: {
      FP4MOE_RETURN_IF_ERROR(step_.decode(command.step, options_.limits));
      std::vector<Batch> groups;
      for (int g = 0; g < options_.layout.dp; ++g) groups.push_back(step_.batch(g));
      return execute_step(groups);
    }
    case CommandKind::kSample:
      return start_sample(command.rows, command.edits, command.allowed, command.ids);
    case CommandKind::kTake:
      return take(command);
    case CommandKind::kMask:
      return set_masked_ids(command.ids);
    case CommandKind::kEnd:
      return end_rank();
  }
  return internal_error("a command of an unknown kind");
}

// The first rank of each group but that of process 0 sends its group's tokens.
Status ProcessGroup::take(const GroupCommand& command) {
  const std::vector<Counts> counts =
      take_counts(static_cast<size_t>(command.num_rows), static_cast<size_t>(command.num_ids));
  std::vector<SampledRow> rows(static_cast<size_t>(command.num_rows));
  std::vector<float> ids(static_cast<size_t>(command.num_ids));
  FP4MOE_RETURN_IF_ERROR(local_->take_sampled(rows, ids));
  const auto group = static_cast<size_t>(options_.layout.dp_rank());
  if (group == 0 || options_.layout.attention_rank() != 0) return {};
  size_t first_row = 0, first_id = 0;
  for (size_t g = 0; g < group; ++g) first_row += counts[g].rows, first_id += counts[g].ids;
  const auto own_rows = std::as_bytes(std::span(rows).subspan(first_row, counts[group].rows));
  const auto own_ids = std::as_bytes(std::span(ids).subspan(first_id, counts[group].ids));
  std::vector<uint8_t> bytes(own_rows.size() + own_ids.size());
  if (!own_rows.empty()) std::memcpy(bytes.data(), own_rows.data(), own_rows.size());
  if (!own_ids.empty()) std::memcpy(bytes.data() + own_rows.size(), own_ids.data(), own_ids.size());
  return back_[0].send(bytes, options_.timeout);
}

}  // namespace fp4moe
