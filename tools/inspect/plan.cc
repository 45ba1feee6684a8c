// fp4moe plan: prints the backends that a start would choose and each rank's memory, computed from the
// configuration and the tensor headers.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "bench/model_costs.h"
#include "engine/ranks/comm_memory.h"
#include "engine/ranks/rank_config.h"
#include "engine/schedule/dp_scheduler.h"
#include "engine/startup/draft_checkpoint.h"
#include "engine/startup/memory_plan.h"
#include "inspect/gpu_flags.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/write/dummy_checkpoint.h"
#include "model/resolve_flags.h"
#include "moe/transport/a2a.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

using Report = nlohmann::ordered_json;

struct PlanFlags {
  EngineConfig engine;
  GpuFlags gpu;
  bool json = false;
};

Report flags_report(const EngineConfig& f) {
  return {{"moe_runner_backend", f.moe_runner_backend},
          {"moe_a2a_backend", f.moe_a2a_backend},
          {"fp4_compute", f.fp4_compute},
          {"fp4_act_scales", f.fp4_act_scales},
          {"dense_quant", f.dense_quant},
          {"deepep_mode", f.deepep_mode},
          {"deepep_dispatcher_output_dtype", f.deepep_dispatcher_output_dtype},
          {"flashinfer_dispatcher_output_dtype", f.flashinfer_dispatcher_output_dtype},
          {"tp_size", f.tp_size},
          {"ep_size", f.ep_size},
          {"dp_size", f.dp_size},
          {"enable_dp_attention", f.enable_dp_attention},
          {"a2a_memory_budget", f.a2a_memory_budget}};
}

// Returns the memory of each rank in bytes.
Result<Report> ranks_report(const Checkpoint& checkpoint, const ModelConfig& config, const ModelPlan& plan,
                            const CommMemory& comm, const MemoryPlan& memory) {
  Report ranks = Report::array();
  for (int rank = 0; rank < plan.moe.problem().layout.tp; ++rank) {
    const KvCounts page_bytes = KvCache::bytes_per_page(config, plan.kv_dtype, plan.flags.page_size,
                                                        plan.moe.at_rank(rank).problem().layout);
    const int64_t num_window_pages =
        has_window_pages(config, plan.flags) ? memory.num_window_pages : memory.num_kv_pages;
    ranks.push_back(
        {{"rank", rank},
         {"weight_bytes", weight_bytes_of_rank(checkpoint, config, plan, rank)},
         {"kv_bytes", memory.num_kv_pages * page_bytes.full + num_window_pages * page_bytes.window +
                          memory.num_slots *
                              (page_bytes.slots + num_replay_rows(config, plan.flags) * page_bytes.replays)},
         {"comm_heap_bytes", comm.heap_bytes},
         {"a2a_bytes", comm.a2a_bytes}});
  }
  return ranks;
}

// Returns the draft model and the memory that it adds to rank 0; null without one.
Report draft_report(const ModelPlan& plan, const Checkpoint* checkpoint, const CommMemory& comm,
                    const MemoryPlan& memory) {
  if (plan.draft == nullptr) return nullptr;
  const DraftPlan& draft = *plan.draft;
  const KvCounts page_bytes = KvCache::bytes_per_page(draft.config, draft.plan.kv_dtype, plan.flags.page_size,
                                                      draft.plan.moe.problem().layout);
  return {
      {"model", draft.folder.empty() ? "by the MTP layer" : draft.folder},
      {"architecture", draft.config.architecture},
      {"moe", summary(draft.plan.moe)},
      {"weight_bytes", checkpoint == nullptr ? 0 : rank_weight_bytes(*checkpoint, draft.config, draft.plan)},
      {"kv_bytes", memory.num_kv_pages * (page_bytes.full + page_bytes.window)},
      {"a2a_bytes", comm.draft_a2a_bytes}};
}

// Opens the draft model's weights, or those that its configuration requires if its folder has none.
Result<std::optional<Checkpoint>> open_draft_headers(const DraftPlan* draft, const ModelConfig& target,
                                                     const std::string& load_format) {
  const bool has_weights = draft == nullptr || Checkpoint::has_weights(draft->folder);
  return open_draft(draft, target, load_format == "auto" && !has_weights ? "dummy" : load_format);
}

