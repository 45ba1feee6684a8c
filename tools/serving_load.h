// Sends requests to a server at given times, some at once, and collects the answers.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "server/server_url.h"
#include "serving_answer.h"

namespace fp4moe {

struct LoadOptions {
  ServerUrl url;
  std::string path;  // such as "/v1/completions"
  std::string api_key;
  bool stream = true;
  double request_rate = std::numeric_limits<double>::infinity();  // a second, Poisson; infinite: all at once
  int64_t max_concurrency = 0;                                    // 0: any number at once
  uint64_t seed = 1;                                              // of the times of sending
  double timeout_s = 600;                                         // without any byte; then the request fails
};

struct LoadRun {
  std::vector<ServingAnswer> answers;  // in the requests' order
  double seconds = 0;                  // from the first request to the last answer's end
};

// Each request, a JSON body, has a connection of its own. kUnavailable: the host has no address.
Result<LoadRun> run_load(const LoadOptions& options, const std::vector<std::string>& bodies);

}  // namespace fp4moe
