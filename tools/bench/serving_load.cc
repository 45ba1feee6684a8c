#include "bench/serving_load.h"

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
#include <cmath>
#include <random>

#include "server/http/excerpt.h"

namespace fp4moe {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kNoThrow = asio::as_tuple(asio::use_awaitable);
constexpr uint64_t kMaxResponseBytes = uint64_t{1} << 30;
constexpr size_t kMaxShownErrorBytes = 300;  // of a failed response's body, shown in the error

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs on one thread; each connection is a coroutine.
class Load {
 public:
  Load(const LoadOptions& options, const std::vector<std::string>& bodies)
      : options_(options), bodies_(bodies), responses_(bodies.size()), sent_at_s_(bodies.size()) {
    std::mt19937_64 random(options.seed);
    double at = 0;
    for (double& sent_at : sent_at_s_) {
      sent_at = at;
      const double uniform = (static_cast<double>(random() >> 11) + 1) * 0x1p-53;  // in (0, 1]
      if (std::isfinite(options.request_rate)) at -= std::log(uniform) / options.request_rate;
    }
  }

  Result<LoadRun> run() {
    boost::system::error_code error;
    endpoints_ = tcp::resolver(io_).resolve(options_.url.host, options_.url.port, error);
    if (error) return unavailable(options_.url.text() + ": " + error.message());
    const auto count = static_cast<int64_t>(bodies_.size());
    const int64_t at_once = options_.max_concurrency > 0 ? std::min(options_.max_concurrency, count) : count;
    start_ = Clock::now();
    for (int64_t i = 0; i < at_once; ++i) asio::co_spawn(io_, ask_on(), asio::detached);
    io_.run();
    return LoadRun{std::move(responses_), seconds_since(start_)};
  }

 private:
  // A worker coroutine: sends one request after another until all are sent.
  asio::awaitable<void> ask_on() {
    asio::steady_timer timer(io_);
    while (next_ < bodies_.size()) {
      const size_t i = next_++;
      timer.expires_at(
          start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(sent_at_s_[i])));
      co_await timer.async_wait(kNoThrow);
      responses_[i] = co_await ask(bodies_[i]);
    }
  }

  asio::awaitable<ServingResponse> ask(const std::string& body) {
    const Clock::time_point sent = Clock::now();
    ServingResponse failed;
    beast::tcp_stream stream(io_);
    beast::flat_buffer buffer;
    http::response_parser<http::string_body> parser;
    parser.body_limit(kMaxResponseBytes);
    expect_news(stream);
    auto error = std::get<0>(co_await stream.async_connect(endpoints_, kNoThrow));
    if (!error) {
      stream.socket().set_option(tcp::no_delay(true), error);
      const http::request<http::string_body> request = make_request(body);
      error = std::get<0>(co_await http::async_write(stream, request, kNoThrow));
    }
    expect_news(stream);
    if (!error) error = std::get<0>(co_await http::async_read_header(stream, buffer, parser, kNoThrow));
    if (error) {
      failed.error = broken(error);
    } else if (options_.stream && parser.get().result() == http::status::ok) {
      co_return co_await read_stream(stream, buffer, parser, sent);
    } else {
      expect_news(stream);
      error = std::get<0>(co_await http::async_read(stream, buffer, parser, kNoThrow));
      const http::response<http::string_body>& response = parser.get();
      if (!error && response.result() == http::status::ok)
        co_return read_whole_response(response.body(), seconds_since(sent));
      failed.error = error ? broken(error)
                           : internal_error("HTTP " + std::to_string(response.result_int()) + ": " +
                                            excerpt(response.body(), kMaxShownErrorBytes));
    }
    failed.latency_s = seconds_since(sent);
    co_return failed;
  }

  asio::awaitable<ServingResponse> read_stream(beast::tcp_stream& stream, beast::flat_buffer& buffer,
                                               http::response_parser<http::string_body>& parser,
                                               Clock::time_point sent) {
    ResponseReader reader;
    parser.eager(false);  // return the bytes that have arrived instead of waiting for the whole body
    beast::error_code error;
    while (!error && !parser.is_done() && !reader.is_over()) {
      expect_news(stream);
      error = std::get<0>(co_await http::async_read_some(stream, buffer, parser, kNoThrow));
      const std::string bytes = std::exchange(parser.get().body(), {});
      reader.read(bytes, seconds_since(sent));
    }
    co_return reader.finish(error ? broken(error) : Status(), seconds_since(sent));
  }

  void expect_news(beast::tcp_stream& stream) const {
    stream.expires_after(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout_s)));
  }

  http::request<http::string_body> make_request(const std::string& body) const {
    const ServerUrl& url = options_.url;
    http::request<http::string_body> request(http::verb::post, url.prefix + options_.path, 11);
    request.set(http::field::host, url.authority());
    request.set(http::field::content_type, "application/json");
    if (!options_.api_key.empty()) request.set(http::field::authorization, "Bearer " + options_.api_key);
    request.body() = body;
    request.prepare_payload();
    return request;
  }

  Status broken(beast::error_code error) const {
    if (error != beast::error::timeout) return unavailable("the connection broke: " + error.message());
    return unavailable("no bytes received for " + std::to_string(std::lround(options_.timeout_s)) + " s");
  }

  const LoadOptions& options_;
  const std::vector<std::string>& bodies_;
  asio::io_context io_{1};
  tcp::resolver::results_type endpoints_;
  Clock::time_point start_;
  size_t next_ = 0;
  std::vector<ServingResponse> responses_;
  std::vector<double> sent_at_s_;  // relative to the start
};

}  // namespace

Result<LoadRun> run_load(const LoadOptions& options, const std::vector<std::string>& bodies) {
  return Load(options, bodies).run();
}

}  // namespace fp4moe
