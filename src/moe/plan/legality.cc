#include "moe/plan/legality.h"

#include <utility>

#include "base/check.h"
#include "comm/fabric.h"
#include "comm/job.h"

namespace fp4moe {
namespace {

std::string value(const char* name, int64_t n) { return std::string(name) + "=" + std::to_string(n); }

Status check_counts(const MoeProblem&, const MoeChoice& c) {
  constexpr int kMax = 1024;
  for (const auto& [name, n] : {std::pair{"tp", c.tp}, {"ep", c.ep}, {"dp", c.dp}})
    if (n < 1 || n > kMax)
      return invalid_argument(value(name, n) + " must be between 1 and " + std::to_string(kMax));
  return {};
}

Status check_dp_divides_tp(const MoeProblem&, const MoeChoice& c) {
  if (c.tp % c.dp == 0) return {};
  int nearest = c.dp;
  while (c.tp % nearest != 0) --nearest;
  return refuse(value("dp", c.dp), "does not divide " + value("tp", c.tp), "--dp " + std::to_string(nearest));
}

Status check_dp_attention(const MoeProblem&, const MoeChoice& c) {
  if (c.dp == 1 || c.enable_dp_attention) return {};
  return refuse(
      value("dp", c.dp),
      "requires enable_dp_attention (without it, dp would start " + std::to_string(c.dp) + " servers)",
      "--dp " + std::to_string(c.dp) + " --enable-dp-attention");
}

Status check_flashinfer_dp(const MoeProblem&, const MoeChoice& c) {
  if (c.a2a != "flashinfer" || !c.enable_dp_attention || c.dp == c.tp) return {};
  return refuse("a2a=flashinfer with DP attention",
                "needs dp = tp, but " + value("dp", c.dp) + " and " + value("tp", c.tp),
                "--dp " + std::to_string(c.tp));
}

Status check_ep_size(const MoeProblem&, const MoeChoice& c) {
  if (c.ep == 1 || c.ep == c.tp) return {};
  return refuse(value("ep", c.ep), "is neither 1 nor " + value("tp", c.tp), "--ep " + std::to_string(c.tp));
}

// Experts are placed by load only where a token's result does not depend on the rank that computes it.
Status check_placement(const MoeProblem& p, const MoeChoice& c) {
  constexpr int64_t kMax = 65536;
  if (c.num_redundant < 0 || c.num_redundant > kMax)
    return invalid_argument(value("ep_num_redundant_experts", c.num_redundant) + " must be between 0 and " +
                            std::to_string(kMax));
  if (c.num_redundant == 0 && !c.places_experts) return {};
  const std::string what =
      c.num_redundant > 0 ? value("ep_num_redundant_experts", c.num_redundant) : "placing experts by load";
  if (c.a2a != "deepep")
    return refuse(what + " with a2a=" + c.a2a,
                  "is not supported, because sums would depend on the ranks that have an expert",
                  "--moe-a2a-backend deepep");
  const int64_t ep = resolved_ep(c), rest = (p.num_experts + c.num_redundant) % ep;
  if (rest == 0) return {};
  return refuse(value("ep", ep),
                "does not divide " + value("num_experts", p.num_experts) + " plus " +
                    value("ep_num_redundant_experts", c.num_redundant),
                "--ep-num-redundant-experts " + std::to_string(c.num_redundant + ep - rest));
}

Status check_ep_divides_experts(const MoeProblem& p, const MoeChoice& c) {
  const int ep = resolved_ep(c);
  if ((p.num_experts + c.num_redundant) % ep == 0) return {};
  if (c.a2a == "none" && !c.deterministic)
    return refuse(value("ep", ep), "does not divide " + value("num_experts", p.num_experts), "--ep 1");
  int nearest = ep;
  while (p.num_experts % nearest != 0) --nearest;
  const std::string raised_by = c.a2a == "none" ? "enable_deterministic_inference" : "a2a=" + c.a2a;
  return refuse(value("ep", ep) + " (raised to tp by " + raised_by + ")",
                "does not divide " + value("num_experts", p.num_experts), "--tp " + std::to_string(nearest));
}

Status check_shard_blocks(const MoeProblem& p, const MoeChoice& c) {
  const int64_t block = fp4_block(p.format), blocks = p.intermediate_size / block;
  if (resolved_ep(c) != 1 || blocks >= c.tp) return {};
  return refuse(
      value("tp", c.tp),
      "shards " + value("intermediate_size", p.intermediate_size) + " into " + std::to_string(blocks) +
          " whole scale blocks of " + std::to_string(block) + ", which leaves ranks without one",
      p.num_experts % c.tp == 0 ? "--ep " + std::to_string(c.tp) : "--tp " + std::to_string(blocks));
}

Status check_deepep_mode(const MoeProblem&, const MoeChoice& c) {
  if (c.deepep_mode == "auto" || c.deepep_mode == "low_latency") return {};
  if (c.deepep_mode != "normal")
    return invalid_argument("unknown deepep_mode '" + c.deepep_mode + "'; use auto or low_latency");
  return refuse("deepep_mode=normal", "has no masked batches, which FP4 runners require from deepep",
                "--deepep-mode low_latency");
}

// Refuses combinations that ranks on GPUs do not support yet.
Status check_gpu_ranks(const MoeProblem& p, const MoeChoice& c) {
  if (p.device != DeviceKind::kCuda || c.tp == 1) return {};
  if (p.compute_capability / 10 != 9)
    return refuse(value("tp", c.tp), "needs GPUs of compute capability 9.0", "--tp 1");
  return {};
}

Status check_gpu_processes(const MoeProblem& p, const MoeChoice& c) {
  const LauncherInfo launcher = launcher_info();
  if (p.device != DeviceKind::kCuda || c.tp == 1 || resolve_fabric(c.fabric, c.tp) != "mpi") return {};
  if (!launcher.launched) return {};  // make_fabric() refuses this
  if (const int processes = launcher.num_processes; processes != c.tp)
    return refuse(
        value("tp", c.tp) + " with fabric=mpi",
        "needs as many processes on device=cuda, but the launcher started " + std::to_string(processes),
        processes == 1 ? "--fabric threads" : "--tp " + std::to_string(processes));
  if (c.num_redundant > 0 || c.places_experts)
    return refuse("placing experts by load", "is not supported on GPUs in several processes (fabric=mpi)",
                  "one process with --fabric threads");
  return {};
}

Status check_gpu_checksum(const MoeProblem& p, const MoeChoice& c) {
  if (p.device != DeviceKind::kCuda || !c.a2a_checksum) return {};
  return refuse("a2a_checksum", "is not supported on device=cuda, where the links detect transfer errors",
                "omit --a2a-checksum");
}

Status check_dense_quant(const MoeProblem& p, const MoeChoice& c) {
  if (p.device != DeviceKind::kCuda || c.dense_quant != "q8") return {};
  return refuse("dense_quant=q8", "is not supported on device=cuda, where dense layers are bf16 or fp8",
                "--dense-quant fp8");
}

constexpr LegalityRule kRules[] = {
    {"counts", "tp, ep or dp outside 1 to 1024", check_counts},
    {"dp_divides_tp", "tp that is not a multiple of dp", check_dp_divides_tp},
    {"dp_attention", "dp > 1 without DP attention", check_dp_attention},
    {"flashinfer_dp", "DP attention over a2a flashinfer with dp other than tp", check_flashinfer_dp},
    {"ep_size", "ep that is neither 1 nor tp", check_ep_size},
    {"placement", "redundant experts and placements without a2a deepep, or that ep does not divide",
     check_placement},
    {"ep_divides_experts", "experts that are not a multiple of ep", check_ep_divides_experts},
    {"shard_blocks", "tensor-parallel experts with fewer scale blocks of I than ranks", check_shard_blocks},
    {"gpu_ranks", "several ranks on GPUs other than Hopper", check_gpu_ranks},
    {"gpu_processes",
     "ranks on GPUs over MPI that do not each have a process, or whose experts are placed by load",
     check_gpu_processes},
    {"gpu_checksum", "checksums of a2a rows on GPUs", check_gpu_checksum},
    {"dense_quant", "q8 dense layers on a GPU", check_dense_quant},
    {"deepep_mode", "deepep_mode normal", check_deepep_mode},
};

}  // namespace

std::span<const LegalityRule> legality_rules() { return kRules; }

Status check_legality(const MoeProblem& problem, const MoeChoice& choice) {
  for (const LegalityRule& rule : kRules) FP4MOE_RETURN_IF_ERROR(rule.check(problem, choice));
  return {};
}

Status refuse(const std::string& what, const std::string& why, const std::string& nearest) {
  return unsupported(what + " " + why + "; nearest legal choice: " + nearest);
}

}  // namespace fp4moe
