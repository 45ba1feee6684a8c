// The file that keeps what the autotuner found: one JSON object, for each key an array of arrays of numbers.
#pragma once

#include <cstddef>
#include <string>

#include "fp4moe/config.h"
#include "fp4moe/status.h"
#include "moe/tactics.h"

namespace fp4moe {

// --autotune-cache, or a file in the user's cache folder; empty if there is none.
std::string tactic_cache_path(const EngineConfig& flags);

// Whether the file has the key. A file that is absent is empty; kDataLoss: it is no cache.
Result<bool> read_tactics(const std::string& path, const std::string& key, Tactics& tactics);
// The same of a GPU, whose table has `num_tactics`; the buckets are those of `tactics`, which the key names.
Result<bool> read_tactics(const std::string& path, const std::string& key, size_t num_tactics,
                          DeviceTactics& tactics);
Status write_tactics(const std::string& path, const std::string& key, const Tactics& tactics);
Status write_tactics(const std::string& path, const std::string& key, const DeviceTactics& tactics);

}  // namespace fp4moe
