// A blocking HTTP/1.1 client for JSON with one keep-alive connection.
#pragma once

#include <memory>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

class JsonClient {
 public:
  // `base_url` as for parse_server_url().
  static Result<JsonClient> make(const std::string& base_url, const std::string& api_key);
  JsonClient(JsonClient&&) noexcept;
  JsonClient& operator=(JsonClient&&) noexcept;
  ~JsonClient();

  // Each returns the body of a 200 response. kUnavailable: connecting failed or the connection broke;
  // kInternal: another status. If the call fails on the kept connection, it is retried once on a new
  // connection.
  Result<std::string> get(const std::string& path);
  Result<std::string> post(const std::string& path, const std::string& body);

 private:
  struct State;
  explicit JsonClient(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
