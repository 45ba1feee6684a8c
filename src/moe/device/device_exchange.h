// DeviceExchange: a GPU rank's a2a. It sends a layer's tokens to the ranks of their experts and returns the
// results (kernels/device_a2a.h). The number of rounds depends only on the number of tokens.
#pragma once

#include <cstdint>

#include "comm/device_communicator.h"
#include "kernels/device_a2a.h"
#include "kernels/ops.h"
#include "moe/plan/plan.h"

namespace fp4moe {

// Whether the plan's layers exchange rows: with several ranks, if there is an a2a or several data-parallel
// groups, or if inference is deterministic, which sums a token's results at its source.
bool exchanges_rows(const MoePlan& plan);

// Sizes for batches of up to max_group_rows tokens of a group. kDoesNotFit if --a2a-memory-budget is too
// small for one token; the message has the number of bytes needed.
struct DeviceExchangeSize {
  A2aShape shape;
  int64_t max_tokens = 0;  // per rank and round
  A2aArea area;
};
Result<DeviceExchangeSize> device_exchange_size(const MoePlan& plan, int64_t max_group_rows);

// A rank's tokens in a layer.
struct ExchangeTokens {
  int layer = 0;
  int64_t num_lane_tokens = 0;          // num_own of the rank with most tokens; the same on all ranks
  int64_t num_own = 0;                  // tokens of this rank
  int64_t first = 0;                    // index of the first of them in the group's batch
  const int32_t* num_filled = nullptr;  // [1] in device memory: tokens of the group's batch
                                        // that are not padding; null: all
  const bf16* x = nullptr;              // [num_own, H]
  const int32_t* ids = nullptr;         // [num_own, K]
  const float* weights = nullptr;       // [num_own, K]
  const float* nvfp4_scale = nullptr;   // A2aRound::nvfp4_scale
};

// The rows that arrived, as a layer's batch.
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
  // `world` connects all ranks and has area.num_bytes of exchange memory. It must outlive the exchange.
  DeviceExchange(const DeviceExchangeSize& size, const DeviceCommunicator& world)
      : size_(size), world_(&world) {}

  const A2aShape& shape() const { return size_.shape; }
  // Maximum number of tokens in a batch of lanes.
  int64_t max_batch_tokens() const { return world_->size() * size_.max_tokens; }

  int64_t num_rounds(const ExchangeTokens& tokens) const;
  A2aRound round_of(const ExchangeTokens& tokens, int64_t round) const;
  // Sends a round's tokens. The caller then calls wait(), runs the experts on the batch, and calls combine().
  // All of these only enqueue work.
  void send(const A2aRound& round, const ExchangeTokens& tokens) const;
  // Waits for the round's rows and decodes them to bf16. With `takes_nvfp4`, the tensor scales of NVFP4 rows
  // are not applied; if each row has one, they are returned. The batch is in the lanes and in scratch memory.
  LaneBatch wait(const A2aRound& round, bool takes_nvfp4, Arena& scratch) const;
  // Returns the results to the tokens' ranks and adds those of this rank's tokens to out, which has all of
  // its tokens of the layer, [num_own, H] f32.
  void combine(const A2aRound& round, const A2aResults& results, float* out) const;
  // Whether a kernel that sends each row to all ranks, before it knows the row's experts, may replace send().
  // If there are more than K peers, some of them cannot need the row.
  bool sends_to_all() const { return world_->size() - 1 <= size_.shape.top_k; }
  // The number of lanes of a round that is direct if the experts' ops can run it (DeviceMoeOps::direct),
  // between send_direct() and add_direct(); 0 if it cannot be direct. Depends only on sizes that are the same
  // on all ranks, also while a group rehearses with one rank.
  int64_t direct_lanes(const A2aRound& round) const;
  void send_direct(const A2aRound& round, const ExchangeTokens& tokens) const;
  void add_direct(const A2aRound& round, float* out) const;
  // The arguments of a layer that combines by itself (DeviceMoeArgs::exchange and out).
  A2aRound returning(const A2aRound& round) const;
  float* own_rows(const A2aRound& round, float* out) const;

 private:
  DeviceExchangeSize size_;
  const DeviceCommunicator* world_;
};

}  // namespace fp4moe
