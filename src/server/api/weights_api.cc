#include "server/api/weights_api.h"

#include <string>

#include "server/api/route_context.h"
#include "server/json.h"

namespace fp4moe {
namespace {

HttpResponse refused(int http_status, const std::string& message) {
  HttpResponse response =
      json_response({{"success", false}, {"message", message}, {"num_paused_requests", 0}});
  response.status = http_status;
  return response;
}

struct UpdateRequest {
  WeightSource source;
  bool aborts = false;
};

// `now`: the source of the present weights.
UpdateRequest read_update(Fields& fields, const WeightSource& now) {
  UpdateRequest update;
  update.source.model_path = fields.string("model_path", "");
  if (update.source.model_path.empty()) fields.fail("model_path", "is missing: send a checkpoint's folder");
  const std::string format = fields.string("load_format", "auto");
  if (format != "auto" && format != "safetensors")
    fields.fail("load_format", "is \"" + format + "\"; supported: \"auto\" and \"safetensors\"");
  update.source.version = fields.string("weight_version", now.version);
  update.aborts = fields.boolean("abort_all_requests", false);
  fields.refuse("flush_cache", true);  // pages of the old weights are wrong with the new ones
  fields.refuse("draft_only", false);
  fields.refuse("is_async", false);
  fields.refuse("torch_empty_cache", false);
  fields.refuse("keep_pause", false);
  fields.refuse("recapture_cuda_graph", false);
  fields.refuse("token_step", 0);
  fields.refuse("manifest", nullptr);
  for (const std::string& name : fields.unknown())
    fields.fail(name.substr(0, 80), "is not a field of /update_weights_from_disk");
  return update;
}

}  // namespace

HttpResponse update_in_progress_response() {
  return refused(409, "another update of the weights has not ended");
}

HttpResponse update_weights_response(Engine& engine, const HttpRequest& request) {
  const Result<json> body = parse_json(request.body);
  if (!body.ok()) return refused(400, body.status().message());
  Fields fields(*body);
  const UpdateRequest update = read_update(fields, engine.weight_source());
  if (!fields.ok()) return refused(400, fields.error().message());
  const Result<int64_t> num_waited = engine.update_weights(update.source, update.aborts);
  if (!num_waited.ok()) {
    const Status& status = num_waited.status();
    const bool is_refusal = engine.failure().ok() && status.code() != StatusCode::kUnavailable;
    return refused(is_refusal ? 400 : 503, status.message());
  }
  return json_response({{"success", true},
                        {"message", "the weights are those of '" + update.source.model_path + "'"},
                        {"num_paused_requests", *num_waited}});
}

}  // namespace fp4moe
