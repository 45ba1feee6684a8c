#include "eval/json_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>

#include "server/http/excerpt.h"
#include "server/http/server_url.h"

namespace fp4moe {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;

namespace {
constexpr uint64_t kMaxAnswerBytes = uint64_t{64} << 20;
constexpr size_t kMaxShownBytes = 500;  // of a failed response's body, shown in the error
}  // namespace

struct JsonClient::State {
  ServerUrl url;
  std::string api_key;
  asio::io_context io;
  tcp::socket socket{io};
  boost::beast::flat_buffer buffer;

  void connect(boost::system::error_code& error) {
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(url.host, url.port, error);
    if (error) return;
    asio::connect(socket, found, error);
    if (!error) socket.set_option(tcp::no_delay(true), error);
  }

  Result<std::string> call(http::verb subcommand, const std::string& path, const std::string& body) {
    http::request<http::string_body> request(subcommand, url.prefix + path, 11);
    request.set(http::field::host, url.authority());
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
    return unavailable(url.text() + path + ": " + error.message());
  }

  Result<std::string> result(http::response<http::string_body> response) {
    boost::system::error_code ignored;
    if (!response.keep_alive()) socket.close(ignored);
    if (response.result_int() == 200) return std::move(response.body());
    return internal_error("HTTP " + std::to_string(response.result_int()) + ": " +
                          excerpt(response.body(), kMaxShownBytes));
  }
};

JsonClient::JsonClient(std::unique_ptr<State> state) : state_(std::move(state)) {}
JsonClient::JsonClient(JsonClient&&) noexcept = default;
JsonClient& JsonClient::operator=(JsonClient&&) noexcept = default;
JsonClient::~JsonClient() = default;

Result<JsonClient> JsonClient::make(const std::string& base_url, const std::string& api_key) {
  const auto url = parse_server_url(base_url);
  if (!url.ok()) return url.status();
  auto state = std::make_unique<State>();
  state->url = *url;
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
