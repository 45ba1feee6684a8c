#include "fp4moe/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/seconds.h"
#include "engine/disagg/kv_hello.h"
#include "engine/disagg/node_link.h"
#include "engine/disagg/prefill_node.h"
#include "engine/ranks/comm_memory.h"
#include "engine/ranks/rank_config.h"
#include "engine/ranks/rank_group.h"
#include "engine/startup/autotune.h"
#include "engine/startup/draft_checkpoint.h"
#include "engine/startup/memory_plan.h"
#include "engine/startup/self_test.h"
#include "engine/startup/startup_lines.h"
#include "engine/step/adaptive_drafter.h"
#include "engine/step/step_loop.h"
#include "io/jinja/chat_template.h"
#include "io/write/dummy_checkpoint.h"
#include "model/plan_draft.h"
#include "model/plan_model.h"
#include "model/resolve_flags.h"

namespace fp4moe {
namespace {

std::string folder_name(const std::string& path) {
  const std::filesystem::path normal = std::filesystem::path(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).filename().string();
}

const std::string& tokenizer_path(const EngineConfig& flags) {
  return flags.tokenizer_path.empty() ? flags.model_path : flags.tokenizer_path;
}

// Tokenizer, and the chat template or the reason why it is missing.
struct TextTools {
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;
  Status chat_template_status;
};

Result<TextTools> load_text_tools(const EngineConfig& flags) {
  FP4MOE_ASSIGN_OR_RETURN(Tokenizer tokenizer, open_tokenizer(tokenizer_path(flags), flags.load_format));
  TextTools tools{std::move(tokenizer), {}, {}};
  Result<ChatTemplate> chat_template = ChatTemplate::load(flags.model_path, flags.chat_template);
  if (chat_template.ok()) {
    tools.chat_template = std::move(*chat_template);
  } else {
    // Only chat needs a template, but one given with --chat-template must load.
    if (!flags.chat_template.empty()) return chat_template.status();
    tools.chat_template_status = chat_template.status();
    log_warning("no chat template: " + chat_template.status().message());
  }
  return tools;
}

class EngineImpl final : public Engine {
 public:
  // hello: of a node of disaggregated serving, or without facts.
  EngineImpl(LogRegistration log, TextTools text, std::unique_ptr<RankGroup> ranks, KvHello hello)
      : log_(std::move(log)), text_(std::move(text)), ranks_(std::move(ranks)), hello_(std::move(hello)) {}

  Status start(const StepLoopOptions& options, ModelInfo info, const EngineConfig& flags,
               double load_seconds) {
    info_ = std::move(info);
    source_ = {info_.path, flags.weight_version};
    info_.max_bytes_per_token = text_.tokenizer.max_bytes_per_token();
    if (text_.chat_template) info_.chat_template = text_.chat_template->source();
    std::unique_ptr<GrammarCompiler> compiler;
    if (flags.grammar_backend != "none")
      compiler = make_grammar_compiler(text_.tokenizer, info_.vocab_size, info_.eos_token_ids);
    info_.has_grammars = compiler != nullptr;
    load_seconds_ = load_seconds;
    FP4MOE_ASSIGN_OR_RETURN(loop_, StepLoop::make(*ranks_, text_.tokenizer, options, std::move(compiler)));
    return {};
  }

  Status listen_for_decode_nodes(const EngineConfig& flags, NodeLinkOptions link) {
    FP4MOE_ASSIGN_OR_RETURN(prefill_node_,
                            PrefillNode::make(*loop_, hello_, flags.disaggregation_bootstrap_host,
                                              flags.disaggregation_bootstrap_port, std::move(link)));
    info_.disaggregation_bootstrap_port = prefill_node_->port();
    return {};
  }

