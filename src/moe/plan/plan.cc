#include "moe/plan/plan.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "moe/plan/legality.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

std::string number(int64_t n) { return std::to_string(n); }

// "a, b or c".
std::string one_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  return text;
}

Status check_name(const char* flag, const std::string& name, const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), name) != known.end()) return {};
  return invalid_argument(std::string("unknown ") + flag + " '" + name + "'; use " + one_of(known));
}

Status check_names(const MoeChoice& c) {
  FP4MOE_RETURN_IF_ERROR(check_name("moe_runner_backend", c.runner, runner_names()));
  FP4MOE_RETURN_IF_ERROR(check_name("moe_a2a_backend", c.a2a, a2a_names()));
  FP4MOE_RETURN_IF_ERROR(check_name("fp4_compute", c.fp4_compute, {"auto", "w4a16", "w4a4", "w4a8"}));
  FP4MOE_RETURN_IF_ERROR(check_name("fp4_act_scales", c.act_scales, {"auto", "static", "per_token"}));
  FP4MOE_RETURN_IF_ERROR(
      check_name("deepep_dispatcher_output_dtype", c.deepep_payload, {"auto", "bf16", "fp8", "nvfp4"}));
  FP4MOE_RETURN_IF_ERROR(
      check_name("flashinfer_dispatcher_output_dtype", c.flashinfer_payload, {"auto", "bf16", "nvfp4"}));
  return check_name("flashinfer_combine_dtype", c.flashinfer_combine, {"auto", "bf16", "fp8"});
}

Status check_problem(const MoeProblem& p) {
  const int64_t block = fp4_block(p.format);
  const auto check_dim = [&](const char* name, int64_t value) -> Status {
    constexpr int64_t kMax = 1 << 20;
    if (value >= block && value <= kMax && value % block == 0) return {};
    return invalid_argument(std::string(name) + "=" + number(value) + " must be a multiple of " +
                            fp4_format_name(p.format) + "'s block size " + number(block) + " and between " +
                            number(block) + " and " + number(kMax));
  };
  FP4MOE_RETURN_IF_ERROR(check_dim("hidden_size", p.hidden_size));
  FP4MOE_RETURN_IF_ERROR(check_dim("intermediate_size", p.intermediate_size));
  if (p.num_experts < 1 || p.num_experts > 65536)
    return invalid_argument("num_experts=" + number(p.num_experts) + " must be between 1 and 65536");
  if (p.top_k < 1 || p.top_k > p.num_experts)
    return invalid_argument("top_k=" + number(p.top_k) +
                            " must be between 1 and num_experts=" + number(p.num_experts));
  if (p.act_dtype != DType::kBF16 && p.act_dtype != DType::kF32)
    return invalid_argument(std::string("activation type ") + dtype_name(p.act_dtype) +
                            " is not supported; use BF16 or F32");
  return {};
}

const RunnerAlias* find_alias(const std::string& name) {
  for (const RunnerAlias& alias : runner_aliases())
    if (name == alias.name) return &alias;
  return nullptr;
}

const RunnerRow* find_row(const std::string& name) {
  for (const RunnerRow& row : runner_rows())
    if (name == row.name) return &row;
  return nullptr;
}

// Returns the row for the requested name and number of ranks.
Result<const A2aRow*> choose_a2a(const MoeChoice& c) {
  for (const A2aRow& row : a2a_rows())
    if (c.a2a == row.name && row.min_ranks <= c.tp && c.tp <= row.max_ranks) return &row;
  return refuse("a2a=" + c.a2a, "cannot connect tp=" + number(c.tp) + " ranks", "--tp 1");
}

// A protocol is never chosen automatically, because protocols differ in how they round sums.
std::string why_not_a2a(const A2aRow& row, const MoeChoice& c) {
  if (c.a2a != row.name) return "a2a=" + c.a2a + " was requested";
  return "connects " + number(row.min_ranks) +
         (row.max_ranks == row.min_ranks ? "" : " to " + number(row.max_ranks)) +
         " ranks, but tp=" + number(c.tp);
}

