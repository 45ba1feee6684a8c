// Any bytes from a node to a router: as an HTTP response in pieces of any size, and as /server_info.
#include <algorithm>

#include "server/router/node_response.h"
#include "server/router/upstream_parser.h"

namespace {

using namespace fp4moe;

// Checks that the message is one line of printable ASCII, not much longer than the text it quotes.
void check_message(const Status& status) {
  const std::string& message = status.message();
  const auto is_plain = [](char c) { return c >= ' ' && c < '\x7f'; };
  if (status.ok() || message.empty()) __builtin_trap();
  if (message.size() > 600 || !std::all_of(message.begin(), message.end(), is_plain)) __builtin_trap();
}

void check_info(std::string_view body) {
  const Result<NodeInfo> info = read_node_info(body);
  if (!info.ok()) return check_message(info.status());
  if (info->bootstrap_port < 0 || info->bootstrap_port > 65535) __builtin_trap();
  for (const char* role : {"prefill", "decode"})
    if (const Status status = check_node_info(*info, role, false); !status.ok()) check_message(status);
}

}  // namespace

// The first byte selects whether the request was HEAD, the body limit, and the size of the pieces.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  check_info(bytes);
  if (bytes.empty()) return 0;
  const auto choice = static_cast<uint8_t>(bytes[0]);
  bytes.remove_prefix(1);
  const uint64_t max_body_bytes = (choice & 2) != 0 ? 64 : 0;
  const size_t piece = size_t{1} << (choice >> 4);
  UpstreamParser parser((choice & 1) != 0, max_body_bytes);
  std::string body;
  Status status;
  size_t num_given = 0;
  for (; num_given < bytes.size() && status.ok() && !parser.is_done(); num_given += piece)
    status = parser.read(bytes.substr(num_given, piece), body);
  if (status.ok()) status = parser.read_end();
  if (status.ok() != parser.is_done() && status.ok()) __builtin_trap();
  if (!status.ok()) check_message(status);
  if (body.size() > bytes.size()) __builtin_trap();
  if (parser.has_head()) {
    const UpstreamHead& head = parser.head();
    if (head.status < 200 || head.status > 599 || head.content_type.empty()) __builtin_trap();
    for (const std::string* field : {&head.content_type, &head.retry_after, &head.allow})
      if (field->find_first_of("\r\n") != std::string::npos || field->size() > 256) __builtin_trap();
  }
  if (status.ok()) check_info(body);
  return 0;
}
