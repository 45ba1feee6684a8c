#include "moe/transport/a2a_exchange.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/hash.h"

namespace fp4moe {
namespace {

enum Phase { kDispatch, kCombine };

// The hash covers the row's position. The hashes of all rows are summed, so their order does not matter.
uint64_t row_hash(const uint8_t* row, int64_t num_bytes, int64_t unit, int64_t place) {
  return hash64(row, num_bytes, static_cast<uint64_t>(unit) << 32 | static_cast<uint64_t>(place));
}

uint32_t geometry_of(const TransportOptions& o, const ExchangeSetup& s) {
  const MoeProblem& p = o.problem;
  const int64_t numbers[] = {p.hidden_size,
                             p.intermediate_size,
                             p.num_experts,
                             p.top_k,
                             static_cast<int64_t>(p.act_dtype),
                             p.layout.tp,
                             p.layout.ep,
                             p.layout.dp,
                             static_cast<int64_t>(s.payload),
                             static_cast<int64_t>(s.results),
                             o.deterministic,
                             o.checksum,
                             s.shape.num_units,
                             s.shape.max_group_rows,
                             s.shape.max_blocks,
                             s.shape.unit_rows,
                             s.shape.unit_slots,
                             s.shape.return_rows};
  return geometry_hash(numbers);
}

}  // namespace

ExchangeTransport::ExchangeTransport(const TransportOptions& options, const ExchangeSetup& setup,
                                     ExchangePort port, Communicator* attention)
    : options_(options),
      setup_(setup),
      plan_(setup.shape),
      port_(std::move(port)),
      attention_(attention),
      packer_(setup.shape),
      geometry_(geometry_of(options, setup)),
      sends_(static_cast<size_t>(std::max(setup.shape.top_k, setup.parts))),
      next_row_(static_cast<size_t>(setup.shape.num_units)),
      next_return_(static_cast<size_t>(setup.shape.num_units)),
      sent_hash_(static_cast<size_t>(setup.shape.num_ranks)) {}

Shard ExchangeTransport::own_rows(int64_t group_rows) const {
  const RankLayout& layout = options_.problem.layout;
  return shard_blocks(group_rows, 1, layout.attention_tp(), layout.attention_rank());
}

OpName ExchangeTransport::op(const char* name) const { return {name, input_.layer, geometry_}; }

const uint8_t* ExchangeTransport::unit_data(int64_t unit) const {
  const int64_t local = unit % setup_.shape.units_per_rank();
  return port_.region() + setup_.rows_offset + local * setup_.shape.unit_rows * setup_.row_bytes;
}

Status ExchangeTransport::bad_row(int source, const std::string& what) const {
  return port_.fail(data_loss("a2a: rank " + std::to_string(rank()) + ", rows of rank " +
                              std::to_string(source) + " in layer " + std::to_string(input_.layer) +
                              ", epoch " + std::to_string(port_.epoch()) + ": " + what));
}

Status ExchangeTransport::begin(const TransportInput& input, Arena& scratch, ThreadPool& pool) {
  input_ = input;
  if (input.group_rows < 0 || input.group_rows > options_.max_group_rows)
    return port_.fail(invalid_argument("a2a: a batch of " + std::to_string(input.group_rows) +
                                       " tokens; allowed: 0.." + std::to_string(options_.max_group_rows)));
  own_ = own_rows(input.group_rows);
  FP4MOE_CHECK(input.x.rows == own_.count, "x has " + std::to_string(input.x.rows) +
                                               " rows, but this rank owns " + std::to_string(own_.count));
  const ExchangeShape& shape = setup_.shape;
  sums_ = input.take_row ? nullptr : scratch.take<float>(own_.count * hidden());
  return_of_part_ = scratch.take<int32_t>(own_.count * setup_.parts);
  record_ = scratch.take<uint8_t>(setup_.record_bytes);
  records_ = scratch.take<uint8_t>(setup_.record_bytes * shape.num_ranks);
  staging_ = scratch.take<uint8_t>(kStagedRows * std::max(setup_.row_bytes, setup_.return_bytes));
  row_ = scratch.take<float>(kStagedRows * hidden());
  packer_.start(0, reinterpret_cast<RankRecord*>(record_));
  FP4MOE_RETURN_IF_ERROR(open_chunk());
  return start_round(pool);
}

// Announces the next chunk of tokens and plans its rounds.
Status ExchangeTransport::open_chunk() {
  auto* record = reinterpret_cast<RankRecord*>(record_);
  packer_.start(packer_.next_token(), record);
  for (int64_t t = packer_.next_token(); t < own_.count; ++t) {
    const int64_t n = route(input_.ids + t * setup_.shape.top_k, sends_.data());
    if (!packer_.add({sends_.data(), static_cast<size_t>(n)})) break;
  }
  packer_.finish(input_.group_rows, own_.count - packer_.next_token());
  FP4MOE_RETURN_IF_ERROR(port_.exchange(op("a2a counts"), record_, setup_.record_bytes, records_));
  round_ = 0;
  const Status planned = plan_.make(records_);
  return planned.ok() ? planned : port_.fail(planned);
}

// Sends the rows of the next round, if there is one.
Status ExchangeTransport::start_round(ThreadPool& pool) {
  in_round_ = false;
  while (round_ == plan_.num_rounds()) {
    if (!plan_.more_chunks()) return {};
    FP4MOE_RETURN_IF_ERROR(open_chunk());
  }
  plan_.enter(round_);
  in_round_ = true;
  return send_rows(pool);
}

Result<bool> ExchangeTransport::next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) {
  if (!in_round_) FP4MOE_RETURN_IF_ERROR(start_round(pool));
  if (!in_round_) return false;
  FP4MOE_RETURN_IF_ERROR(arrive("dispatch", kDispatch));
  batch = {};
  FP4MOE_RETURN_IF_ERROR(receive(batch, scratch, pool));
  return true;
}