// The numerics that the runner's name implies, or those of fp4_compute; fp4_act_scales overrides the scales.
Numerics asked_numerics(const MoeChoice& c, const A2aRow& a2a) {
  const RunnerAlias* alias = find_alias(c.runner);
  Numerics n;
  if (alias != nullptr) n = a2a.layouts.has(BatchLayout::kPacked) ? alias->packed : alias->masked;
  if (alias == nullptr && c.fp4_compute != "auto")
    n.scheme = c.fp4_compute == "w4a4"   ? Scheme::kW4A4
               : c.fp4_compute == "w4a8" ? Scheme::kW4A8
                                         : Scheme::kW4A16;
  if (c.act_scales == "per_token") n.a1 = n.a2 = ActScaleChoice::kPerToken;
  return n;
}

Status check_numerics(const MoeProblem& p, const MoeChoice& c, const Numerics& n) {
  const bool is_alias = find_alias(c.runner) != nullptr;
  const std::string scheme = scheme_name(n.scheme), asked = "fp4_compute=" + c.fp4_compute;
  if (is_alias && c.fp4_compute != "auto" && c.fp4_compute != scheme)
    return refuse(asked, "contradicts moe_runner_backend=" + c.runner + ", which computes " + scheme,
                  "--moe-runner-backend auto");
  const std::string what = is_alias && c.fp4_compute == "auto"
                               ? "fp4_compute=" + scheme + " (implied by moe_runner_backend=" + c.runner + ")"
                               : asked;
  if (n.scheme == Scheme::kW4A4 && p.format == Fp4Format::kMxfp4)
    return refuse(what, "needs calibrated activation scales, which an mxfp4 checkpoint does not have",
                  is_alias ? "--moe-runner-backend marlin --fp4-compute w4a16" : "--fp4-compute w4a16");
  if (c.act_scales == "per_token" && n.scheme != Scheme::kW4A4)
    return refuse("fp4_act_scales=per_token", "applies to w4a4 only, but fp4_compute is " + scheme,
                  p.format == Fp4Format::kMxfp4 ? "--fp4-act-scales auto" : "--fp4-compute w4a4");
  return {};
}

// An alias must fit the checkpoint's format.
Status check_alias_format(const MoeProblem& p, const MoeChoice& c) {
  const RunnerAlias* alias = find_alias(c.runner);
  if (alias == nullptr || alias->formats.has(p.format)) return {};
  return refuse("moe_runner_backend=" + c.runner, std::string("does not run ") + fp4_format_name(p.format),
                std::string("--moe-runner-backend ") + (p.format == Fp4Format::kNone ? "auto" : "marlin"));
}

// Encoding of dispatched rows. By default, rows that every runner would quantise to NVFP4 with one scale are
// sent as NVFP4 where SGLang does so; this loses no precision.
Payload choose_payload(const MoeChoice& c, const Numerics& n, const A2aRow& a2a) {
  const bool quantised = n.scheme == Scheme::kW4A4 && n.a1 == ActScaleChoice::kScalar;
  const Payload implied = quantised && a2a.payloads.has(Payload::kNvfp4) ? Payload::kNvfp4 : Payload::kAct;
  if (c.a2a == "none") return c.dp > 1 && !c.disable_fp4_allgather ? implied : Payload::kAct;
  const std::string& name = c.a2a == "deepep" ? c.deepep_payload : c.flashinfer_payload;
  if (name == "auto") return c.a2a == "flashinfer" ? implied : Payload::kAct;
  return name == "fp8" ? Payload::kFp8 : name == "nvfp4" ? Payload::kNvfp4 : Payload::kAct;
}

Result<A2aSettings> choose_a2a_settings(const MoeChoice& c, const Numerics& n, const A2aRow& a2a) {
  A2aSettings settings{.payload = choose_payload(c, n, a2a),
                       .deterministic = c.deterministic,
                       .checksum = c.a2a_checksum,
                       .memory_budget = c.a2a_memory_budget};
  if (!a2a.payloads.has(settings.payload))
    return refuse(std::string("payload ") + payload_name(settings.payload),
                  "is not supported by a2a=" + c.a2a + " in this version",
                  "--" + c.a2a + "-dispatcher-output-dtype bf16");
  if (c.a2a == "flashinfer" && c.flashinfer_combine == "fp8") settings.combine_payload = CombinePayload::kFp8;
  if (c.a2a_memory_budget < 1)
    return invalid_argument("a2a_memory_budget=" + number(c.a2a_memory_budget) + " must be at least 1 byte");
  return settings;
}

