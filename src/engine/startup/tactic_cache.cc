#include "engine/startup/tactic_cache.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "engine/startup/user_cache.h"
#include "io/file.h"
#include "io/json_document.h"

namespace fp4moe {
namespace {

Result<nlohmann::json> read_cache(const std::string& path) {
  constexpr int64_t kMaxBytes = 1 << 20;
  std::error_code absent;  // a device or pipe, such as /dev/null, holds no tactics
  if (!std::filesystem::is_regular_file(path, absent) && !std::filesystem::is_directory(path, absent))
    return nlohmann::json::object();
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxBytes));
  // parse_json limits the nesting, because nlohmann's dump() and copying, which write_entry() needs, recurse.
  FP4MOE_ASSIGN_OR_RETURN(nlohmann::json root, parse_json(text, "'" + path + "'"));
  if (!root.is_object()) return data_loss("'" + path + "' is not a JSON object");
  return root;
}

Status broken(const std::string& path, const std::string& key) {
  return data_loss("'" + path + "' holds no valid tactics under \"" + key + "\"");
}

// Returns the key's entry as rows of `columns` numbers each; no rows if the key is missing.
Result<std::vector<std::vector<int64_t>>> read_entry(const std::string& path, const std::string& key,
                                                     size_t rows, size_t columns) {
  FP4MOE_ASSIGN_OR_RETURN(const nlohmann::json root, read_cache(path));
  std::vector<std::vector<int64_t>> read;
  const auto entry = root.find(key);
  if (entry == root.end()) return read;
  if (!entry->is_array() || entry->size() != rows) return broken(path, key);
  for (const nlohmann::json& row : *entry) {
    if (!row.is_array() || row.size() != columns) return broken(path, key);
    std::vector<int64_t>& numbers = read.emplace_back();
    for (const nlohmann::json& number : row) {
      if (!number.is_number_unsigned()) return broken(path, key);
      numbers.push_back(number.get<int64_t>());
    }
  }
  return read;
}

// Returns false if a number is not an index below `count`.
bool take_indices(const std::vector<int64_t>& numbers, size_t count, uint8_t* out) {
  for (const int64_t number : numbers) {
    if (number < 0 || number >= static_cast<int64_t>(count)) return false;
    *out++ = static_cast<uint8_t>(number);
  }
  return true;
}

// If several processes write at the same time, the last file wins as a whole; lost entries are timed again.
Status write_entry(const std::string& path, const std::string& key, nlohmann::json entry) {
  Result<nlohmann::json> old = read_cache(path);
  nlohmann::json root = old.ok() ? *old : nlohmann::json::object();
  root[key] = std::move(entry);
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  return write_text_file(path, root.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace

std::string tactic_cache_path(const EngineConfig& flags) {
  if (!flags.autotune_cache.empty()) return flags.autotune_cache;
  const std::string folder = user_cache_folder();
  return folder.empty() ? "" : folder + "/tactics.json";
}

Result<bool> read_tactics(const std::string& path, const std::string& key, Tactics& tactics) {
  FP4MOE_ASSIGN_OR_RETURN(const auto rows, read_entry(path, key, kNumTacticOps, kTacticRows.size()));
  if (rows.empty()) return false;
  Tactics read;
  for (size_t op = 0; op < rows.size(); ++op)
    if (!take_indices(rows[op], kChunkBytes.size(), read.chosen[op].data())) return broken(path, key);
  tactics = read;
  return true;
}

Result<bool> read_tactics(const std::string& path, const std::string& key, size_t num_tactics,
                          DeviceTactics& tactics) {
  FP4MOE_ASSIGN_OR_RETURN(const auto rows, read_entry(path, key, 2, tactics.buckets.size()));
  if (rows.empty()) return false;
  std::vector<uint8_t> chosen(tactics.buckets.size());
  if (rows[0] != tactics.buckets || !take_indices(rows[1], num_tactics, chosen.data()))
    return broken(path, key);
  tactics.chosen = std::move(chosen);
  return true;
}

Status write_tactics(const std::string& path, const std::string& key, const Tactics& tactics) {
  return write_entry(path, key, tactics.chosen);
}

Status write_tactics(const std::string& path, const std::string& key, const DeviceTactics& tactics) {
  return write_entry(path, key, {tactics.buckets, tactics.chosen});
}

}  // namespace fp4moe
