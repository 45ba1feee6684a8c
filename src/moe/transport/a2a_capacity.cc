// Sizes and offsets of an exchange's buffers; ExchangePort.
#include <algorithm>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "moe/transport/a2a.h"
#include "moe/transport/a2a_exchange.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxBlocks = 16;  // per chunk

int64_t align(int64_t bytes) { return Arena::padded(bytes); }

Status budget_too_small(const TransportOptions& o, const CapacityRequest& request, const ExchangeSetup& s,
                        int64_t fixed, int64_t least) {
  const int64_t units = s.shape.units_per_rank();
  const std::string k = std::to_string(std::max(s.shape.top_k, s.parts));
  return does_not_fit(std::string("--a2a-memory-budget ") + std::to_string(o.memory_budget) + ": a2a " +
                      request.protocol + " needs at least " + std::to_string(least) +
                      " bytes per rank for one token at a time: " + std::to_string(fixed) + " (records of " +
                      std::to_string(s.shape.num_ranks) + " ranks) + " + k + " x " + std::to_string(units) +
                      " x (" + std::to_string(s.row_bytes) + " + " + std::to_string(request.returns_per_row) +
                      " x " + std::to_string(s.return_bytes) + ") (rows per token x " + s.shape.unit_name +
                      "s per rank x (bytes per row + returned rows x bytes per returned row))");
}

// Sets the capacities to as many rows and results as the budget allows.
Status set_capacities(const TransportOptions& o, const CapacityRequest& request, ExchangeSetup& s) {
  ExchangeShape& shape = s.shape;
  const int64_t units = shape.units_per_rank(), K = shape.top_k;
  s.record_bytes = exchange_record_bytes(shape);
  s.rows_offset = align(2 * shape.num_ranks * 8);
  // Areas start at cache-line boundaries.
  const int64_t fixed = s.rows_offset + Communicator::heap_bytes(shape.num_ranks, s.record_bytes, 0) + 2 * 64;
  const int64_t each = units * (s.row_bytes + request.returns_per_row * s.return_bytes);
  const int64_t rows = (o.memory_budget - fixed) / each;
  const int64_t token = std::max(K, s.parts);  // maximum number of rows of one token
  if (rows < token) return budget_too_small(o, request, s, fixed, fixed + token * each);
  const int64_t most = std::numeric_limits<int32_t>::max() / std::max<int64_t>(1, K * units);
  shape.unit_rows = std::min({rows, std::max(token, request.most_unit_rows), most});
  shape.unit_slots = std::max(K, shape.unit_rows * request.slots_per_row);
  shape.return_rows =
      std::min(rows * units * request.returns_per_row, std::max(token, request.most_return_rows));
  s.returns_offset = s.rows_offset + align(units * shape.unit_rows * s.row_bytes);
  s.region_bytes = s.returns_offset + align(shape.return_rows * s.return_bytes);
  return {};
}

}  // namespace

Status fit_exchange(const TransportOptions& o, const CapacityRequest& request, ExchangeSetup& s) {
  const MoeProblem& p = o.problem;
  s.max_own_rows = shard_blocks(o.max_group_rows, 1, p.layout.attention_tp(), 0).count;
  s.shape.max_group_rows = o.max_group_rows;
  s.shape.max_blocks = std::clamp<int64_t>(s.max_own_rows, 1, kMaxBlocks);
  s.row_bytes = wire_row_bytes(s.payload, p.hidden_size) + (s.with_ids ? p.top_k * 8 : 0);
  s.return_bytes = wire_row_bytes(s.results, p.hidden_size);
  if (s.payload == WireFormat::kNvfp4 && p.hidden_size % 16 != 0)
    return unsupported("nvfp4 dispatch: hidden_size=" + std::to_string(p.hidden_size) +
                       " is not a multiple of the block size 16; use bf16 or fp8");
  if (p.num_physical() % p.layout.ep != 0)
    return unsupported("a2a " + std::string(request.protocol) + ": " + std::to_string(p.num_physical()) +
                       " experts over ep=" + std::to_string(p.layout.ep) +
                       " ranks; E must be divisible by ep");
  FP4MOE_RETURN_IF_ERROR(set_capacities(o, request, s));
  s.sums_bytes = align(s.max_own_rows * p.hidden_size * 4);
  s.scratch_bytes = s.sums_bytes + align(s.max_own_rows * s.parts * 4) + align(s.record_bytes) +
                    align(s.record_bytes * s.shape.num_ranks) +
                    align(kStagedRows * std::max(s.row_bytes, s.return_bytes)) +
                    align(kStagedRows * p.hidden_size * 4);
  return {};
}

Result<ExchangePort> ExchangePort::make(Communicator* world, int num_ranks, int64_t offset,
                                        int64_t num_bytes) {
  ExchangePort port;
  port.world_ = world;
  port.offset_ = offset;
  if (world == nullptr) {
    FP4MOE_CHECK(num_ranks == 1, std::to_string(num_ranks) + " ranks need a communicator");
    FP4MOE_ASSIGN_OR_RETURN(port.own_, Buffer::make(num_bytes));
    port.region_ = port.own_.data();
    return port;
  }
  FP4MOE_CHECK(world->size() == num_ranks, "the communicator has " + std::to_string(world->size()) +
                                               " ranks, but the layout has " + std::to_string(num_ranks));
  FP4MOE_CHECK(offset % 64 == 0 && offset + num_bytes <= world->endpoint().heap_bytes(),
               "region [" + std::to_string(offset) + ", +" + std::to_string(num_bytes) +
                   ") is not 64-byte aligned or exceeds the heap, whose size is " +
                   std::to_string(world->endpoint().heap_bytes()));
  port.region_ = world->endpoint().heap() + offset;
  return port;
}

Status ExchangePort::exchange(const OpName& op, const void* mine, int64_t num_bytes, void* all) {
  if (world_ != nullptr) return world_->exchange(op, mine, num_bytes, all);
  std::memcpy(all, mine, static_cast<size_t>(num_bytes));
  return {};
}

Status ExchangePort::put(int rank, int64_t offset, const void* src, int64_t num_bytes) {
  if (world_ != nullptr) return world_->put(rank, offset_ + offset, src, num_bytes);
  std::memcpy(region_ + offset, src, static_cast<size_t>(num_bytes));
  return {};
}

Status ExchangePort::ready(const OpName& op) {
  for (int r = 0; world_ != nullptr && r < world_->size(); ++r)
    FP4MOE_RETURN_IF_ERROR(world_->data_ready(op, r));
  return {};
}

Status ExchangePort::wait(const OpName& op) {
  for (int r = 0; world_ != nullptr && r < world_->size(); ++r)
    FP4MOE_RETURN_IF_ERROR(world_->wait_data(op, r));
  return {};
}

Status ExchangePort::fail(const Status& status) const {
  if (world_ != nullptr) world_->endpoint().fail(status);
  return status;
}

}  // namespace fp4moe
