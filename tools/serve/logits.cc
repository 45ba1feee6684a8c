// fp4moe logits: runs given token ids as one prompt and writes every position's logits to a safetensors file.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "engine/ranks/rank_group.h"
#include "engine/startup/memory_plan.h"
#include "io/checkpoint/safetensors.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/file.h"
#include "io/write/dummy_checkpoint.h"
#include "model/plan_model.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxIdsFileBytes = 64 << 20;

struct LogitsFlags {
  EngineConfig engine;
  std::string input_ids, output;
};

Result<std::vector<int32_t>> read_ids(const std::string& path, int64_t vocab_size) {
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxIdsFileBytes));
  const nlohmann::json parsed = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_array() || parsed.empty())
    return invalid_argument(path + ": expected a non-empty JSON array of token ids");
  std::vector<int32_t> ids;
  for (const nlohmann::json& id : parsed) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab_size)
      return invalid_argument(path + ": token id " + id.dump() + " at index " + std::to_string(ids.size()) +
                              " must be an integer from 0 to " + std::to_string(vocab_size - 1));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

// Logits [T, V] of one prompt, computed in steps of at most `chunk` rows.
Result<std::vector<float>> run_steps(RankGroup& ranks, std::span<const int32_t> ids, int64_t chunk) {
  const int64_t t = std::ssize(ids), v = ranks.config().vocab_size;
  std::vector<int32_t> pages(static_cast<size_t>(ranks.num_kv_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<float> logits(static_cast<size_t>(t * v));
  std::vector<Batch> groups(static_cast<size_t>(ranks.num_groups()));  // all but the first are idle
  const int32_t slot = ranks.num_slots() > 0 ? 1 : 0;                  // 0: a model without states
  for (int64_t first = 0; first < t; first += chunk) {
    const int64_t num_rows = std::min(chunk, t - first);
    std::vector<int64_t> positions(static_cast<size_t>(num_rows)), rows(positions.size());
    std::iota(positions.begin(), positions.end(), first);
    std::iota(rows.begin(), rows.end(), 0);
    const SequenceRows sequence{
        .num_rows = num_rows, .first_position = first, .page_table = pages, .slot = slot};
    groups[0] = {ids.subspan(static_cast<size_t>(first), rows.size()), positions, {&sequence, 1}, rows};
    FP4MOE_RETURN_IF_ERROR(ranks.execute_step(groups));
    std::copy_n(ranks.logits(), num_rows * v, logits.begin() + first * v);
  }
  return logits;
}

Status run_logits(const LogitsFlags& flags) {
  const EngineConfig& engine = flags.engine;
  FP4MOE_RETURN_IF_ERROR(check_writable("--output", flags.output));
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(engine.model_path));
  FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config, engine));
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, read_ids(flags.input_ids, config.vocab_size));
  const int64_t t = static_cast<int64_t>(ids.size());
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_weights(engine.model_path, engine.load_format, config));
  FP4MOE_RETURN_IF_ERROR(check_unused_tensors(checkpoint, config, engine.allow_unused_tensors));
  EngineConfig flags_of_pass = plan.flags;
  const int64_t chunk = engine.chunked_prefill_size > 0 ? std::min(t, engine.chunked_prefill_size) : t;
  flags_of_pass.max_prefill_tokens = chunk;
  flags_of_pass.disable_cuda_graph = true;
  flags_of_pass.disable_hybrid_swa_memory = true;  // one step holds all tokens
  FP4MOE_ASSIGN_OR_RETURN(const MemoryProblem problem,
                          memory_problem(checkpoint, config, plan, flags_of_pass));
  FP4MOE_ASSIGN_OR_RETURN(const MemoryPlan memory, plan_memory(problem, flags_of_pass));
  if (t > memory.context_length)
    return does_not_fit(flags.input_ids + ": " + std::to_string(t) + " tokens exceed the context length of " +
                        std::to_string(memory.context_length));

  const RankGroupOptions options{
      .max_batch_tokens = chunk,
      // GPUs divide it by dp.
      .max_logit_rows = plan.device() == DeviceKind::kCuda ? chunk * engine.dp_size : chunk,
      .num_kv_pages = (t + engine.page_size - 1) / engine.page_size,
      .num_slots = StateCache::slots_for(config, 1),
      .wants_logits = true,
  };
  FP4MOE_ASSIGN_OR_RETURN(const std::unique_ptr<RankGroup> ranks,
                          RankGroup::make(checkpoint, config, plan, flags_of_pass, options));
  if (ranks->job() != nullptr && ranks->job()->process() != 0) return ranks->follow();
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<float> logits, run_steps(*ranks, ids, chunk));
  const std::span<const uint8_t> bytes{reinterpret_cast<const uint8_t*>(logits.data()), logits.size() * 4};
  return write_safetensors(flags.output, {{"logits", DType::kF32, {t, config.vocab_size}}},
                           [bytes](const TensorSpec&, const ByteSink& sink) { return sink(bytes); });
}

}  // namespace

void add_logits(CLI::App& app, int& exit_code) {
  CLI::App* subcommand =
      app.add_subcommand("logits", "Write the logits of every position of given token ids");
  auto flags = std::make_shared<LogitsFlags>();
  add_engine_flags(*subcommand, flags->engine);
  subcommand->add_option("--input-ids", flags->input_ids, "file with a JSON array of token ids")
      ->required()
      ->type_name("FILE");
  subcommand
      ->add_option("--output", flags->output, "safetensors file to write: tensor `logits` [T, V], float32")
      ->required()
      ->type_name("FILE");
  subcommand->callback([flags, &exit_code] {
    set_log_sink([](LogLevel level, const std::string& line) {
      if (level == LogLevel::kError) std::fprintf(stderr, "error: %s\n", line.c_str());
    });
    if (const Status status = run_logits(*flags); !status.ok()) exit_code = report_error(status);
  });
}

}  // namespace fp4moe