void ExchangeTransport::encode_token(const WireEncoder& encoder, int64_t token, uint8_t* wire) const {
  const MoeProblem& p = options_.problem;
  const int64_t act_row = hidden() * dtype_bits(p.act_dtype) / 8, K = p.top_k;
  const void* x = nullptr;
  if (input_.make_row) {
    float* made = row_ + token % kStagedRows * hidden();
    input_.make_row(token, made);
    x = made;
  } else {
    x = static_cast<const uint8_t*>(input_.x.data) + token * act_row;
  }
  encoder.encode(x, p.act_dtype, hidden(), wire);
  if (!setup_.with_ids) return;
  uint8_t* tail = wire + setup_.row_bytes - K * 8;
  std::memcpy(tail, input_.ids + token * K, static_cast<size_t>(K * 4));
  std::memcpy(tail + K * 4, input_.weights + token * K, static_cast<size_t>(K * 4));
}

// Records the position of each of the token's results in the return area.
void ExchangeTransport::place_returns(int64_t token, std::span<const Send> sends) {
  int32_t* parts = return_of_part_ + token * setup_.parts;
  std::fill(parts, parts + setup_.parts, -1);
  const auto take = [&](int64_t unit) {
    return static_cast<int32_t>(next_return_[static_cast<size_t>(unit)]++);
  };
  if (!setup_.shape.slots_return) {
    for (const Send& s : sends) parts[s.part] = take(s.unit);
    return;
  }
  for (int64_t k = 0; k < setup_.shape.top_k; ++k)
    if (const int64_t unit = unit_of(input_.ids[token * setup_.shape.top_k + k]); unit >= 0)
      parts[k] = take(unit);
}

Status ExchangeTransport::put_token(int64_t token, const uint8_t* wire) {
  const ExchangeShape& shape = setup_.shape;
  const int64_t n = route(input_.ids + token * shape.top_k, sends_.data());
  const std::span<const Send> sends(sends_.data(), static_cast<size_t>(n));
  for (const Send& s : sends) {
    const int64_t row = next_row_[static_cast<size_t>(s.unit)]++;
    const auto to = static_cast<int>(s.unit / shape.units_per_rank());
    const int64_t place = s.unit % shape.units_per_rank() * shape.unit_rows + row;
    FP4MOE_RETURN_IF_ERROR(
        port_.put(to, setup_.rows_offset + place * setup_.row_bytes, wire, setup_.row_bytes));
    if (options_.checksum)
      sent_hash_[static_cast<size_t>(to)] += row_hash(wire, setup_.row_bytes, s.unit, row);
  }
  place_returns(token, sends);
  return {};
}

