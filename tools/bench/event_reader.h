// Parses server-sent events from bytes that arrive in arbitrary pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fp4moe {

class EventReader {
 public:
  // Returns the data of each event that these bytes complete. An empty line ends an event; lines end with LF,
  // CR or CRLF. Comments and fields other than data are ignored.
  std::vector<std::string> read(std::string_view bytes);

 private:
  void end_line(std::vector<std::string>& events);

  std::string line_, data_;
  bool has_data_ = false;
  bool after_cr_ = false;  // an LF that follows is part of the same line end
};

}  // namespace fp4moe