// Returns the reason why the row cannot run the problem; empty if it can.
std::string why_not(const RunnerRow& row, const MoeProblem& p, Scheme scheme, const A2aRow& a2a) {
  if (row.device != p.device)
    return std::string("runs on ") + device_kind_name(row.device) + ", but the device is " +
           device_kind_name(p.device);
  if (row.device == DeviceKind::kCuda &&
      (p.compute_capability < row.min_compute || p.compute_capability > row.max_compute))
    return "needs compute capability " + compute_capability_text(row.min_compute) +
           (row.max_compute == row.min_compute ? "" : " or more") + ", but this GPU has " +
           compute_capability_text(p.compute_capability);
  if (row.device == DeviceKind::kCuda && p.intermediate_size % 32 != 0)
    return "needs an intermediate_size that is a multiple of 32, got " + number(p.intermediate_size);
  if (row.device == DeviceKind::kCuda && p.shard_block() % 32 != 0)
    return "needs 32 columns of intermediate_size " + number(p.intermediate_size) + " for each of " +
           number(p.layout.moe_tp()) + " ranks";
  if (row.isa > p.isa)
    return std::string("needs ") + isa_name(row.isa) + ", but this CPU has " + isa_name(p.isa);
  if (!row.formats.has(p.format)) return std::string("does not read ") + fp4_format_name(p.format);
  if (!row.schemes.has(scheme)) return std::string("does not compute ") + scheme_name(scheme);
  if (!row.act_dtypes.has(p.act_dtype))
    return std::string("does not accept ") + dtype_name(p.act_dtype) + " activations, only " +
           dtype_name(row.act_dtypes.has(DType::kBF16) ? DType::kBF16 : DType::kF32);
  // GPU layers ignore batch layouts: they process the rows that arrive as a batch of tokens.
  if (row.device == DeviceKind::kCpu && !row.layouts.meets(a2a.layouts))
    return std::string("accepts no batch layout that a2a=") + a2a.name + " produces";
  return {};
}

// Automatic choices to report to the user.
std::string notes(const MoeChoice& c, const MoePlan& plan) {
  std::string text;
  const auto add = [&](const std::string& note) { text += (text.empty() ? "" : "; ") + note; };
  if (find_alias(c.runner) != nullptr)
    add(c.runner + " is " + numerics_text(plan.numerics()) + ", which runs here as " + plan.runner()->name);
  if (resolved_ep(c) != c.ep)
    add("ep=" + number(c.ep) + " raised to tp=" + number(c.tp) + " because " +
        (c.a2a == "none" ? "deterministic inference must not add partial sums of an expert's shards"
                         : "a2a=" + c.a2a + " moves rows to whole experts"));
  return text;
}

}  // namespace

std::vector<std::string> runner_names() {
  std::vector<std::string> names = {"auto"};
  for (const RunnerRow& row : runner_rows()) names.push_back(row.name);
  for (const RunnerAlias& alias : runner_aliases()) names.push_back(alias.name);
  return names;
}

std::vector<std::string> a2a_names() {
  std::vector<std::string> names;
  for (const A2aRow& row : a2a_rows())
    if (names.empty() || names.back() != row.name)
      names.push_back(row.name);  // rows with the same name are adjacent
  return names;
}

