// The expert load as a picture. Colour encodes tokens over the layer's mean on a log scale. All cells of one
// colour form one path, so the file stays small for 256 experts x 60 layers.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "server/observe/load_report.h"

namespace fp4moe {

namespace {

constexpr int kColours = 24;
constexpr double kTop = 8;  // multiple of the mean at which the colour scale ends
constexpr int kLeft = 64, kMapWidth = 768, kBarLeft = kLeft + kMapWidth + 16, kBarWidth = 120, kWidth = 1032;
constexpr int kMapTop = 64;

struct Rgb {
  double r, g, b;
};
// Cold to hot; the docs and the chat page use the same colours.
constexpr std::array<Rgb, 5> kRamp = {
    {{240, 242, 246}, {253, 205, 130}, {240, 110, 60}, {165, 20, 70}, {60, 10, 60}}};

std::string colour(double level) {
  const double at = level * (kRamp.size() - 1);
  const auto i = std::min(static_cast<size_t>(at), kRamp.size() - 2);
  const double f = at - static_cast<double>(i);
  const auto mix = [&](double a, double b) { return static_cast<int>(std::lround(a + (b - a) * f)); };
  char text[8];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", mix(kRamp[i].r, kRamp[i + 1].r),
                mix(kRamp[i].g, kRamp[i + 1].g), mix(kRamp[i].b, kRamp[i + 1].b));
  return text;
}

int colour_index(double over_mean) {
  const double level = std::min(1.0, std::log2(1 + over_mean) / std::log2(1 + kTop));
  return static_cast<int>(std::lround(level * (kColours - 1)));
}

std::string escape_xml(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string svg_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string text_at(double x, double y, const std::string& text, const char* more = "") {
  return "<text x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\"" + more + ">" + escape_xml(text) +
         "</text>\n";
}

// Cells of unit size; the enclosing group scales them.
std::string cells(const ExpertLoad& load, const std::vector<LayerBalance>& balance) {
  std::array<std::string, kColours> paths;
  for (size_t i = 0; i < load.tokens.size(); ++i) {
    const size_t row = i / static_cast<size_t>(load.num_experts),
                 col = i % static_cast<size_t>(load.num_experts);
    const double mean = balance[row].mean;
    const int c = mean > 0 ? colour_index(static_cast<double>(load.tokens[i]) / mean) : 0;
    paths[static_cast<size_t>(c)] += "M" + std::to_string(col) + " " + std::to_string(row) + "h1v1h-1z";
  }
  std::string out;
  for (int c = 0; c < kColours; ++c) {
    const std::string& path = paths[static_cast<size_t>(c)];
    if (path.empty()) continue;
    out += "<path fill=\"" + colour(c / (kColours - 1.0)) + "\" d=\"" + path + "\"/>\n";
  }
  return out;
}

std::string legend(double y) {
  std::string out;
  for (int c = 0; c < kColours; ++c)
    out += "<rect x=\"" + std::to_string(kLeft + 8 * c) + "\" y=\"" + svg_number(y) +
           "\" width=\"8\" height=\"10\" fill=\"" + colour(c / (kColours - 1.0)) + "\"/>\n";
  for (const int times : {0, 1, 2, 4, 8}) {
    const double x = kLeft + 4 + 8.0 * colour_index(times);
    out += text_at(x, y + 22, std::to_string(times), " text-anchor=\"middle\"");
  }
  return out + text_at(kLeft + 8 * kColours + 12, y + 10,
                       "tokens relative to the layer's mean (last colour: 8 or more)");
}

}  // namespace

std::string load_svg(const LoadReport& report) {
  const ExpertLoad& load = report.window.load;
  const std::vector<LayerBalance> balance = layer_balance(load);
  const auto rows = static_cast<int>(load.layers.size());
  const int row_height = std::clamp(rows > 0 ? 480 / rows : 24, 8, 24), map_height = rows * row_height;
  const int height = kMapTop + map_height + 56, label_step = row_height >= 12 ? 1 : 4;
  const std::string span = report.asked_seconds > 0
                               ? "the last " + std::to_string(std::lround(report.window.seconds)) + " s"
                               : "since the start";
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + std::to_string(kWidth) +
                    "\" height=\"" + std::to_string(height) + "\" viewBox=\"0 0 " + std::to_string(kWidth) +
                    " " + std::to_string(height) +
                    "\" font-family=\"system-ui, sans-serif\" font-size=\"11\" fill=\"#1c2330\">\n"
                    "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  svg += text_at(kLeft, 24, "Expert load of " + report.info.name + ", " + span,
                 " font-size=\"16\" font-weight=\"600\"");
  svg += text_at(kLeft, 52,
                 std::to_string(load.num_experts) + " experts, top " + std::to_string(report.info.top_k) +
                     "; rows are layers; " + std::to_string(load.counted_ranks) + " of " +
                     std::to_string(load.num_ranks) + " ranks");
  svg += text_at(kBarLeft, 52, "busiest expert / mean");
  svg += "<g transform=\"translate(" + std::to_string(kLeft) + " " + std::to_string(kMapTop) + ") scale(" +
         svg_number(static_cast<double>(kMapWidth) /
                    static_cast<double>(std::max<int64_t>(1, load.num_experts))) +
         " " + std::to_string(row_height) + ")\" shape-rendering=\"crispEdges\">\n" + cells(load, balance) +
         "</g>\n";
  double most = 1;
  for (const LayerBalance& layer : balance) most = std::max(most, layer.max_over_mean);
  for (int row = 0; row < rows; ++row) {
    const LayerBalance& layer = balance[static_cast<size_t>(row)];
    const double top = kMapTop + row * row_height, base = top + row_height / 2.0 + 4;
    if (row % label_step == 0)
      svg += text_at(kLeft - 8, base, std::to_string(load.layers[static_cast<size_t>(row)]),
                     " text-anchor=\"end\"");
    const double width = kBarWidth * layer.max_over_mean / most;
    svg += "<rect x=\"" + std::to_string(kBarLeft) + "\" y=\"" + svg_number(top + 1) + "\" width=\"" +
           svg_number(width) + "\" height=\"" + std::to_string(row_height - 2) + "\" fill=\"#8aa0c0\"/>\n";
    if (row % label_step == 0 && layer.tokens > 0)
      svg += text_at(kBarLeft + width + 4, base, svg_number(layer.max_over_mean));
  }
  return svg + legend(kMapTop + map_height + 16) + "</svg>\n";
}

}  // namespace fp4moe
