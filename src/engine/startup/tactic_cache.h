// The autotuner's cache file: one JSON object that maps each key to an array of arrays of numbers.
#pragma once

#include <cstddef>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "moe/plan/tactics.h"

namespace fp4moe {

// Returns --autotune-cache or, by default, a file in the user's cache folder; empty if there is no such
// folder.
std::string tactic_cache_path(const EngineConfig& flags);

// Reads `tactics`. Returns whether the file has the key; a missing file counts as empty. kDataLoss: the file
// is not a valid cache.
Result<bool> read_tactics(const std::string& path, const std::string& key, Tactics& tactics);
// The same for a GPU whose table has `num_tactics` tactics; the file's buckets must be those of `tactics`.
Result<bool> read_tactics(const std::string& path, const std::string& key, size_t num_tactics,
                          DeviceTactics& tactics);
Status write_tactics(const std::string& path, const std::string& key, const Tactics& tactics);
Status write_tactics(const std::string& path, const std::string& key, const DeviceTactics& tactics);

}  // namespace fp4moe
