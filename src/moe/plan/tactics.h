// Tactics: the choices that autotuning makes for a runner. On a CPU they are chunk sizes, which affect only
// speed and never a bit of the results; on a GPU they select the kernels that run.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace fp4moe {

// Weight bytes per chunk of the panel runner: large enough to amortise scheduling a chunk and the prefetches
// past its end (8 KiB), small enough to stay in the L2 cache while an expert's rows pass over the chunk. The
// first is the default without autotuning.
constexpr std::array<int64_t, 4> kChunkBytes = {384 << 10, 96 << 10, 24 << 10, 1536 << 10};

enum class TacticOp : uint8_t { kGateUp, kDown };
constexpr int kNumTacticOps = 2;

// Buckets by rows per active expert: up to 1, up to 4, up to 32, more than 32. The last is timed with 128
// rows.
constexpr std::array<int64_t, 4> kTacticRows = {1, 4, 32, 128};
constexpr int tactic_bucket(int64_t rows_per_expert) {
  int bucket = 0;
  while (bucket + 1 < static_cast<int>(kTacticRows.size()) && rows_per_expert > kTacticRows[bucket]) ++bucket;
  return bucket;
}

struct Tactics {
  std::array<std::array<uint8_t, kTacticRows.size()>, kNumTacticOps> chosen = {};  // indices of kChunkBytes

  int64_t chunk_bytes(TacticOp op, int64_t rows_per_expert) const {
    return kChunkBytes[chosen[static_cast<size_t>(op)][static_cast<size_t>(tactic_bucket(rows_per_expert))]];
  }
  bool operator==(const Tactics&) const = default;
};

// GPU: the tactic of a layer of routed experts, chosen by number of tokens; an index of
// DeviceMoeOps::tactics. Tactics differ in the last bits of the results, so steps of the same size always use
// the same tactic, whether they run in a graph or not.
struct DeviceTactics {
  std::vector<int64_t> buckets;  // largest number of tokens of each bucket, ascending
  std::vector<uint8_t> chosen;   // tactic of each bucket

  // No value: the table's default rule applies.
  std::optional<size_t> of(int64_t num_tokens) const {
    const auto bucket = std::lower_bound(buckets.begin(), buckets.end(), num_tokens);
    if (bucket == buckets.end()) return std::nullopt;
    return chosen[static_cast<size_t>(bucket - buckets.begin())];
  }
  bool operator==(const DeviceTactics&) const = default;
};

}  // namespace fp4moe
