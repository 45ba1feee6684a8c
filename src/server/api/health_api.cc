#include "server/api/apis.h"

namespace fp4moe {

namespace {

class HealthFormat final : public ApiFormat {
 public:
  std::vector<json> events(const Choice&, const Delta&) override { return {}; }
  std::vector<json> closing(const std::vector<Choice>&) override { return {}; }
  json whole(const std::vector<Choice>&) override { return {{"status", "ok"}}; }
};

}  // namespace

GenerationCall make_health_probe() {
  GenerationCall call;
  Request request;
  request.id = make_id("health-");
  request.sampling.temperature = 0;
  request.sampling.max_new_tokens = 1;
  call.requests.push_back(std::move(request));
  call.prompts.push_back(std::make_shared<const std::vector<int32_t>>(1, 0));
  call.format = std::make_unique<HealthFormat>();
  return call;
}

}  // namespace fp4moe
