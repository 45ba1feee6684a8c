// DeviceExchange: a GPU rank's a2a. A layer's tokens go to the ranks of their experts and results come back
// (kernels/device_a2a.h), in rounds whose number depends only on the number of tokens.
#pragma once

#include <cstdint>

#include "comm/device_communicator.h"
#include "kernels/device_a2a.h"
#include "kernels/ops.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// Whether the plan's layers exchange rows: an a2a, several data-parallel groups, or deterministic ranks,
// which sum a token's results at its source.
bool exchanges_rows(const MoePlan& plan);

// Sizes for batches of up to max_group_rows tokens of a group. kDoesNotFit: --a2a-memory-budget is too small
// for one token, with the bytes that it needs.
struct DeviceExchangeSize {
  A2aShape shape;
  int64_t max_tokens = 0;  // of a rank, in one round
  A2aArea area;
};
Result<DeviceExchangeSize> device_exchange_size(const MoePlan& plan, int64_t max_group_rows);

// A rank's tokens in a layer.
struct ExchangeTokens {
  int layer = 0;
  int64_t num_lane_tokens = 0;          // of the rank that has most: the same on all ranks
  int64_t num_own = 0;                  // this rank's
  int64_t first = 0;                    // of these in the group's batch, to which num_filled refers
  const int32_t* num_filled = nullptr;  // device memory, or null: tokens of the batch before padding
  const bf16* x = nullptr;              // [num_own, H]
  const int32_t* ids = nullptr;         // [num_own, K]
  const float* weights = nullptr;       // [num_own, K]
  const float* nvfp4_scale = nullptr;   // A2aRound::nvfp4_scale
};

// The rows that arrived, as the batch of a layer.
struct LaneBatch {
  ActRows x;                            // [R T, H] bf16
  bool x_is_nvfp4 = false;              // x holds NVFP4 values: code * block scale
  const float* x_row_scales = nullptr;  // [R T] or null: row r has the value x[r] * x_row_scales[r]
  const int32_t* ids = nullptr;         // [R T, K]: global
  const float* weights = nullptr;       // [R T, K]
};

// Scratch bytes of DeviceExchange::wait() for batches of up to max_tokens tokens.
int64_t lane_batch_bytes(const MoePlan& plan, int64_t max_tokens);

class DeviceExchange {
 public:
  // `world`: of all ranks, with area.num_bytes of exchange memory. It must outlive the exchange.
  DeviceExchange(const DeviceExchangeSize& size, const DeviceCommunicator& world)
      : size_(size), world_(&world) {}

  const A2aShape& shape() const { return size_.shape; }
  // Most tokens of a batch of lanes.
  int64_t max_batch_tokens() const { return world_->size() * size_.max_tokens; }

  int64_t num_rounds(const ExchangeTokens& tokens) const;
  // Sends the tokens of round `round`; then, in this order: wait(), the experts on the batch, give_back() and
  // add(). All only enqueue.
  A2aRound send(const ExchangeTokens& tokens, int64_t round) const;
  // Rows that arrive as NVFP4 become bf16 values; with `takes_nvfp4`, their tensor scales are not applied but
  // returned (if each row has one). The batch is in the lanes and in scratch memory.
  LaneBatch wait(const A2aRound& round, bool takes_nvfp4, Arena& scratch) const;
  void give_back(const A2aRound& round, const A2aResults& results) const;
  // The round for a layer that gives its rows back itself (DeviceMoeArgs::give_back).
  A2aRound returning(const A2aRound& round) const;
  // out [num_own, H] f32, of all the layer's tokens: the round's are added to.
  void add(const A2aRound& round, float* out) const;

 private:
  DeviceExchangeSize size_;
  const DeviceCommunicator* world_;
};

}  // namespace fp4moe