  Result<std::string> submit(Request request, DeltaCallback on_delta) override {
    return loop_->submit(std::move(request), std::move(on_delta));
  }
  void cancel(const std::string& id) override { loop_->cancel(id); }
  Status flush_cache() override { return loop_->flush_cache(); }
  Result<int64_t> update_weights(const WeightSource& source, bool aborts) override;
  WeightSource weight_source() const override {
    std::lock_guard lock(source_mutex_);
    return source_;
  }
  void drain(double timeout_seconds) override { loop_->drain(timeout_seconds); }
  Status failure() const override { return loop_->failure(); }
  void abort() override { ranks_->abort(); }
  const ModelInfo& info() const override { return info_; }
  EngineStats stats() const override {
    EngineStats stats = loop_->stats();
    stats.load_seconds = load_seconds_;
    if (prefill_node_ != nullptr) put_traffic(prefill_node_->traffic(), stats);
    return stats;
  }
  ExpertLoad expert_load() const override {
    std::lock_guard lock(ranks_mutex_);
    if (const Status failure = ranks_->failure(); !failure.ok()) return {.failure = failure.message()};
    return ranks_->expert_load();
  }
  Result<ExpertMoves> rebalance_experts() override {
    if (!info_.moves_experts) return unsupported("experts are moved between ranks only with --enable-eplb");
    return loop_->rebalance_experts();
  }

  Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special_tokens) const override {
    return text_.tokenizer.encode(text, add_special_tokens);
  }
  Result<std::string> detokenize(const std::vector<int32_t>& ids, bool skip_special_tokens) const override {
    for (const int32_t id : ids)
      if (id < 0 || id >= info_.vocab_size)
        return invalid_argument("token id " + std::to_string(id) + " is out of range; it must be 0 to " +
                                std::to_string(info_.vocab_size - 1));
    return text_.tokenizer.decode(ids, skip_special_tokens);
  }
  std::vector<int32_t> find_special_tokens(std::string_view text) const override {
    return text_.tokenizer.find_special_tokens(text);
  }
  std::string token_bytes(int32_t id) const override { return std::string(text_.tokenizer.token_bytes(id)); }
  Result<std::string> apply_chat_template(std::string_view messages_json,
                                          const ChatTemplateOptions& options) const override {
    if (!text_.chat_template) return text_.chat_template_status;
    return text_.chat_template->render(messages_json, options);
  }

 private:
  Result<KvHello> hello_of(const WeightSource& source) const;
  void announce(KvHello hello, const WeightSource& source);

  const LogRegistration log_;  // first: the other members log until they are destroyed
  TextTools text_;
  std::unique_ptr<RankGroup> ranks_;
  mutable std::mutex ranks_mutex_;  // while weights are replaced, and for reading what they contain
  mutable std::mutex source_mutex_;
  WeightSource source_;
  const KvHello hello_;  // of the weights at start
  ModelInfo info_;
  double load_seconds_ = 0;
  std::unique_ptr<StepLoop> loop_;             // borrows the members above
  std::unique_ptr<PrefillNode> prefill_node_;  // last: borrows the loop
};

// Returns the hello of a node with these weights, which need another version than the present ones; without
// facts if the engine is not a node.
Result<KvHello> EngineImpl::hello_of(const WeightSource& source) const {
  if (hello_.facts.empty()) return hello_;
  FP4MOE_RETURN_IF_ERROR(check_weight_version(source.version));
  if (source.version == weight_source().version)
    return invalid_argument(
        "weight_version is \"" + source.version +
        "\", that of the present weights; nodes of disaggregated serving tell weights apart "
        "by it: send another one, the same to each node");
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(source.model_path));
  KvHello hello = hello_;
  set_weights(hello, checkpoint, source.version);
  return hello;
}

// Called on the loop's thread when the weights have been replaced, before it computes anything with them. The
// connections with the old hello end.
void EngineImpl::announce(KvHello hello, const WeightSource& source) {
  if (prefill_node_ != nullptr)
    prefill_node_->set_hello(
        std::move(hello), unavailable("the weights of this node were updated to version " + source.version));
  else if (!hello.facts.empty())
    loop_->set_hello(std::move(hello));
}

// Compares the form of the checkpoints on the caller's thread first, while requests run on.
Result<int64_t> EngineImpl::update_weights(const WeightSource& source, bool aborts) {
  FP4MOE_ASSIGN_OR_RETURN(const KvHello hello, hello_of(source));
  FP4MOE_RETURN_IF_ERROR(ranks_->check_reload(source.model_path));
  const auto started = std::chrono::steady_clock::now();
  const auto reload = [this, source, hello]() -> Status {
    std::lock_guard lock(ranks_mutex_);
    FP4MOE_RETURN_IF_ERROR(ranks_->reload(source.model_path));
    announce(hello, source);
    std::lock_guard source_lock(source_mutex_);
    source_ = source;
    return {};
  };
  const Result<int64_t> num_waited = loop_->update_weights(reload, aborts);
  if (num_waited.ok())
    log_info("weights    updated from '" + source.model_path + "' in " +
             seconds_text(seconds_since(started)));
  return num_waited;
}