Result<Report> make_report(const EngineConfig& given, const GpuFlags& gpu) {
  FP4MOE_ASSIGN_OR_RETURN(const std::optional<AbsentGpu> absent_gpu, gpu.absent());
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(given.model_path));
  FP4MOE_ASSIGN_OR_RETURN(ModelPlan plan, plan_model(config, given, absent_gpu));
  FP4MOE_ASSIGN_OR_RETURN(plan.draft, plan_draft(config, plan));
  const EngineConfig& flags = plan.flags;
  const int dp = plan.moe.problem().layout.dp;
  const SchedulerLimits limits =
      group_limits({flags.max_running_requests, flags.chunked_prefill_size, flags.max_prefill_tokens}, dp);
  const int64_t num_decode_rows = limits.max_running_requests * rows_per_request(flags);
  const RankGroupOptions options{
      .max_batch_tokens = limits.max_prefill_tokens + num_decode_rows,
      .max_logit_rows = dp * num_decode_rows,
      .num_window_pages = has_window_pages(config, flags) ? 1 : 0,  // their number is planned below
  };
  FP4MOE_ASSIGN_OR_RETURN(const CommMemory comm,
                          comm_memory(plan.moe, step_limits(config, plan, flags, options), draft_moe(plan)));
  const bool has_weights = Checkpoint::has_weights(flags.model_path);
  const std::string load_format = flags.load_format == "auto" && !has_weights ? "dummy" : flags.load_format;
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_weights(flags.model_path, load_format, config));
  FP4MOE_RETURN_IF_ERROR(check_weights(checkpoint, config, plan));
  FP4MOE_ASSIGN_OR_RETURN(const std::optional<Checkpoint> draft,
                          open_draft_headers(plan.draft.get(), config, flags.load_format));
  const Checkpoint* const draft_weights = draft ? &*draft : nullptr;
  FP4MOE_ASSIGN_OR_RETURN(MemoryProblem problem,
                          memory_problem(checkpoint, config, plan, flags, draft_weights));
  problem.comm_bytes = comm.heap_bytes * (plan.device() == DeviceKind::kCuda ? 1 : local_ranks(plan));
  FP4MOE_ASSIGN_OR_RETURN(const MemoryPlan memory, plan_memory(problem, flags));
  FP4MOE_ASSIGN_OR_RETURN(Report ranks, ranks_report(checkpoint, config, plan, comm, memory));
  const KvCounts page_bytes = KvCache::bytes_per_page(config, plan.kv_dtype, flags.page_size);
  const UnusedTensors unused = find_unused_tensors(checkpoint, config, drafts_with_mtp(plan));
  return Report{{"model", flags.model_path},
                {"architecture", config.architecture},
                {"quantization", quantization_name(config.quant)},
                {"has_weights", has_weights},
                {"unused_tensors", unused.in_model.size() + unused.elsewhere.size()},
                {"moe", summary(plan.moe)},
                {"flags", flags_report(flags)},
                {"device", device_kind_name(plan.device())},
                {"gpu", gpu.gpu},
                {"ranks", ranks},
                {"draft", draft_report(plan, draft_weights, comm, memory)},
                {"work_bytes", problem.work_bytes},
                {"available_bytes", memory.available_bytes},
                {"budget_bytes", memory.budget_bytes},
                {"kv_tokens", memory.num_kv_pages * flags.page_size * dp},
                {"window_kv_tokens", memory.num_window_pages * flags.page_size * dp},
                {"context_length", memory.context_length},
                {"weight_bytes_per_token",
                 std::llround(model_costs(checkpoint, config, plan.dense_quant).step_bytes(1))},
                {"kv_bytes_per_token", (page_bytes.full + page_bytes.window) / flags.page_size}};
}

void print_plan(const Report& r) {
  const auto size = [](const Report& bytes) { return size_string(bytes.get<int64_t>()); };
  std::printf("%s: %s, %s\nMoE   %s\n", r["model"].get<std::string>().c_str(),
              r["architecture"].get<std::string>().c_str(), r["quantization"].get<std::string>().c_str(),
              r["moe"].get<std::string>().c_str());
  if (r["has_weights"] == false)
    std::printf("the folder has no weights; their sizes are computed from config.json\n");
  if (r["unused_tensors"] != 0)
    std::printf("%s tensors of the checkpoint are not used; `fp4moe inspect` names them\n",
                r["unused_tensors"].dump().c_str());
  for (const Report& rank : r["ranks"])
    std::printf("rank %" PRId64 ": weights %s, KV pool %s, comm heap %s (a2a %s)\n",
                rank["rank"].get<int64_t>(), size(rank["weight_bytes"]).c_str(),
                size(rank["kv_bytes"]).c_str(), size(rank["comm_heap_bytes"]).c_str(),
                size(rank["a2a_bytes"]).c_str());
  if (const Report& draft = r["draft"]; !draft.is_null())
    std::printf("draft %s: %s, MoE %s; each rank: weights %s, KV pool %s, a2a %s\n",
                draft["model"].get<std::string>().c_str(), draft["architecture"].get<std::string>().c_str(),
                draft["moe"].get<std::string>().c_str(), size(draft["weight_bytes"]).c_str(),
                size(draft["kv_bytes"]).c_str(), size(draft["a2a_bytes"]).c_str());
  if (r["device"] == "cuda")
    std::printf("GPU %s: %s free, activations and workspaces %s\n", r["gpu"].get<std::string>().c_str(),
                size(r["available_bytes"]).c_str(), size(r["work_bytes"]).c_str());
  std::printf("available %s, budget for weights, heaps and KV pool %s\nKV pool %" PRId64
              " tokens, context %" PRId64 "\n",
              size(r["available_bytes"]).c_str(), size(r["budget_bytes"]).c_str(),
              r["kv_tokens"].get<int64_t>(), r["context_length"].get<int64_t>());
  if (r["window_kv_tokens"] != 0)
    std::printf("of these, layers with a sliding window hold %" PRId64 "\n",
                r["window_kv_tokens"].get<int64_t>());
  std::printf("a decoded token reads %s of weights, and %" PRId64
              " bytes of KV cache for each preceding token\n",
              size(r["weight_bytes_per_token"]).c_str(), r["kv_bytes_per_token"].get<int64_t>());
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  CLI::App* subcommand =
      app.add_subcommand("plan", "Show each rank's memory and the chosen backends without loading the model");
  auto flags = std::make_shared<PlanFlags>();
  add_engine_flags(*subcommand, flags->engine);
  add_gpu_flags(*subcommand, flags->gpu);
  subcommand->add_flag("--json", flags->json, "print JSON");
  subcommand->callback([flags, &exit_code] {
    const Result<Report> report = make_report(flags->engine, flags->gpu);
    if (!report.ok())
      exit_code = report_error(report.status());
    else if (flags->json)
      std::printf("%s\n", report->dump(1, ' ', false, Report::error_handler_t::replace).c_str());
    else
      print_plan(*report);
  });
}

}  // namespace fp4moe
