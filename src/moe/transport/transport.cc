#include "moe/transport/transport.h"

#include <string>

#include "base/check.h"
#include "moe/table.h"
#include "moe/transport/a2a.h"

namespace fp4moe {
namespace {

TransportOptions options_of(const MoePlan& plan, int64_t region_offset, int64_t max_group_rows) {
  FP4MOE_CHECK(plan.a2a() != nullptr, "the plan is empty");
  const A2aSettings& a2a = plan.a2a_settings();
  return {.problem = plan.problem(),
          .payload = a2a.payload,
          .combine_payload = a2a.combine_payload,
          .deterministic = a2a.deterministic,
          .checksum = a2a.checksum,
          .memory_budget = a2a.memory_budget,
          .region_offset = region_offset,
          .max_group_rows = max_group_rows};
}

}  // namespace

const char* payload_name(Payload payload) {
  switch (payload) {
    case Payload::kAct:
      return "bf16";
    case Payload::kFp8:
      return "fp8";
    case Payload::kNvfp4:
      return "nvfp4";
  }
  return "unknown";
}

const char* combine_payload_name(CombinePayload payload) {
  return payload == CombinePayload::kFp8 ? "fp8" : "bf16";
}

Result<std::unique_ptr<Transport>> make_transport(const MoePlan& plan, const TransportSite& site) {
  const TransportOptions options = options_of(plan, site.region_offset, site.max_group_rows);
  // GPU layers exchange rows themselves.
  if (plan.problem().device == DeviceKind::kCuda) return make_local_transport(options, nullptr, nullptr);
  auto transport = plan.a2a()->make(options, site.world, site.attention);
  if (!transport.ok()) return transport.status().with_context(std::string("a2a ") + plan.a2a()->name);
  return transport;
}

Result<A2aBytes> a2a_bytes(const MoePlan& plan, int64_t max_group_rows) {
  const auto bytes = a2a_bytes(plan.a2a()->name, options_of(plan, 0, max_group_rows));
  if (!bytes.ok()) return bytes.status().with_context(std::string("a2a ") + plan.a2a()->name);
  return bytes;
}

int64_t transport_heap_bytes(const MoePlan& plan, int64_t max_group_rows) {
  return plan.a2a()->heap_bytes(options_of(plan, 0, max_group_rows));
}

}  // namespace fp4moe
