// ExchangeTransport: the common part of the transports that move rows between ranks.
//
// A layer's exchange: each rank divides its tokens into blocks and announces their counts (one exchange());
// all ranks compute the same ExchangePlan. In each round rows are put at their final place in the
// destination's region, the experts run, results are put into the source's return area, and the source sums
// them. Tokens that do not fit into a record follow in further chunks. Buffers are reused safely because
// phases alternate: a peer's results for a round imply that it has read the round's rows, and its next rows
// imply that it has summed the results.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moe/transport/a2a_wire.h"
#include "moe/transport/exchange_plan.h"
#include "moe/transport/transport.h"

namespace fp4moe {

// A protocol's parameters, and its sizes within the options' memory budget.
struct ExchangeSetup {
  ExchangeShape shape;
  WireFormat payload = WireFormat::kBf16, results = WireFormat::kBf16;
  bool with_ids = false;          // each row is followed by its ids [K] and weights [K]
  bool weights_at_source = true;  // the source multiplies returned rows by the router's weights
  int64_t parts = 1;              // maximum number of rows returned per token
  int64_t max_own_rows = 0;
  int64_t row_bytes = 0, return_bytes = 0;                        // of a row and of a result on the wire
  int64_t rows_offset = 0, returns_offset = 0, region_bytes = 0;  // in the transport's heap region
  int64_t record_bytes = 0;
  int64_t max_batch_rows = 0;
  int64_t scratch_bytes = 0;  // of begin(), next() and combine() together
  int64_t sums_bytes = 0;     // part of scratch_bytes that is not used if the input has take_row
};

// One rank's access to its peers: the world communicator and the transport's heap region, or, with a single
// rank, private memory.
class ExchangePort {
 public:
  static Result<ExchangePort> make(Communicator* world, int num_ranks, int64_t offset, int64_t num_bytes);
  uint8_t* region() const { return region_; }
  Status exchange(const OpName& op, const void* mine, int64_t num_bytes, void* all);
  Status put(int rank, int64_t offset, const void* src, int64_t num_bytes);  // offset in the region
  Status ready(const OpName& op);  // signals all ranks that the puts to them are complete
  Status wait(const OpName& op);   // until all ranks have called ready()
  uint32_t epoch() const { return world_ == nullptr ? 0 : world_->epoch(); }
  Status fail(const Status& status) const;  // ends the job; returns status

 private:
  Communicator* world_ = nullptr;
  int64_t offset_ = 0;
  Buffer own_;
  uint8_t* region_ = nullptr;
};

// The common base of the exchanging protocols.
// Large because all phases of a round share its buffers and positions.
class ExchangeTransport : public Transport {
 public:
  ExchangeTransport(const TransportOptions& options, const ExchangeSetup& setup, ExchangePort port,
                    Communicator* attention);
  Shard own_rows(int64_t group_rows) const final;
  int64_t max_batch_rows() const final { return setup_.max_batch_rows; }
  int64_t scratch_bytes() const final { return setup_.scratch_bytes; }
  Status begin(const TransportInput& input, Arena& scratch, ThreadPool& pool) final;
  Result<bool> next(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) final;
  Status combine(const ExpertBatch& batch, Arena& scratch, ThreadPool& pool) final;
  Status finish(float* out, ThreadPool& pool) final;

 protected:
  // Writes the rows to send for a token with these ids [K] into `sends` [max(K, parts)] and returns their
  // number. Each unit gets at most one row per slot; invalid ids are dropped.
  virtual int64_t route(const int32_t* ids, Send* sends) const = 0;
  // Makes the batch from the round's rows, which have all arrived in the region.
  virtual Status receive(ExpertBatch& batch, Arena& scratch, ThreadPool& pool) = 0;
  // Returns a pointer to row i of the results that `unit` (of this rank) returns to `source`; the row may be
  // written to tmp [H] first.
  virtual const float* result_row(int source, int64_t unit, int64_t i, float* tmp) const = 0;
  // The unit of an expert id; -1 for an invalid id.
  virtual int64_t unit_of(int32_t id) const = 0;

