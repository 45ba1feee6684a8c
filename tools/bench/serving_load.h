// Sends requests to a server at given times with limited concurrency, and collects the responses.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "bench/serving_response.h"
#include "server/http/server_url.h"

namespace fp4moe {

struct LoadOptions {
  ServerUrl url;
  std::string path;  // such as "/v1/completions"
  std::string api_key;
  bool stream = true;
  double request_rate = std::numeric_limits<double>::infinity();  // per second, Poisson; inf: all at once
  int64_t max_concurrency = 0;                                    // 0: unlimited
  uint64_t seed = 1;                                              // for the send times
  double timeout_s = 600;  // a request fails if no byte arrives for this long
};

struct LoadRun {
  std::vector<ServingResponse> responses;  // in the order of the requests
  double seconds = 0;                      // from the start to the end of the last response
};

// Sends each body, which is JSON, on a separate connection. kUnavailable: the host name does not resolve.
Result<LoadRun> run_load(const LoadOptions& options, const std::vector<std::string>& bodies);

}  // namespace fp4moe
