#include "server/api/load_api.h"

#include <charconv>
#include <string_view>

#include "server/http/errors.h"
#include "server/observe/load_report.h"

namespace fp4moe {

namespace {

// Parses the query's last "window=".
Result<double> read_window(std::string_view query) {
  double window = LoadWatch::kLongestWindow;
  while (!query.empty()) {
    const std::string_view field = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), field.size() + 1));
    if (!field.starts_with("window=")) continue;
    const std::string_view value = field.substr(7);
    double seconds = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), seconds);
    const bool is_number = parsed.ec == std::errc() && parsed.ptr == value.data() + value.size();
    if (value != "all" && !(is_number && seconds > 0 && seconds <= LoadWatch::kLongestWindow))
      return invalid_argument("window must be \"all\" or a number of seconds above 0 and at most 60, got \"" +
                              std::string(value.substr(0, 80)) + "\"");
    window = value == "all" ? 0 : seconds;
  }
  return window;
}

}  // namespace

HttpResponse expert_load_response(const LoadWatch& watch, const ModelInfo& info, const HttpRequest& request,
                                  LoadForm form) {
  const Result<double> asked = read_window(request.query);
  if (!asked.ok()) return error_response(asked.status(), "window");
  const LoadWatch::Window window = watch.last(*asked);
  if (!window.load.failure.empty()) return error_response(internal_error(window.load.failure));
  HttpResponse response;
  response.extra_headers = "Cache-Control: no-store\r\n";
  const LoadReport report{info, *asked, window};
  if (form == LoadForm::kJson) {
    response.body = to_text(load_json(report));
    return response;
  }
  response.content_type = "image/svg+xml; charset=utf-8";
  response.extra_headers +=
      "Content-Security-Policy: default-src 'none'\r\nX-Content-Type-Options: nosniff\r\n";
  response.body = load_svg(report);
  return response;
}

}  // namespace fp4moe
