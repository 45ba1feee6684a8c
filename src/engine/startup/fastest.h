// Chooses the fastest of several candidates.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>

namespace fp4moe {

// Times every candidate in rounds. `shipped`, which is one of the candidates, wins unless another is at least
// 3% faster. A candidate for which `seconds` returns a negative number is wrong and never wins. Returns
// nullopt if `has_time` returned false before all rounds were complete.
std::optional<size_t> fastest(std::span<const size_t> candidates, size_t shipped,
                              const std::function<double(size_t)>& seconds,
                              const std::function<bool()>& has_time);

}  // namespace fp4moe
