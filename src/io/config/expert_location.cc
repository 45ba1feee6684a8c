#include "io/config/expert_location.h"

#include "base/check.h"
#include "io/file.h"
#include "io/json_document.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxLocationBytes = int64_t{256} << 20;
constexpr const char *kMapKey = "physical_to_logical_map", *kCountKey = "logical_count",
                     *kLayersKey = "layers";

Status wrong_size(const std::string& what, size_t size, int64_t legal) {
  return invalid_argument(what + " has " + std::to_string(size) +
                          " elements; legal: " + std::to_string(legal));
}

// An array of `count` integers from 0 to `max`.
template <class Int>
Result<std::vector<Int>> read_row(const Json& row, const std::string& what, int64_t count, int64_t max) {
  if (!row.is_array()) return invalid_argument(what + " is " + json_brief(row) + ", not an array");
  if (static_cast<int64_t>(row.size()) != count) return wrong_size(what, row.size(), count);
  std::vector<Int> values;
  for (const Json& value : row) {
    if (!value.is_number_integer() || value < 0 || value > max)
      return invalid_argument(what + "[" + std::to_string(values.size()) + "] is " + json_brief(value) +
                              "; legal: integers from 0 to " + std::to_string(max));
    values.push_back(static_cast<Int>(value.get<int64_t>()));
  }
  return values;
}

template <class Int>
Result<std::vector<std::vector<Int>>> read_rows(const Json& rows, const std::string& what, int64_t num_rows,
                                                int64_t count, int64_t max) {
  if (!rows.is_array()) return invalid_argument(what + " is " + json_brief(rows) + ", not an array");
  if (static_cast<int64_t>(rows.size()) != num_rows) return wrong_size(what, rows.size(), num_rows);
  std::vector<std::vector<Int>> out;
  for (const Json& row : rows) {
    FP4MOE_ASSIGN_OR_RETURN(auto values,
                            read_row<Int>(row, what + "[" + std::to_string(out.size()) + "]", count, max));
    out.push_back(std::move(values));
  }
  return out;
}

constexpr int64_t kMaxLoad = int64_t{1} << 53;  // of one expert; sums are kept below 2^62

bool is_deep(const Json& counts) {
  return counts.is_array() && !counts.empty() && counts[0].is_array() && !counts[0].empty() &&
         counts[0][0].is_array();
}

Result<std::vector<std::vector<int64_t>>> read_counts(const Json& counts, const ExpertLocationShape& shape) {
  const auto read = [&](const Json& rows, const std::string& what) {
    return read_rows<int64_t>(rows, what, shape.num_layers, shape.num_logical, kMaxLoad);
  };
  if (!is_deep(counts)) return read(counts, kCountKey);
  std::vector<std::vector<int64_t>> sums;
  for (size_t pass = 0; pass < counts.size(); ++pass) {
    FP4MOE_ASSIGN_OR_RETURN(const auto rows,
                            read(counts[pass], std::string(kCountKey) + "[" + std::to_string(pass) + "]"));
    if (sums.empty()) sums.assign(rows.size(), std::vector<int64_t>(rows[0].size()));
    for (size_t layer = 0; layer < rows.size(); ++layer)
      for (size_t e = 0; e < rows[layer].size(); ++e) {
        sums[layer][e] += rows[layer][e];
        if (sums[layer][e] > kMaxLoad)
          return invalid_argument(std::string(kCountKey) + ": the sum for expert " + std::to_string(e) +
                                  " of layer " + std::to_string(layer) + " exceeds 2^53");
      }
  }
  return sums;
}

Result<std::vector<std::vector<int64_t>>> read_load_report(const Json& layers,
                                                           const ExpertLocationShape& shape) {
  if (!layers.is_array()) return invalid_argument("layers is " + json_brief(layers) + ", not an array");
  std::vector<std::vector<int64_t>> loads(static_cast<size_t>(shape.num_layers),
                                          std::vector<int64_t>(static_cast<size_t>(shape.num_logical)));
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string what = "layers[" + std::to_string(i) + "]";
    const Json& entry = layers[i];
    if (!entry.is_object() || !entry.contains("layer") || !entry.contains("experts"))
      return invalid_argument(what + " is " + json_brief(entry) + R"(, without "layer" and "experts")");
    const Json& layer = entry["layer"];
    if (!layer.is_number_integer() || layer < 0 || layer >= shape.num_layers)
      return invalid_argument(what + ".layer is " + json_brief(layer) + "; legal: 0 to " +
                              std::to_string(shape.num_layers - 1));
    FP4MOE_ASSIGN_OR_RETURN(loads[layer.get<size_t>()], read_row<int64_t>(entry["experts"], what + ".experts",
                                                                          shape.num_logical, kMaxLoad));
  }
  return loads;
}

Result<ExpertLocation> read_object(const Json& object, const ExpertLocationShape& shape) {
  const std::string legal = std::string("; legal: an object with one of \"") + kMapKey + "\", \"" +
                            kCountKey + "\" and \"" + kLayersKey + "\" (of /expert_load)";
  if (!object.is_object()) return invalid_argument(json_brief(object) + legal);
  int num_keys = 0;
  for (const char* key : {kMapKey, kCountKey, kLayersKey}) num_keys += object.contains(key) ? 1 : 0;
  if (num_keys != 1) return invalid_argument("has " + std::to_string(num_keys) + " of these keys" + legal);
  ExpertLocation location;
  if (object.contains(kLayersKey)) {
    FP4MOE_ASSIGN_OR_RETURN(location.loads, read_load_report(object[kLayersKey], shape));
    return location;
  }
  for (const auto& [key, value] : object.items())
    if (key != kMapKey && key != kCountKey) return invalid_argument("unknown key \"" + key + "\"" + legal);
  if (object.contains(kCountKey)) {
    FP4MOE_ASSIGN_OR_RETURN(location.loads, read_counts(object[kCountKey], shape));
    return location;
  }
  FP4MOE_ASSIGN_OR_RETURN(location.logical_of, read_rows<int32_t>(object[kMapKey], kMapKey, shape.num_layers,
                                                                  shape.num_physical, shape.num_logical - 1));
  return location;
}

}  // namespace

Result<ExpertLocation> read_expert_location(const std::string& source, const ExpertLocationShape& shape) {
  std::string text = source;
  if (!source.starts_with("{")) {
    if (source.ends_with(".pt"))
      return unsupported("a PyTorch file; legal: the same content as JSON, or trivial");
    FP4MOE_ASSIGN_OR_RETURN(text, read_text_file(source, kMaxLocationBytes));
  }
  FP4MOE_ASSIGN_OR_RETURN(const Json document, parse_json(text, "the expert location"));
  return read_object(document, shape);
}

}  // namespace fp4moe