SchedulerLimits scheduler_limits(const EngineConfig& flags) {
  return {.max_running_requests = flags.max_running_requests,
          .chunked_prefill_size = flags.chunked_prefill_size,
          .max_prefill_tokens = flags.max_prefill_tokens,
          .reuses_prefixes = !flags.disable_radix_cache,
          .conservativeness = flags.schedule_conservativeness,
          .state_interval = flags.mamba_track_interval};
}

NgramLimits draft_limits(const EngineConfig& flags) {
  if (flags.speculative_algorithm != "NGRAM") return {};
  return {.max_tokens = rows_per_request(flags) - 1,
          .min_match = flags.speculative_ngram_min_match_window_size,
          .max_match = flags.speculative_ngram_max_match_window_size};
}

GrammarLimits grammar_limits(const EngineConfig& flags) {
  GrammarLimits limits;
  limits.max_grammar_bytes = flags.grammar_max_bytes;
  limits.max_compile_bytes = 2 * flags.grammar_max_bytes;  // the parts, and the grammar built from them
  limits.max_cache_bytes = flags.grammar_cache_bytes;
  limits.timeout = std::chrono::milliseconds(std::llround(flags.grammar_compile_timeout * 1000));
  return limits;
}

// Few threads, because masks are filled while the model computes on the same cores.
PriorityRules priority_rules(const EngineConfig& flags) {
  return {.are_used = flags.enable_priority_scheduling,
          .low_first = flags.schedule_low_priority_values_first,
          .refuse_unused = flags.abort_on_priority_when_disabled};
}

MaskLimits mask_limits(const EngineConfig& flags) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return {.num_fast_threads = std::clamp(cores / 4, 2, 8),
          .num_slow_threads = std::clamp(cores / 8, 1, 4),
          .max_steps = flags.grammar_max_steps};
}

// Settings and plans that every process of a job determines before any weight is read.
struct Prepared {
  ModelConfig config;
  ModelPlan plan;  // plan.flags are the resolved flags
  Checkpoint checkpoint;
  std::optional<Checkpoint> draft;  // of plan.draft, if it has a separate one
  MemoryPlan memory;
  CommMemory comm;
  RankGroupOptions options;
};

Result<Prepared> prepare(const EngineConfig& given) {
  FP4MOE_ASSIGN_OR_RETURN(ModelConfig config, load_model_config(given.model_path));
  FP4MOE_ASSIGN_OR_RETURN(ModelPlan plan, plan_model(config, given));
  FP4MOE_ASSIGN_OR_RETURN(plan.draft, plan_draft(config, plan));
  const EngineConfig& flags = plan.flags;
  const int dp = plan.moe.problem().layout.dp;
  const SchedulerLimits limits = group_limits(scheduler_limits(flags), dp);
  const int64_t num_decode_rows = limits.max_running_requests * rows_per_request(flags);
  RankGroupOptions options{
      .max_batch_tokens = limits.max_prefill_tokens + num_decode_rows,
      .max_logit_rows = dp * num_decode_rows,
      .num_window_pages = has_window_pages(config, flags) ? 1 : 0,  // their number is planned below
      .accepts_drafts = plan.draft != nullptr && flags.speculative_accepts_on_device,
  };
  FP4MOE_ASSIGN_OR_RETURN(const CommMemory comm,
                          comm_memory(plan.moe, step_limits(config, plan, flags, options), draft_moe(plan)));
  FP4MOE_ASSIGN_OR_RETURN(Checkpoint checkpoint, open_weights(flags.model_path, flags.load_format, config));
  FP4MOE_RETURN_IF_ERROR(check_weights(checkpoint, config, plan));
  FP4MOE_ASSIGN_OR_RETURN(std::optional<Checkpoint> draft,
                          open_draft(plan.draft.get(), config, flags.load_format));
  const Checkpoint* const draft_weights = draft ? &*draft : nullptr;
  FP4MOE_ASSIGN_OR_RETURN(MemoryProblem problem,
                          memory_problem(checkpoint, config, plan, flags, draft_weights));
  problem.comm_bytes = comm.heap_bytes * (plan.device() == DeviceKind::kCuda ? 1 : local_ranks(plan));
  FP4MOE_ASSIGN_OR_RETURN(MemoryPlan memory, plan_memory(problem, flags));
  options.num_kv_pages = memory.num_kv_pages;
  options.num_window_pages = memory.num_window_pages;
  options.num_slots = memory.num_slots;
  options.context_length = memory.context_length;
  return Prepared{std::move(config),
                  std::move(plan),
                  std::move(checkpoint),
                  std::move(draft),
                  std::move(memory),
                  comm,
                  options};
}

