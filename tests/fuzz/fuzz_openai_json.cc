// Any bytes as the body of every POST route: the response is always JSON, and nothing crashes.
#include <cstdint>
#include <string>

#include "server/api/apis.h"
#include "server/fake_engine.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fp4moe;
  static const FakeEngine engine;
  const auto body = parse_json({reinterpret_cast<const char*>(data), size});
  if (!body.ok()) return 0;
  for (const auto parse : {parse_chat, parse_completion, parse_generate, parse_messages}) {
    Fields fields(*body);
    const GenerationCall call = parse(engine, fields);
    if (fields.ok() && (call.requests.empty() || call.format == nullptr)) __builtin_trap();
    if (!fields.ok() && fields.error().message().empty()) __builtin_trap();
    fields.unknown();
  }
  return 0;
}
