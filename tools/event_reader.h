// Server-sent events out of bytes that come in any pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fp4moe {

class EventReader {
 public:
  // The data of each event that these bytes complete; an event ends with an empty line. Lines end with LF, CR
  // or both; other fields than data and comments are dropped.
  std::vector<std::string> read(std::string_view bytes);

 private:
  void end_line(std::vector<std::string>& events);

  std::string line_, data_;
  bool has_data_ = false;
  bool after_cr_ = false;  // an LF that comes next belongs to it
};

}  // namespace fp4moe