Status ExchangeTransport::send_rows(ThreadPool& pool) {
  for (int64_t u = 0; u < setup_.shape.num_units; ++u) {
    next_row_[static_cast<size_t>(u)] = plan_.first_row(rank(), u);
    next_return_[static_cast<size_t>(u)] = plan_.first_return(rank(), u);
  }
  std::fill(sent_hash_.begin(), sent_hash_.end(), 0);
  const bool as_it_is =
      !setup_.with_ids && !input_.make_row &&
      setup_.payload == (options_.problem.act_dtype == DType::kBF16 ? WireFormat::kBf16 : WireFormat::kF32);
  const WireEncoder encoder{setup_.payload, input_.nvfp4_per_token, input_.nvfp4_scale};
  const Shard tokens = round_tokens();
  const int64_t end = tokens.first + tokens.count;
  for (int64_t first = tokens.first; first < end; first += kStagedRows) {
    const int64_t n = std::min(kStagedRows, end - first);
    const uint8_t* rows = staging_;
    if (as_it_is)
      rows = static_cast<const uint8_t*>(input_.x.data) + first * setup_.row_bytes;
    else
      pool.run(n, [&](int64_t i, int) { encode_token(encoder, first + i, staging_ + i * setup_.row_bytes); });
    for (int64_t i = 0; i < n; ++i) FP4MOE_RETURN_IF_ERROR(put_token(first + i, rows + i * setup_.row_bytes));
  }
  return announce("dispatch", kDispatch);
}

// Signals all ranks that this rank's puts of the phase are complete.
Status ExchangeTransport::announce(const char* name, int phase) {
  const int64_t R = setup_.shape.num_ranks;
  if (options_.checksum)
    for (int to = 0; to < R; ++to)
      FP4MOE_RETURN_IF_ERROR(
          port_.put(to, (phase * R + rank()) * 8, &sent_hash_[static_cast<size_t>(to)], 8));
  return port_.ready(op(name));
}

// Waits until all ranks' puts of the phase have arrived.
Status ExchangeTransport::arrive(const char* name, int phase) {
  FP4MOE_RETURN_IF_ERROR(port_.wait(op(name)));
  return options_.checksum ? verify(name, phase) : Status();
}

uint64_t ExchangeTransport::arrived_hash(int source, int phase) const {
  const ExchangeShape& shape = setup_.shape;
  const int of = phase == kDispatch ? rank() : source;  // the rank that owns the units
  uint64_t sum = 0;
  for (int64_t u = of * shape.units_per_rank(); u < (of + 1) * shape.units_per_rank(); ++u) {
    if (phase == kDispatch) {
      const int64_t first = plan_.first_row(source, u);
      for (int64_t r = first; r < first + plan_.rows(source, u); ++r)
        sum += row_hash(unit_data(u) + r * setup_.row_bytes, setup_.row_bytes, u, r);
    } else {
      const uint8_t* area = port_.region() + setup_.returns_offset;
      const int64_t first = plan_.first_return(rank(), u);
      for (int64_t r = first; r < first + plan_.returns(rank(), u); ++r)
        sum += row_hash(area + r * setup_.return_bytes, setup_.return_bytes, u, r);
    }
  }
  return sum;
}

Status ExchangeTransport::verify(const char* name, int phase) {
  for (int source = 0; source < setup_.shape.num_ranks; ++source) {
    uint64_t announced;
    std::memcpy(&announced, port_.region() + (phase * setup_.shape.num_ranks + source) * 8, 8);
    const uint64_t arrived = arrived_hash(source, phase);
    if (arrived != announced)
      return bad_row(source, std::string(name) + " checksum is " + std::to_string(arrived) +
                                 ", announced: " + std::to_string(announced));
  }
  return {};
}