// Chooses the first runner row that fits, or the one the user named.
Status MoePlan::choose_runner(const MoeChoice& choice) {
  const RunnerRow* forced = find_row(choice.runner);
  const RunnerRow* best = nullptr;
  for (const RunnerRow& row : runner_rows()) {
    const std::string reason = why_not(row, problem_, scheme(), *a2a_);
    if (best == nullptr && reason.empty()) best = &row;
    if (runner_ == nullptr && reason.empty() && (forced == nullptr || forced == &row))
      runner_ = &row;
    else
      verdicts_.push_back({"runner", row.name, reason});
  }
  if (runner_ != nullptr) return {};
  if (forced != nullptr)
    return refuse("moe_runner_backend=" + choice.runner, why_not(*forced, problem_, scheme(), *a2a_),
                  best == nullptr ? "none" : std::string("--moe-runner-backend ") + best->name);
  std::string reasons;
  for (const RowVerdict& v : verdicts_)
    if (v.kind == "runner") reasons += "; " + v.name + " " + v.reason;
  return unsupported("no runner fits" + reasons);
}

Result<MoePlan> plan_moe(const MoeProblem& problem, const MoeChoice& choice) {
  FP4MOE_RETURN_IF_ERROR(check_problem(problem));
  FP4MOE_RETURN_IF_ERROR(check_names(choice));
  FP4MOE_RETURN_IF_ERROR(check_legality(problem, choice));
  MoePlan plan;
  plan.problem_ = problem;
  plan.problem_.layout = {choice.tp, resolved_ep(choice), choice.dp, 0};
  plan.problem_.num_redundant = choice.num_redundant;
  plan.places_experts_ = choice.num_redundant > 0 || choice.places_experts;
  FP4MOE_ASSIGN_OR_RETURN(plan.fabric_, make_fabric(choice.fabric, choice.tp));
  FP4MOE_ASSIGN_OR_RETURN(plan.a2a_, choose_a2a(choice));
  plan.numerics_ = asked_numerics(choice, *plan.a2a_);
  FP4MOE_RETURN_IF_ERROR(check_numerics(problem, choice, plan.numerics_));
  FP4MOE_RETURN_IF_ERROR(check_alias_format(problem, choice));
  FP4MOE_ASSIGN_OR_RETURN(plan.a2a_settings_, choose_a2a_settings(choice, plan.numerics_, *plan.a2a_));
  for (const A2aRow& row : a2a_rows())
    if (&row != plan.a2a_) plan.verdicts_.push_back({"a2a", row.name, why_not_a2a(row, choice)});
  FP4MOE_RETURN_IF_ERROR(plan.choose_runner(choice));
  if (plan.scheme() == Scheme::kW4A8) plan.numerics_.act8 = plan.runner_->act8;
  plan.note_ = notes(choice, plan);
  if (choice.deterministic) plan.device_tactics_ = {{std::numeric_limits<int64_t>::max()}, {0}};
  return plan;
}

const DeviceMoeOps& MoePlan::device_ops() const {
  FP4MOE_CHECK(runner_ != nullptr && runner_->device_ops != nullptr, "the plan is not for a GPU");
  const DeviceMoeOps* ops = runner_->device_ops(scheme());
  FP4MOE_CHECK(ops != nullptr, "the plan is for a GPU, but this build has no CUDA support");
  return *ops;
}

MoePlan MoePlan::with_tactics(const Tactics& tactics) const {
  MoePlan plan = *this;
  plan.tactics_ = tactics;
  return plan;
}

MoePlan MoePlan::with_tactics(const DeviceTactics& tactics) const {
  MoePlan plan = *this;
  plan.device_tactics_ = tactics;
  return plan;
}

MoePlan MoePlan::at_rank(int rank) const {
  FP4MOE_CHECK(
      rank >= 0 && rank < problem_.layout.tp,
      "rank " + number(rank) + " does not exist; the number of ranks is " + number(problem_.layout.tp));
  MoePlan plan = *this;
  plan.problem_.layout.rank = rank;
  return plan;
}

bool MoePlan::is_one_group_of_none() const {
  return a2a_ != nullptr && std::string_view(a2a_->name) == "none" && problem_.layout.dp == 1;
}

bool MoePlan::shared_expert_is_sharded() const {
  return is_one_group_of_none() && !a2a_settings_.deterministic;
}

bool MoePlan::shared_expert_rows_are_split() const {
  return is_one_group_of_none() && a2a_settings_.deterministic;
}

}  // namespace fp4moe
