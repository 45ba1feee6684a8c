// Builds an HTML page without scripts or external resources: headings, tables and plots as inline SVG.
#pragma once

#include <string>
#include <vector>

namespace fp4moe {

class HtmlPage {
 public:
  explicit HtmlPage(const std::string& title);

  void heading(const std::string& text);
  void paragraph(const std::string& text);
  // Each row has one cell per column.
  void table(const std::vector<std::string>& columns, const std::vector<std::vector<std::string>>& rows);
  // Plots one line per series over x = 0, 1, ... (labelled `x_labels`); the y axis starts at 0.
  struct Series {
    std::string name;
    std::vector<double> values;
  };
  void line_plot(const std::string& title, const std::vector<std::string>& x_labels,
                 const std::vector<Series>& series);
  // Returns the whole page.
  std::string text() const { return body_ + "</main>\n"; }

 private:
  std::string body_;
};

}  // namespace fp4moe