  int rank() const { return options_.problem.layout.rank; }
  int64_t hidden() const { return options_.problem.hidden_size; }
  const uint8_t* unit_data(int64_t unit) const;  // wire rows that arrived for one of this rank's units
  Shard round_tokens() const { return packer_.tokens(plan_.blocks(rank())); }
  // Decodes n wire rows with stride row_bytes into x [n, H]. Writes their tensor scales to scales [n] unless
  // it is null.
  void decode_rows(const uint8_t* wire, int64_t n, uint8_t* x, float* scales, ThreadPool& pool) const;
  Status bad_row(int source, const std::string& what) const;

  const TransportOptions options_;
  const ExchangeSetup setup_;
  ExchangePlan plan_;
  const ExpertBatch* batch_ = nullptr;  // set only during combine()

 private:
  OpName op(const char* name) const;
  Status open_chunk();
  Status start_round(ThreadPool& pool);
  Status send_rows(ThreadPool& pool);
  Status put_token(int64_t token, const uint8_t* wire);
  void place_returns(int64_t token, std::span<const Send> sends);
  Status send_results(ThreadPool& pool);
  Status put_results(int source, int64_t unit, ThreadPool& pool);
  Status announce(const char* name, int phase);
  Status arrive(const char* name, int phase);
  Status verify(const char* name, int phase);
  uint64_t arrived_hash(int source, int phase) const;
  void encode_token(const WireEncoder& encoder, int64_t token, uint8_t* wire) const;
  void sum_returns(ThreadPool& pool);
  void sum_token(int64_t token, float* sum) const;

  ExchangePort port_;
  Communicator* attention_;
  BlockPacker packer_;
  uint32_t geometry_ = 0;
  TransportInput input_;
  Shard own_;
  int64_t round_ = 0;
  bool in_round_ = false;  // the round's rows are sent, its results not yet summed
  // From begin()'s arena.
  float* sums_ = nullptr;                        // [own rows, H]; null if the input has take_row
  int32_t* return_of_part_ = nullptr;            // [own rows, parts]: row in the return area; -1: none
  uint8_t* record_ = nullptr;                    // this rank's record
  uint8_t* records_ = nullptr;                   // [R] records
  uint8_t* staging_ = nullptr;                   // [kStagedRows] wire rows or results
  float* row_ = nullptr;                         // [kStagedRows, H]
  std::vector<Send> sends_;                      // [max(K, parts)]
  std::vector<int64_t> next_row_, next_return_;  // [U]: this rank's next positions in the round
  std::vector<uint64_t> sent_hash_;              // [R]: checksum of the rows sent to each rank
};

constexpr int64_t kStagedRows = 16;

// Capacities that a protocol requests.
struct CapacityRequest {
  const char* protocol = "";    // for messages
  int64_t slots_per_row = 1;    // slot capacity of a unit, per row of its row capacity
  int64_t returns_per_row = 1;  // rows of the return area, per row of capacity of a rank's units
  int64_t most_unit_rows = 0, most_return_rows = 0;  // upper bounds: the largest batch needs no more
};
// Completes `setup` from its shape (num_ranks, num_units, top_k, group_ranks, unit_name, slots_return),
// formats and flags: wire sizes, capacities within the budget, offsets, and scratch bytes except the
// protocol's own. kDoesNotFit, with the formula, if the budget is too small; kUnsupported if H or E does not
// suit the payload or the ranks.
Status fit_exchange(const TransportOptions& options, const CapacityRequest& request, ExchangeSetup& setup);

// Return the protocols' setups, also to size plans and tests; kUnsupported or kDoesNotFit as fit_exchange().
Result<ExchangeSetup> deepep_setup(const TransportOptions& options);
Result<ExchangeSetup> flashinfer_setup(const TransportOptions& options);
Result<ExchangeSetup> none_setup(const TransportOptions& options);  // dp > 1

}  // namespace fp4moe
