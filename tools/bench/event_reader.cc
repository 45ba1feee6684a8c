#include "bench/event_reader.h"

namespace fp4moe {

std::vector<std::string> EventReader::read(std::string_view bytes) {
  std::vector<std::string> events;
  for (const char c : bytes) {
    const bool is_lf_of_crlf = after_cr_ && c == '\n';
    after_cr_ = c == '\r';
    if (is_lf_of_crlf) continue;
    if (c == '\n' || c == '\r') {
      end_line(events);
    } else {
      line_ += c;
    }
  }
  return events;
}

void EventReader::end_line(std::vector<std::string>& events) {
  constexpr std::string_view kData = "data:";
  if (line_.empty()) {
    if (has_data_) events.push_back(std::move(data_));
    data_.clear();
    has_data_ = false;
  } else if (line_.compare(0, kData.size(), kData) == 0) {
    const size_t from = kData.size() + (line_.size() > kData.size() && line_[kData.size()] == ' ' ? 1 : 0);
    if (has_data_) data_ += '\n';
    data_.append(line_, from);
    has_data_ = true;
  }
  line_.clear();
}

}  // namespace fp4moe
