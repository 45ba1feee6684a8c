// Hello: the first message between two processes of a job, with the values on which they must agree.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fp4moe/status.h"

namespace fp4moe {

struct Hello {
  int32_t process = 0, num_processes = 1;
  int32_t num_ranks = 1;
  uint32_t first_signal = 0;
  int64_t heap_bytes = 0;
  uint64_t pid_space = 0;  // pid_space_id()
  int64_t pid = 0;
  std::string version;  // of fp4moe
  std::string config;   // JobOptions::config_text
  std::string data;     // JobOptions::data; not compared
};
constexpr int64_t kMaxHelloText = 256 << 10;  // limit for each of version, config and data

std::vector<uint8_t> encode_hello(const Hello& hello);
// kDataLoss if the bytes are not a valid hello.
Result<Hello> decode_hello(std::span<const uint8_t> bytes);
// Compares the values on which processes must agree. kInvalidArgument: the message names the first difference
// and both values.
Status check_same(const Hello& mine, const Hello& theirs);

}  // namespace fp4moe
