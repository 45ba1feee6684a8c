#include "moe/plan.h"

#include "base/check.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

std::string number(int64_t n) { return std::to_string(n); }

constexpr Scheme kSchemes[] = {Scheme::kW4A16, Scheme::kW4A4, Scheme::kW4A8};

// "a, b or c".
std::string one_of(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  return text;
}

Status refuse(const std::string& what, const std::string& why, const std::string& nearest) {
  return unsupported(what + " " + why + "; nearest legal choice: " + nearest);
}

Status check_problem(const MoeProblem& p) {
  const int64_t block = fp4_block(p.format);
  const auto check_dim = [&](const char* name, int64_t value) -> Status {
    constexpr int64_t kMax = 1 << 20;
    if (value >= block && value <= kMax && value % block == 0) return {};
    return invalid_argument(std::string(name) + "=" + number(value) + " is not a multiple of " +
                            fp4_format_name(p.format) + "'s block of " + number(block) + " from " +
                            number(block) + " to " + number(kMax));
  };
  FP4MOE_RETURN_IF_ERROR(check_dim("hidden_size", p.hidden_size));
  FP4MOE_RETURN_IF_ERROR(check_dim("intermediate_size", p.intermediate_size));
  if (p.num_experts < 1 || p.num_experts > 65536)
    return invalid_argument("num_experts=" + number(p.num_experts) + " is not in 1 to 65536");
  if (p.top_k < 1 || p.top_k > p.num_experts)
    return invalid_argument("top_k=" + number(p.top_k) +
                            " is not in 1 to num_experts=" + number(p.num_experts));
  if (p.act_dtype != DType::kBF16 && p.act_dtype != DType::kF32)
    return invalid_argument(std::string("activations of ") + dtype_name(p.act_dtype) + ": BF16 or F32");
  return {};
}

// Rules that hold for any number of ranks, then what this version has.
Status check_parallelism(const MoeProblem& p, const MoeChoice& c) {
  const std::string tp = "tp=" + number(c.tp), ep = "ep=" + number(c.ep), dp = "dp=" + number(c.dp);
  if (c.tp < 1 || c.ep < 1 || c.dp < 1)
    return invalid_argument(tp + ", " + ep + ", " + dp + ": each must be at least 1");
  if (c.tp % c.dp != 0) return refuse(dp, "does not divide " + tp, "--dp 1");
  if (c.ep != 1 && c.ep != c.tp) return refuse(ep, "is neither 1 nor " + tp, "--ep " + number(c.tp));
  if (p.num_experts % c.ep != 0)
    return refuse(ep, "does not divide num_experts=" + number(p.num_experts), "--ep 1");
  if (c.a2a == "flashinfer" && c.enable_dp_attention && c.dp != c.tp)
    return refuse("a2a=flashinfer with DP attention", "needs dp = tp, but " + dp + " and " + tp,
                  "--dp " + number(c.tp));
  if (c.enable_dp_attention) return refuse("enable_dp_attention", "needs dp > 1, but " + dp, "leave it out");
  return {};
}