Status ExchangeTransport::put_results(int source, int64_t unit, ThreadPool& pool) {
  const WireEncoder encoder{setup_.results};
  const int64_t count = plan_.returns(source, unit), at = plan_.first_return(source, unit);
  for (int64_t first = 0; first < count; first += kStagedRows) {
    const int64_t n = std::min(kStagedRows, count - first);
    pool.run(n, [&](int64_t i, int) {
      const float* y = result_row(source, unit, first + i, row_ + i * hidden());
      encoder.encode(y, DType::kF32, hidden(), staging_ + i * setup_.return_bytes);
    });
    FP4MOE_RETURN_IF_ERROR(port_.put(source, setup_.returns_offset + (at + first) * setup_.return_bytes,
                                     staging_, n * setup_.return_bytes));
    if (!options_.checksum) continue;
    for (int64_t i = 0; i < n; ++i)
      sent_hash_[static_cast<size_t>(source)] +=
          row_hash(staging_ + i * setup_.return_bytes, setup_.return_bytes, unit, at + first + i);
  }
  return {};
}

Status ExchangeTransport::combine(const ExpertBatch& batch, Arena&, ThreadPool& pool) {
  batch_ = &batch;
  std::fill(sent_hash_.begin(), sent_hash_.end(), 0);
  const int R = setup_.shape.num_ranks;
  const int64_t units = setup_.shape.units_per_rank();
  for (int i = 0; i < R; ++i) {
    const int source = (rank() + i) % R;  // staggered, so that ranks do not all send to rank 0 first
    for (int64_t u = rank() * units; u < (rank() + 1) * units; ++u)
      FP4MOE_RETURN_IF_ERROR(put_results(source, u, pool));
  }
  batch_ = nullptr;
  FP4MOE_RETURN_IF_ERROR(announce("combine", kCombine));
  FP4MOE_RETURN_IF_ERROR(arrive("combine", kCombine));
  sum_returns(pool);
  ++round_;
  in_round_ = false;
  return {};
}

void ExchangeTransport::sum_token(int64_t token, float* sum) const {
  constexpr int64_t kColumns = 64;  // as many sums as fit in registers
  const uint8_t* area = port_.region() + setup_.returns_offset;
  const int32_t* parts = return_of_part_ + token * setup_.parts;
  for (int64_t h = 0; h < hidden(); h += kColumns) {
    const int64_t n = std::min(kColumns, hidden() - h);
    float columns[kColumns] = {};
    for (int64_t p = 0; p < setup_.parts; ++p) {
      if (parts[p] < 0) continue;
      const float weight = setup_.weights_at_source ? input_.weights[token * setup_.parts + p] : 1.0f;
      add_wire_row(setup_.results, area + parts[p] * setup_.return_bytes, h, n, weight, columns);
    }
    std::memcpy(sum + h, columns, static_cast<size_t>(n) * sizeof(float));
  }
}

void ExchangeTransport::sum_returns(ThreadPool& pool) {
  const Shard tokens = round_tokens();
  if (!input_.take_row) {
    pool.run(tokens.count,
             [&](int64_t i, int) { sum_token(tokens.first + i, sums_ + (tokens.first + i) * hidden()); });
    return;
  }
  for (int64_t t = tokens.first; t < tokens.first + tokens.count; ++t) {
    sum_token(t, row_);
    input_.take_row(t, row_);
  }
}

Status ExchangeTransport::finish(float* out, ThreadPool& pool) {
  if (input_.take_row) return {};
  pool.run(own_.count, [&](int64_t t, int) {
    float* row = out + (own_.first + t) * hidden();
    for (int64_t h = 0; h < hidden(); ++h) row[h] += sums_[t * hidden() + h];
  });
  const RankLayout& layout = options_.problem.layout;
  if (layout.attention_tp() == 1 || input_.group_rows == 0) return {};
  std::vector<int64_t> counts;
  for (int r = 0; r < layout.attention_tp(); ++r)
    counts.push_back(shard_blocks(input_.group_rows, 1, layout.attention_tp(), r).count * hidden() * 4);
  return attention_->all_gather(op("gather of sums"), out + own_.first * hidden(), counts, out);
}

void ExchangeTransport::decode_rows(const uint8_t* wire, int64_t n, uint8_t* x, float* scales,
                                    ThreadPool& pool) const {
  const DType dtype = options_.problem.act_dtype;
  const int64_t act_row = hidden() * dtype_bits(dtype) / 8;
  pool.run(n, [&](int64_t i, int) {
    const float scale =
        decode_wire_row(setup_.payload, wire + i * setup_.row_bytes, hidden(), dtype, x + i * act_row);
    if (scales != nullptr) scales[i] = scale;
  });
}

}  // namespace fp4moe
