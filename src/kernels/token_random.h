// The random number of a token: uniform in [0, 1), a pure function of the request's seed and the token's
// position. It is element `position` of the SplitMix64 stream that starts at the mixed seed.
#pragma once

#include <cstdint>

namespace fp4moe {

constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15u;

constexpr uint64_t split_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The state of the stream from which the number of the token at `position` is made.
constexpr uint64_t random_state(uint64_t seed, int64_t position) {
  return split_mix(seed) + kSplitMixStep * (static_cast<uint64_t>(position) + 1);
}
// The number of the token `distance` positions after that of `state`.
constexpr double random_number(uint64_t state, int64_t distance = 0) {
  const uint64_t bits = split_mix(state + kSplitMixStep * static_cast<uint64_t>(distance));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace fp4moe