Result<const A2aRow*> choose_a2a(const MoeChoice& c) {
  bool known = false;
  for (const A2aRow& row : a2a_rows()) {
    if (c.a2a != row.name) continue;
    if (row.min_ranks <= c.tp && c.tp <= row.max_ranks) return &row;
    known = true;
  }
  if (known)
    return refuse("a2a=" + c.a2a, "is not built in this version for tp=" + number(c.tp) + " ranks", "--tp 1");
  for (const UnbuiltName& name : unbuilt_a2a())
    if (c.a2a == name.name)
      return refuse("a2a=" + c.a2a, std::string("is refused: ") + name.reason, "--moe-a2a-backend none");
  return invalid_argument("unknown moe_a2a_backend '" + c.a2a + "': " + one_of(a2a_names()));
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

// The scheme that the flag asks for, or that the runner's name implies.
Result<Scheme> choose_scheme(const MoeProblem& p, const MoeChoice& c) {
  const RunnerAlias* alias = find_alias(c.runner);
  const Scheme implied = alias == nullptr ? Scheme::kW4A16 : alias->scheme;
  Scheme scheme = implied;
  std::string what = "fp4_compute=" + c.fp4_compute;
  if (c.fp4_compute == "auto") {
    what = std::string("fp4_compute=") + scheme_name(implied) +
           " (implied by moe_runner_backend=" + c.runner + ")";
  } else {
    std::vector<std::string> names = {"auto"};
    const Scheme* found = nullptr;
    for (const Scheme& s : kSchemes) {
      names.push_back(scheme_name(s));
      if (c.fp4_compute == names.back()) found = &s;
    }
    if (found == nullptr)
      return invalid_argument("unknown fp4_compute '" + c.fp4_compute + "': " + one_of(names));
    scheme = *found;
    if (alias != nullptr && scheme != implied)
      return refuse(what,
                    "contradicts moe_runner_backend=" + c.runner + ", which computes " + scheme_name(implied),
                    "--moe-runner-backend auto");
  }
  const std::string nearest =
      alias == nullptr ? "--fp4-compute w4a16" : "--moe-runner-backend marlin --fp4-compute w4a16";
  if (scheme == Scheme::kW4A4 && p.format == Fp4Format::kMxfp4)
    return refuse(what, "needs calibrated activation scales, which an mxfp4 checkpoint does not have",
                  nearest);
  for (const RunnerRow& row : runner_rows())
    if (row.schemes.has(scheme)) return scheme;
  return refuse(what, std::string("is not built in this version for ") + fp4_format_name(p.format), nearest);
}

// Why the row cannot run the problem; empty if it can.
std::string why_not(const RunnerRow& row, const MoeProblem& p, Scheme scheme, const A2aRow& a2a) {
  if (row.device != p.device)
    return std::string("runs on ") + device_kind_name(row.device) + ", the device is " +
           device_kind_name(p.device);
  if (row.isa > p.isa)
    return std::string("needs ") + isa_name(row.isa) + ", this CPU offers " + isa_name(p.isa);
  if (!row.formats.has(p.format)) return std::string("does not read ") + fp4_format_name(p.format);
  if (!row.schemes.has(scheme)) return std::string("does not compute ") + scheme_name(scheme);
  if (!row.act_dtypes.has(p.act_dtype))
    return std::string("takes no ") + dtype_name(p.act_dtype) + " activations, only " +
           dtype_name(row.act_dtypes.has(DType::kBF16) ? DType::kBF16 : DType::kF32);
  if (!row.layouts.meets(a2a.layouts))
    return std::string("accepts no batch layout that a2a=") + a2a.name + " makes";
  return {};
}

// Names a row, an alias or auto; anything else is unknown. An alias must fit the checkpoint's format.
Status check_runner_name(const MoeProblem& p, const MoeChoice& c) {
  const RunnerAlias* alias = find_alias(c.runner);
  if (alias == nullptr && find_row(c.runner) == nullptr && c.runner != "auto")
    return invalid_argument("unknown moe_runner_backend '" + c.runner + "': " + one_of(runner_names()));
  if (alias != nullptr && !alias->formats.has(p.format))
    return refuse("moe_runner_backend=" + c.runner, std::string("does not run ") + fp4_format_name(p.format),
                  "--moe-runner-backend marlin");
  return {};
}

}  // namespace

const char* scheme_name(Scheme scheme) {
  switch (scheme) {
    case Scheme::kW4A16:
      return "w4a16";
    case Scheme::kW4A4:
      return "w4a4";
    case Scheme::kW4A8:
      return "w4a8";
  }
  return "unknown";
}

std::vector<std::string> runner_names() {
  std::vector<std::string> names = {"auto"};
  for (const RunnerRow& row : runner_rows()) names.push_back(row.name);
  for (const RunnerAlias& alias : runner_aliases()) names.push_back(alias.name);
  return names;
}

std::vector<std::string> a2a_names() {
  std::vector<std::string> names;
  for (const A2aRow& row : a2a_rows()) names.push_back(row.name);
  for (const UnbuiltName& name : unbuilt_a2a()) names.push_back(name.name);
  return names;
}