// Runs the self test of the model and of a draft model with a separate checkpoint.
Status test_experts(const Prepared& prepared) {
  FP4MOE_RETURN_IF_ERROR(run_self_test(prepared.checkpoint, prepared.config, prepared.plan));
  if (!prepared.draft || prepared.plan.draft->config.num_experts == 0) return {};
  const DraftPlan& draft = *prepared.plan.draft;
  return run_self_test(*prepared.draft, draft.config, draft.plan, "the draft model's ")
      .with_context("draft model");
}

Result<std::unique_ptr<RankGroup>> make_ranks(const Prepared& prepared) {
  return RankGroup::make(prepared.checkpoint, prepared.config, prepared.plan, prepared.plan.flags,
                         prepared.options, prepared.draft ? &*prepared.draft : nullptr);
}

ModelInfo model_info(const EngineConfig& flags, const ModelConfig& config, const ModelPlan& plan,
                     const MemoryPlan& memory) {
  ModelInfo info;
  const std::vector<std::string>& names = flags.served_model_name;
  info.name = names.empty() ? folder_name(flags.model_path) : names.front();
  if (names.size() > 1) info.aliases.assign(names.begin() + 1, names.end());
  info.path = flags.model_path;
  info.tokenizer_path = tokenizer_path(flags);
  info.architecture = config.architecture;
  info.quantization = quantization_name(config.quant);
  info.backend = runner_name(plan.moe);
  info.vocab_size = config.vocab_size;
  info.num_layers = config.num_layers;
  info.hidden_size = config.hidden_size;
  info.num_experts = config.num_experts;
  info.top_k = config.top_k;
  info.context_length = memory.context_length;
  info.page_size = flags.page_size;
  info.max_running_requests = flags.max_running_requests;
  info.max_prefill_tokens = flags.max_prefill_tokens;
  info.max_total_tokens = memory.num_kv_pages * flags.page_size * plan.moe.problem().layout.dp;
  info.eos_token_ids = config.eos_token_ids;
  info.moves_experts = flags.enable_eplb;
  info.speculative_algorithm = flags.speculative_algorithm == "none" ? "" : flags.speculative_algorithm;
  info.disaggregation_mode = flags.disaggregation_mode;
  info.default_sampling = config.default_sampling;
  return info;
}

// Another process of the job may have memory for fewer pages and slots.
void take_agreed_sizes(const RankGroup& ranks, MemoryPlan& memory, EngineConfig& flags) {
  memory.num_kv_pages = ranks.num_kv_pages();
  memory.num_window_pages = ranks.num_window_pages();
  memory.context_length = std::min(memory.context_length, memory.num_kv_pages * flags.page_size);
  if (memory.num_slots == 0) return;
  memory.num_slots = ranks.num_slots();
  const int64_t with_slot = (memory.num_slots - 1) * ranks.num_groups();
  flags.max_running_requests = static_cast<int>(
      std::min({int64_t{flags.max_running_requests}, memory.max_running_requests, with_slot}));
}

ProgressSink without_exceptions(ProgressSink sink) {
  return [sink = std::move(sink)](int64_t done, int64_t total) {
    try {
      sink(done, total);
    } catch (...) {  // loading does not depend on it
    }
  };
}

}  // namespace

