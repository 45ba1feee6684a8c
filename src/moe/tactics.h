// Tactics: how a runner does its work. On a CPU how it is cut into chunks, which decides about time alone,
// never about a bit of a result; on a GPU which kernels do it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace fp4moe {

// What a chunk of the panels runner reads of the weights, in bytes: large beside what handing a chunk out
// costs and what prefetches fetch past its end (8 KiB), small enough to stay in the L2 cache while an
// expert's rows pass over them. The first is what runs where nothing was timed.
constexpr std::array<int64_t, 4> kChunkBytes = {384 << 10, 96 << 10, 24 << 10, 1536 << 10};

enum class TacticOp : uint8_t { kGateUp, kDown };
constexpr int kNumTacticOps = 2;

// By rows of an active expert: up to 1, 4, 32, more.
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

// Which tactic of its table (kernels/device_moe.h) a GPU's layer of routed experts takes, by its tokens. They
// differ in last bits, so that steps of one size, in a graph or not, have the same one.
struct DeviceTactics {
  std::vector<int64_t> buckets;  // the most tokens of each, ascending
  std::vector<uint8_t> chosen;   // of each bucket: an index of the table

  // None: the table's own rule says.
  std::optional<size_t> of(int64_t num_tokens) const {
    const auto bucket = std::lower_bound(buckets.begin(), buckets.end(), num_tokens);
    if (bucket == buckets.end()) return std::nullopt;
    return chosen[static_cast<size_t>(bucket - buckets.begin())];
  }
  bool operator==(const DeviceTactics&) const = default;
};

}  // namespace fp4moe