Result<MoePlan> plan_moe(const MoeProblem& problem, const MoeChoice& choice) {
  FP4MOE_RETURN_IF_ERROR(check_problem(problem));
  FP4MOE_RETURN_IF_ERROR(check_parallelism(problem, choice));
  MoePlan plan;
  plan.problem_ = problem;
  plan.problem_.layout.tp = choice.tp;
  plan.problem_.layout.ep = choice.ep;
  plan.problem_.layout.dp = choice.dp;
  FP4MOE_ASSIGN_OR_RETURN(plan.fabric_, make_fabric(choice.fabric, choice.tp));
  FP4MOE_ASSIGN_OR_RETURN(plan.a2a_, choose_a2a(choice));
  FP4MOE_ASSIGN_OR_RETURN(plan.numerics_.scheme, choose_scheme(problem, choice));
  FP4MOE_RETURN_IF_ERROR(check_runner_name(problem, choice));

  for (const UnbuiltName& name : unbuilt_a2a()) plan.verdicts_.push_back({"a2a", name.name, name.reason});
  const RunnerRow* forced = find_row(choice.runner);
  const RunnerRow* best = nullptr;
  for (const RunnerRow& row : runner_rows()) {
    const std::string reason = why_not(row, problem, plan.numerics_.scheme, *plan.a2a_);
    if (best == nullptr && reason.empty()) best = &row;
    if (plan.runner_ == nullptr && reason.empty() && (forced == nullptr || forced == &row))
      plan.runner_ = &row;
    else
      plan.verdicts_.push_back({"runner", row.name, reason});
  }
  if (forced != nullptr && plan.runner_ == nullptr)
    return refuse("moe_runner_backend=" + choice.runner,
                  why_not(*forced, problem, plan.numerics_.scheme, *plan.a2a_),
                  best == nullptr ? "none" : std::string("--moe-runner-backend ") + best->name);
  if (plan.runner_ == nullptr) {
    std::string reasons;
    for (const RowVerdict& v : plan.verdicts_)
      if (v.kind == "runner") reasons += "; " + v.name + " " + v.reason;
    return unsupported("no runner fits" + reasons);
  }
  if (find_alias(choice.runner) != nullptr)
    plan.note_ = choice.runner + " is " + scheme_name(plan.numerics_.scheme) + ", which runs here as " +
                 plan.runner_->name;
  return plan;
}

const char* runner_name(const MoePlan& plan) {
  return plan.runner() == nullptr ? "none" : plan.runner()->name;
}

MoePlan MoePlan::at_rank(int rank) const {
  FP4MOE_CHECK(rank >= 0 && rank < problem_.layout.tp,
               "rank " + number(rank) + " of " + number(problem_.layout.tp));
  MoePlan plan = *this;
  plan.problem_.layout.rank = rank;
  return plan;
}

bool MoePlan::shared_expert_is_sharded() const {
  return a2a_ != nullptr && std::string_view(a2a_->name) == "none" && problem_.layout.dp == 1;
}

std::string summary(const MoePlan& plan) {
  if (plan.runner() == nullptr) return "nothing planned";
  std::string text = std::string(scheme_name(plan.scheme())) + " by " + plan.runner()->name + " over a2a " +
                     plan.a2a()->name + ", fabric " + plan.fabric().name;
  if (!plan.note().empty()) text += " (" + plan.note() + ")";
  for (const RowVerdict& v : plan.verdicts()) {
    if (v.kind != "runner") continue;
    if (v.reason.empty()) return text + "; runner-up " + v.name;
    text += "; not " + v.name + ": " + v.reason;
  }
  return text;
}

std::string describe(const MoePlan& plan) {
  if (plan.runner() == nullptr) return "MoE plan: empty";
  const MoeProblem& p = plan.problem();
  std::string text = std::string("MoE plan: ") + fp4_format_name(p.format) + " " +
                     scheme_name(plan.scheme()) + ", activations " + dtype_name(p.act_dtype) +
                     ", H=" + number(p.hidden_size) + " I=" + number(p.intermediate_size) +
                     " E=" + number(p.num_experts) + " K=" + number(p.top_k) + ", " +
                     device_kind_name(p.device) + " " + isa_name(p.isa) + ", fabric " + plan.fabric().name +
                     ", " + number(plan.fabric().num_ranks) + " rank";
  const auto line = [&](const std::string& head, const std::string& kind, const std::string& name) {
    text += "\n  " + head + std::string(8 - head.size(), ' ') + " " + kind +
            std::string(6 - kind.size(), ' ') + " " + name;
  };
  line("chosen", "a2a", plan.a2a()->name);
  line("chosen", "runner", plan.runner()->name);
  if (!plan.note().empty()) text += " (" + plan.note() + ")";
  bool has_runner_up = false;
  for (const RowVerdict& v : plan.verdicts()) {
    const bool next = v.reason.empty() && !has_runner_up;
    has_runner_up |= next;
    line(!v.reason.empty() ? "refused" : next ? "next" : "also", v.kind, v.name);
    text += v.reason.empty() ? ": fits" : ": " + v.reason;
  }
  return text;
}

}  // namespace fp4moe
