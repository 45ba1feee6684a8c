// Parses server-sent events from bytes that arrive in arbitrary pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fp4moe {

class EventReader {
 public:
  // Returns the data of each event that these bytes complete; an empty line ends an event. Lines end with LF,
  // CR or CRLF; fields other than data, and comments, are ignored.
  std::vector<std::string> read(std::string_view bytes);

 private:
  void end_line(std::vector<std::string>& events);

  std::string line_, data_;
  bool has_data_ = false;
  bool after_cr_ = false;  // an LF that follows belongs to the CR
};

}  // namespace fp4moe
