// Which of several ways to do one thing is the fastest.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>

namespace fp4moe {

// Times every candidate in rounds. `shipped`, one of them, wins unless another is 3% faster; one whose
// `seconds` is negative was wrong and never wins. None: `has_time` ended before all were timed.
std::optional<size_t> fastest(std::span<const size_t> candidates, size_t shipped,
                              const std::function<double(size_t)>& seconds,
                              const std::function<bool()>& has_time);

}  // namespace fp4moe
