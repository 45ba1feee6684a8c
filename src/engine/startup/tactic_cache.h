// The autotuner's cache file: one JSON object that maps each key to an array of arrays of numbers.
#pragma once

#include <cstddef>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "moe/plan/tactics.h"

namespace fp4moe {

// --autotune-cache, or a file in the user's cache folder; empty if neither exists.
std::string tactic_cache_path(const EngineConfig& flags);

// Returns whether the file has the key. A missing file counts as empty; kDataLoss: it is not a valid cache.
Result<bool> read_tactics(const std::string& path, const std::string& key, Tactics& tactics);
// The same for a GPU whose table has `num_tactics` tactics; the buckets must be those of `tactics`.
Result<bool> read_tactics(const std::string& path, const std::string& key, size_t num_tactics,
                          DeviceTactics& tactics);
Status write_tactics(const std::string& path, const std::string& key, const Tactics& tactics);
Status write_tactics(const std::string& path, const std::string& key, const DeviceTactics& tactics);

}  // namespace fp4moe
