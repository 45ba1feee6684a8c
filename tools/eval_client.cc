#include "eval_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>

namespace fp4moe {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;

namespace {
constexpr uint64_t kMaxAnswerBytes = uint64_t{64} << 20;
constexpr size_t kMaxShownBytes = 500;  // of a failed answer's body in the error
}  // namespace

struct JsonClient::State {
  std::string host, port, prefix, api_key;
  asio::io_context io;
  tcp::socket socket{io};
  boost::beast::flat_buffer buffer;

  void connect(boost::system::error_code& error) {
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(host, port, error);
    if (error) return;
    asio::connect(socket, found, error);
    if (!error) socket.set_option(tcp::no_delay(true), error);
  }

  Result<std::string> call(http::verb verb, const std::string& path, const std::string& body) {
    http::request<http::string_body> request(verb, prefix + path, 11);
    request.set(http::field::host, host + ":" + port);
    request.set(http::field::content_type, "application/json");
    if (!api_key.empty()) request.set(http::field::authorization, "Bearer " + api_key);
    request.body() = body;
    request.prepare_payload();
    boost::system::error_code error;
    for (const bool kept : {true, false}) {
      if (kept && !socket.is_open()) continue;
      error = {};
      if (!socket.is_open()) connect(error);
      if (!error) http::write(socket, request, error);
      http::response_parser<http::string_body> parser;
      parser.body_limit(kMaxAnswerBytes);
      if (!error) http::read(socket, buffer, parser, error);
      if (!error) return result(parser.release());
      boost::system::error_code ignored;
      socket.close(ignored);
      buffer.clear();
    }
    return unavailable("http://" + host + ":" + port + prefix + path + ": " + error.message());
  }

  Result<std::string> result(http::response<http::string_body> response) {
    boost::system::error_code ignored;
    if (!response.keep_alive()) socket.close(ignored);
    if (response.result_int() == 200) return std::move(response.body());
    return internal_error("HTTP " + std::to_string(response.result_int()) + ": " +
                          response.body().substr(0, kMaxShownBytes));
  }
};

JsonClient::JsonClient(std::unique_ptr<State> state) : state_(std::move(state)) {}
JsonClient::JsonClient(JsonClient&&) noexcept = default;
JsonClient& JsonClient::operator=(JsonClient&&) noexcept = default;
JsonClient::~JsonClient() = default;

Result<JsonClient> JsonClient::make(const std::string& base_url, const std::string& api_key) {
  const std::string scheme = "http://";
  if (base_url.rfind(scheme, 0) != 0)
    return invalid_argument("base-url=" + base_url + " must look like http://host:port");
  auto state = std::make_unique<State>();
  const std::string rest = base_url.substr(scheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string place = rest.substr(0, slash);
  const size_t colon = place.rfind(':');
  state->host = place.substr(0, colon);
  state->port = colon == std::string::npos ? "80" : place.substr(colon + 1);
  state->prefix = rest.substr(slash);
  while (!state->prefix.empty() && state->prefix.back() == '/') state->prefix.pop_back();
  if (state->prefix == "/v1") state->prefix.clear();  // OpenAI clients are given the URL with it
  state->api_key = api_key;
  return JsonClient(std::move(state));
}

Result<std::string> JsonClient::get(const std::string& path) {
  return state_->call(http::verb::get, path, "");
}
Result<std::string> JsonClient::post(const std::string& path, const std::string& body) {
  return state_->call(http::verb::post, path, body);
}

}  // namespace fp4moe