// Refuses unsupported configurations before it reads the first weight.
Result<std::unique_ptr<Engine>> Engine::make(EngineConfig flags) {
  LogRegistration log(flags.log_sink);
  if (flags.progress_sink) flags.progress_sink = without_exceptions(std::move(flags.progress_sink));
  FP4MOE_ASSIGN_OR_RETURN(Prepared prepared, prepare(flags));
  flags = prepared.plan.flags;
  if (flags.disaggregation_mode != "null") FP4MOE_RETURN_IF_ERROR(check_weight_version(flags.weight_version));
  FP4MOE_ASSIGN_OR_RETURN(const NodeLinkOptions link, node_link_options(flags));
  if (flags.grammar_backend == "xgrammar" && !has_grammar_backend())
    return unsupported("--grammar-backend xgrammar: this build has no xgrammar; scripts/setup builds it");
  FP4MOE_ASSIGN_OR_RETURN(TextTools text, load_text_tools(flags));
  FP4MOE_RETURN_IF_ERROR(check_draft_tokenizer(text.tokenizer, prepared.plan.draft.get()));

  FP4MOE_RETURN_IF_ERROR(test_experts(prepared));
  FP4MOE_ASSIGN_OR_RETURN(TuneResult tuned, autotune(prepared.checkpoint, prepared.config, prepared.plan));
  prepared.plan.moe = std::move(tuned.moe);
  log_info("autotune   " + tuned.note);

  const auto started = std::chrono::steady_clock::now();
  FP4MOE_ASSIGN_OR_RETURN(std::unique_ptr<RankGroup> ranks, make_ranks(prepared));
  const std::chrono::duration<double> load_time = std::chrono::steady_clock::now() - started;

  MemoryPlan& memory = prepared.memory;
  take_agreed_sizes(*ranks, memory, flags);
  ModelInfo info = model_info(flags, prepared.config, prepared.plan, memory);
  info.weight_bytes = ranks->weight_bytes();
  info.kv_bytes = ranks->kv_bytes();
  info.startup_lines = startup_lines(
      {flags, prepared.config, prepared.plan, memory, info, *ranks, prepared.comm, load_time.count()});
  const bool is_prefill = flags.disaggregation_mode == "prefill";
  KvHello hello;
  if (flags.disaggregation_mode != "null")
    hello = make_hello(prepared.checkpoint, prepared.config, prepared.plan, *ranks,
                       prepared.draft ? &*prepared.draft : nullptr);
  const StepLoopOptions loop_options{
      .scheduler = scheduler_limits(flags),
      .context_length = memory.context_length,
      .max_queued_requests = flags.max_queued_requests,
      .random_seed = flags.random_seed,
      .grammars = grammar_limits(flags),
      .masks = mask_limits(flags),
      .drafts = draft_limits(flags),
      .draft_source = flags.draft_source,
      .synthetic_acceptance = flags.speculative_synthetic_acceptance,
      .max_model_drafts = prepared.plan.draft != nullptr ? rows_per_request(flags) - 1 : 0,
      .adaptive = flags.speculative_adaptive ? std::optional(step_cost(prepared.config, info.weight_bytes))
                                             : std::nullopt,
      .time_limits = {.waiting = flags.req_waiting_timeout,
                      .running = flags.req_running_timeout,
                      .held = is_prefill ? flags.disaggregation_timeout : 0},
      .priorities = priority_rules(flags),
      .rebalance_interval = flags.enable_eplb ? flags.eplb_rebalance_num_iterations : 0,
      .watchdog_timeout = flags.watchdog_timeout,
      .hello = flags.disaggregation_mode == "decode" ? hello : KvHello(),
      .link = link,
  };
  auto engine = std::make_unique<EngineImpl>(std::move(log), std::move(text), std::move(ranks), hello);
  FP4MOE_RETURN_IF_ERROR(engine->start(loop_options, std::move(info), flags, load_time.count()));
  if (is_prefill) FP4MOE_RETURN_IF_ERROR(engine->listen_for_decode_nodes(flags, link));
  return std::unique_ptr<Engine>(std::move(engine));
}

bool Engine::is_follower(const EngineConfig& flags) {
  return launcher_info().process > 0 && (flags.fabric == "auto" || flags.fabric == "mpi");
}

Status Engine::follow(EngineConfig flags) {
  const LogRegistration log(flags.log_sink);
  if (flags.progress_sink) flags.progress_sink = without_exceptions(std::move(flags.progress_sink));
  FP4MOE_ASSIGN_OR_RETURN(const Prepared prepared, prepare(flags));
  FP4MOE_RETURN_IF_ERROR(test_experts(prepared));
  FP4MOE_ASSIGN_OR_RETURN(const std::unique_ptr<RankGroup> ranks, make_ranks(prepared));
  return ranks->follow();
}

}  // namespace fp4moe
