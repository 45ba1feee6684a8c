// An EAGLE-3 head in double precision, one row at a time with plain loops, written from the published
// formulas: the oracle of eagle3_head_test. Shares no code with the kernels or the model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fp4moe {

using OracleRow = std::vector<double>;

struct OracleHead {
  int64_t hidden = 0, target_hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, layers = 1;
  double eps = 1e-5, theta = 10000;
  bool norm_before_fc = false, fc_norm = false, norm_before_residual = false, norm_output = false;
  std::map<std::string, OracleRow> tensors;  // row-major; "embed_tokens" and "lm_head" may be the target's
};

// Keys and values of a sequence: [layer][position][kv_heads * head_dim].
struct OracleCache {
  std::vector<std::vector<OracleRow>> keys, values;
};

struct OracleOutput {
  OracleRow logits;  // [draft vocabulary]
  OracleRow output;  // [hidden]: what a chained row takes
};

// Runs the row at `position`, whose keys and values it writes to the cache; those of all positions before are
// there. `features`: the target's or, if `is_chained`, the head's output.
OracleOutput run_oracle(const OracleHead& head, int64_t token, int64_t position, const OracleRow& features,
                        bool is_chained, OracleCache& cache);

}  // namespace fp4moe
