#include "inspect/html_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "io/jinja/text.h"

namespace fp4moe {
namespace {

using jinja::escape_html;

constexpr const char* kStyle =
    "body{font:15px/1.5 system-ui,sans-serif;margin:0;color:#1c2128;background:#fff}"
    "main{max-width:60rem;margin:auto;padding:1.5rem}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "td,th{border:1px solid #d0d7de;padding:.25rem .6rem;text-align:left;vertical-align:top;"
    "white-space:pre-wrap}th{background:#f6f8fa}"
    "svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}";
// Distinguishable with red-green colour blindness (Okabe and Ito).
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};

// Rounds up to 1, 2 or 5 times a power of ten.
double round_up(double x) {
  if (!(x > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(x)));
  for (const double step : {1.0, 2.0, 5.0})
    if (x <= step * power * (1 + 1e-9)) return step * power;
  return 10 * power;
}

}  // namespace

HtmlPage::HtmlPage(const std::string& title) {
  const std::string safe = escape_html(title);
  body_ = fmt::format(
      "<!doctype html>\n<html lang=en><meta charset=utf-8>"
      "<meta name=viewport content=\"width=device-width\"><title>{0}</title><style>{1}</style>\n"
      "<main><h1>{0}</h1>\n",
      safe, kStyle);
}

void HtmlPage::heading(const std::string& text) { body_ += "<h2>" + escape_html(text) + "</h2>\n"; }
void HtmlPage::paragraph(const std::string& text) { body_ += "<p>" + escape_html(text) + "</p>\n"; }

void HtmlPage::table(const std::vector<std::string>& columns,
                     const std::vector<std::vector<std::string>>& rows) {
  body_ += "<table><tr>";
  for (const std::string& column : columns) body_ += "<th>" + escape_html(column);
  for (const auto& row : rows) {
    body_ += "\n<tr>";
    for (const std::string& cell : row) body_ += "<td>" + escape_html(cell);
  }
  body_ += "</table>\n";
}

void HtmlPage::line_plot(const std::string& title, const std::vector<std::string>& x_labels,
                         const std::vector<Series>& series) {
  constexpr double kLeft = 70, kRight = 20, kTop = 30, kWidth = 760, kHeight = 280, kBottom = 40;
  double most = 0;
  for (const Series& s : series)
    for (const double v : s.values) most = std::max(most, std::isfinite(v) ? v : 0);
  most = round_up(most);
  const auto last = static_cast<double>(std::max<size_t>(x_labels.size(), 2) - 1);
  const auto x = [&](size_t i) { return kLeft + (kWidth - kLeft - kRight) * static_cast<double>(i) / last; };
  const auto y = [&](double v) { return kHeight - kBottom - (kHeight - kBottom - kTop) * v / most; };
  body_ += fmt::format("<svg viewBox=\"0 0 {} {}\" width={} role=img aria-label=\"{}\">\n", kWidth,
                       kHeight + 20.0 * static_cast<double>(series.size()), kWidth, escape_html(title));
  body_ += fmt::format("<text x={} y=16 font-weight=600>{}</text>\n", kLeft, escape_html(title));
  for (int i = 0; i <= 4; ++i) {
    const double v = most * i / 4;
    body_ += fmt::format(
        "<line x1={0} x2={1} y1={2:.1f} y2={2:.1f} stroke=\"#d0d7de\"/>"
        "<text x={3} y={4:.1f} text-anchor=end>{5:.3g}</text>\n",
        kLeft, kWidth - kRight, y(v), kLeft - 6, y(v) + 4, v);
  }
  const size_t step = x_labels.size() / 12 + 1;
  for (size_t i = 0; i < x_labels.size(); i += step)
    body_ += fmt::format("<text x={:.1f} y={} text-anchor=middle>{}</text>\n", x(i), kHeight - kBottom + 18,
                         escape_html(x_labels[i]));
  for (size_t s = 0; s < series.size(); ++s) {
    const char* colour = kColours[s % std::size(kColours)];
    const char* dashes = s < std::size(kColours) ? "" : " stroke-dasharray=\"6 4\"";
    std::string points, dots;
    for (size_t i = 0; i < series[s].values.size(); ++i) {
      const double v = series[s].values[i];
      if (!std::isfinite(v)) continue;
      points += fmt::format("{:.1f},{:.1f} ", x(i), y(v));
      dots += fmt::format("<circle cx={:.1f} cy={:.1f} r=3 fill=\"{}\"/>", x(i), y(v), colour);
    }
    body_ += fmt::format("<polyline fill=none stroke=\"{}\" stroke-width=2{} points=\"{}\"/>{}\n", colour,
                         dashes, points, dots);
    const double at = kHeight + 20.0 * static_cast<double>(s);
    body_ += fmt::format(
        "<line x1={} x2={} y1={} y2={} stroke=\"{}\" stroke-width=\"3\"{}/><text x={} y={}>{}</text>\n",
        kLeft, kLeft + 22, at - 4, at - 4, colour, dashes, kLeft + 30, at, escape_html(series[s].name));
  }
  body_ += "</svg>\n";
}

}  // namespace fp4moe
