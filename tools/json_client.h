// A blocking HTTP/1.1 client for JSON, with one connection that is kept between calls.
#pragma once

#include <memory>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

class JsonClient {
 public:
  // A URL as parse_server_url() takes.
  static Result<JsonClient> make(const std::string& base_url, const std::string& api_key);
  JsonClient(JsonClient&&) noexcept;
  JsonClient& operator=(JsonClient&&) noexcept;
  ~JsonClient();

  // The body of a 200 answer. kUnavailable: no connection, or it broke; kInternal: another status.
  // A connection that the server closed in between is opened again once.
  Result<std::string> get(const std::string& path);
  Result<std::string> post(const std::string& path, const std::string& body);

 private:
  struct State;
  explicit JsonClient(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace fp4moe
