#include "engine/ranks/comm_memory.h"

#include <algorithm>
#include <string_view>

#include "base/buffer.h"
#include "base/check.h"
#include "moe/device/device_exchange.h"
#include "moe/transport/a2a.h"

namespace fp4moe {
namespace {

// Collectives move larger operands in pieces of this size. The more ranks there are, the smaller the pieces,
// because each rank has a buffer for every other rank.
int64_t staging_bytes(int num_ranks) { return std::max<int64_t>((int64_t{4} << 20) / num_ranks, 64 << 10); }

constexpr int64_t kLeastRecordBytes = 256;  // for operations other than the transport's
constexpr int64_t kLogitPieceBytes = 256 << 10;
// A rank on a GPU has this area. Slices of half of it take NVLink about 0.2 ms, several times as long as the
// ranks take to meet.
constexpr int64_t kMoveBytes = 64 << 20;

// The logits that ranks on GPUs gather at a time: those of up to 64 rows of a group.
int64_t gathered_logit_bytes(const StepLimits& limits, int64_t max_rows) {
  constexpr int64_t kGatheredRows = 64;
  const int64_t vocab_size = std::max(limits.vocab_size, limits.draft.vocab_size);
  return std::min(kGatheredRows, max_rows) * vocab_size * int64_t{4};
}

// For ranks on GPUs. is_staged: in several processes; the rank then has room for the operands of all ranks.
// Otherwise the ranks share the rows of large passes, and gather the experts that they choose. draft: or
// null.
DeviceRegion attention_region(const MoePlan& plan, const StepLimits& limits, const MoePlan* draft,
                              bool is_staged) {
  constexpr int64_t kStagedSumBytes = 32 << 20;
  const MoeProblem& p = plan.problem();
  const int num_ranks = p.layout.attention_tp();
  const int64_t logit_bytes = gathered_logit_bytes(limits, limits.max_logit_rows);
  if (is_staged)
    return {.word_bytes = kStagedSumBytes / num_ranks, .gather_bytes = logit_bytes, .is_staged = true};
  DeviceRegion region{.word_bytes = sum_word_bytes(num_ranks), .gather_bytes = logit_bytes};
  if (plan.a2a_settings().deterministic || exchanges_rows(plan)) return region;
  const int64_t top_k = std::max(p.top_k, draft != nullptr ? draft->problem().top_k : 0);
  region.gather_bytes = std::max(logit_bytes, limits.max_batch_tokens * top_k * int64_t{4});
  region.normed_bytes = limits.max_batch_tokens * p.hidden_size * 2;
  return region;
}

// For LM heads that all ranks share: the ranks gather rows of H bf16, exchange the choice of greedy rows in 8
// bytes, and otherwise gather logits.
DeviceRegion head_region(const MoePlan& plan, const StepLimits& limits) {
  const MoeProblem& p = plan.problem();
  const int64_t rows = limits.max_logit_rows;
  return {
      .word_bytes = Arena::padded(rows * int64_t{8}),
      .gather_bytes = std::max(gathered_logit_bytes(limits, rows / p.layout.dp), rows * p.hidden_size * 2)};
}

// The bytes for rows that a GPU's ranks exchange; 0 if they exchange none.
Result<int64_t> exchange_bytes(const MoePlan& plan, int64_t max_group_rows) {
  if (!exchanges_rows(plan)) return int64_t{0};
  FP4MOE_ASSIGN_OR_RETURN(const DeviceExchangeSize size, device_exchange_size(plan, max_group_rows));
  return size.area.num_bytes;
}

// The memory of an exchange is written again once all ranks have read it, as later operations of the same
// exchange imply (kernels/device_a2a.h). Nothing else orders the ranks of different groups: one group may
// still read the target's results when another sends the draft model's rows, so each model has its own
// region.
Result<CommMemory> device_memory_of(const MoePlan& plan, const StepLimits& limits, const MoePlan* draft) {
  const RankLayout& layout = plan.problem().layout;
  const bool is_staged = plan.spans_processes();
  CommMemory memory;
  if (layout.attention_tp() > 1) {
    memory.device_attention = attention_region(plan, limits, draft, is_staged);
    memory.heap_bytes = memory.device_attention.num_bytes(layout.attention_tp());
  }
  if (limits.shares_head) {
    memory.device_head = head_region(plan, limits);
    memory.device_head.offset = memory.heap_bytes;
    memory.heap_bytes += memory.device_head.num_bytes(layout.tp);
  }
  const auto add = [&](int64_t num_bytes, DeviceRegion& region) {
    if (num_bytes == 0) return;
    region = {
        .offset = is_staged ? 0 : memory.heap_bytes, .exchange_bytes = num_bytes, .is_staged = is_staged};
    memory.heap_bytes += region.num_bytes(layout.tp);
    memory.a2a_bytes += num_bytes;
  };
  FP4MOE_ASSIGN_OR_RETURN(const int64_t of_target, exchange_bytes(plan, limits.max_batch_tokens));
  add(of_target, memory.device_world);
  if (draft != nullptr) {
    const Result<int64_t> of_draft = exchange_bytes(*draft, limits.draft.max_batch_tokens);
    if (!of_draft.ok()) return of_draft.status().with_context("draft model");
    memory.draft_a2a_bytes = *of_draft;
    add(*of_draft, memory.device_draft_world);
  }
  if (plan.places_experts() && !is_staged) {
    memory.move_offset = Arena::padded(memory.heap_bytes);
    memory.move_bytes = kMoveBytes;
    memory.heap_bytes = memory.move_offset + memory.move_bytes;
  }
  memory.communicator_bytes = memory.heap_bytes - memory.a2a_bytes;
  return memory;
}

}  // namespace

Result<CommMemory> comm_memory(const MoePlan& plan, const StepLimits& limits, const MoePlan* draft) {
  const RankLayout& layout = plan.problem().layout;
  CommMemory memory;
  if (layout.tp == 1) return memory;
  if (plan.problem().device == DeviceKind::kCuda) return device_memory_of(plan, limits, draft);
  FP4MOE_ASSIGN_OR_RETURN(A2aBytes a2a, a2a_bytes(plan, limits.max_batch_tokens));
  if (draft != nullptr) {
    FP4MOE_ASSIGN_OR_RETURN(const A2aBytes of_draft, a2a_bytes(*draft, limits.max_batch_tokens));
    a2a.record = std::max(a2a.record, of_draft.record);
    a2a.heap = std::max(a2a.heap, of_draft.heap);
  }
  int64_t used = 0;
  const auto take = [&used](int64_t num_bytes) {
    const int64_t offset = used;
    used += Arena::padded(num_bytes);
    return offset;
  };
  const auto region = [&](int num_ranks, int64_t record_bytes, int first_slot) {
    const int64_t staging = staging_bytes(num_ranks);
    return CommRegion{take(Communicator::heap_bytes(num_ranks, record_bytes, staging)), record_bytes, staging,
                      first_slot};
  };
  memory.world = region(layout.tp, std::max(a2a.record, kLeastRecordBytes), kWorldSlot);
  if (layout.attention_tp() > 1 && layout.dp > 1)
    memory.attention = region(layout.attention_tp(), kLeastRecordBytes, kAttentionSlot);
  memory.communicator_bytes = used;
  memory.a2a_bytes = a2a.heap;
  memory.a2a_offset = take(a2a.heap);
  if (plan.fabric().name == std::string_view("mpi")) {
    const int64_t before = used;
    memory.step.piece_bytes = kLogitPieceBytes;
    memory.step.step_offset = take(StepRegion::step_bytes(limits));
    memory.step.logits_offset = take(memory.step.logits_bytes(limits));
    memory.step_bytes = used - before;
  }
  memory.heap_bytes = used;
  return memory;
}

}  // namespace fp4moe
