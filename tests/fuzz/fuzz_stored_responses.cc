// Any method and target of a request about a stored response: the body of the response is always JSON.
#include <cstdint>
#include <string>
#include <string_view>

#include "server/api/responses_api.h"

namespace {

using namespace fp4moe;

// Stores responses "a" with three input items and "b" with none.
void fill(ResponseStore& store) {
  std::vector<StoredItem> input;
  for (const char* id : {"i1", "i2", "i3"})
    input.push_back({id, R"({"type":"message","id":")" + std::string(id) + "\"}"});
  const std::vector<StoredItem> output = {{"o1", R"({"type":"message","id":"o1"})"}};
  const auto turn = std::make_shared<const Turn>(nullptr, input, output, 0);
  store.put({"a", "owner", R"({"id":"a"})", turn});
  store.put({"b", "owner", R"({"id":"b"})",
             std::make_shared<const Turn>(turn, std::vector<StoredItem>{}, std::vector<StoredItem>{}, 0)});
}

}  // namespace

// The first byte selects the method; the target is what follows /v1/responses/.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  ResponseStore store(1 << 20);
  fill(store);
  const char* methods[] = {"GET", "POST", "DELETE", "HEAD"};
  const std::string_view target(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t mark = target.find('?');
  HttpRequest request;
  request.method = methods[data[0] % 4];
  request.path = kResponsesPath + std::string(target.substr(0, mark));
  if (mark != std::string_view::npos) request.query = target.substr(mark + 1);
  for (const char* owner : {"owner", "other"}) {
    const HttpResponse response = stored_response(store, owner, request);
    if (!json::accept(response.body)) __builtin_trap();
    const bool is_success = response.status == 200;
    if (!is_success && response.status != 400 && response.status != 404) __builtin_trap();
    if (is_success && owner != std::string_view("owner")) __builtin_trap();
  }
  return 0;
}
