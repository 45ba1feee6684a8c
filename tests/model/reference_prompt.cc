#include "reference_prompt.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "io/checkpoint/safetensors.h"
#include "io/file.h"
#include "model/kv_cache.h"
#include "model/model.h"
#include "model/plan_model.h"

namespace fp4moe {

Result<ReferencePrompt> read_reference(const std::string& file, const std::string& ids_name,
                                       const std::string& logits_name) {
  FP4MOE_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::open(file));
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<SafetensorsEntry> entries, parse_safetensors(mapped.bytes()));
  ReferencePrompt prompt;
  for (const SafetensorsEntry& e : entries) {
    const uint8_t* data = mapped.bytes().data() + e.begin;
    if (e.spec.name == ids_name && e.spec.dtype == DType::kI64) {
      std::vector<int64_t> ids(static_cast<size_t>(e.end - e.begin) / 8);
      std::memcpy(ids.data(), data, ids.size() * 8);
      prompt.ids.assign(ids.begin(), ids.end());
    } else if (e.spec.name == logits_name && e.spec.dtype == DType::kF32) {
      prompt.logits.resize(static_cast<size_t>(e.end - e.begin) / 4);
      std::memcpy(prompt.logits.data(), data, prompt.logits.size() * 4);
    }
  }
  if (prompt.ids.empty() || prompt.logits.empty())
    return not_found(file + ": " + ids_name + ", " + logits_name);
  return prompt;
}

Result<std::vector<float>> compute_logits(const LogitsRun& run, const std::vector<int32_t>& ids) {
  const int64_t t = static_cast<int64_t>(ids.size()), chunk = run.chunk > 0 ? run.chunk : t;
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(run.folder));
  FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config, run.flags));
  ThreadPool pool(std::max(1, run.flags.threads));
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint opened, Checkpoint::open(run.folder));
  const Checkpoint& checkpoint = run.checkpoint != nullptr ? *run.checkpoint : opened;
  const ModelOptions options{.act_dtype = plan.act_dtype,
                             .kv_dtype = plan.kv_dtype,
                             .isa = plan.isa,
                             .moe_plan = plan.moe,
                             .max_batch_tokens = chunk,
                             .dense_quant = plan.dense_quant};
  FP4MOE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                          Model::load(checkpoint, config, options, pool, {}));
  const int64_t num_pages = (t + run.page_size - 1) / run.page_size;
  FP4MOE_ASSIGN_OR_RETURN(
      KvCache kv,
      KvCache::make(config, plan.kv_dtype, {.full = num_pages, .slots = StateCache::slots_for(config, 1)},
                    run.page_size));

  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.rbegin(), pages.rend(), 0);  // not in memory order
  std::vector<float> logits(static_cast<size_t>(t * config.vocab_size));
  for (int64_t first = 0; first < t; first += chunk) {
    const int64_t rows = std::min(chunk, t - first);
    std::vector<int64_t> positions(static_cast<size_t>(rows)), logit_rows(static_cast<size_t>(rows));
    std::iota(positions.begin(), positions.end(), first);
    std::iota(logit_rows.begin(), logit_rows.end(), 0);
    const SequenceRows sequence{.num_rows = rows, .first_position = first, .page_table = pages, .slot = 1};
    const std::span<const int32_t> chunk_ids(ids.data() + first, static_cast<size_t>(rows));
    FP4MOE_RETURN_IF_ERROR(model->forward_model({chunk_ids, positions, {&sequence, 1}, logit_rows}, kv,
                                                logits.data() + first * config.vocab_size, pool));
  }
  return logits;
}

Result<std::vector<float>> compute_batch_logits(const LogitsRun& run,
                                                const std::vector<std::vector<int32_t>>& prompts) {
  FP4MOE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(run.folder));
  FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(config, run.flags));
  ThreadPool pool(std::max(1, run.flags.threads));
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(run.folder));
  std::vector<int32_t> ids;
  std::vector<int64_t> positions, first_page;
  int64_t num_pages = 0;
  for (const auto& prompt : prompts) {
    first_page.push_back(num_pages);
    num_pages += (static_cast<int64_t>(prompt.size()) + run.page_size - 1) / run.page_size;
    ids.insert(ids.end(), prompt.begin(), prompt.end());
    for (size_t i = 0; i < prompt.size(); ++i) positions.push_back(static_cast<int64_t>(i));
  }
  const int64_t t = static_cast<int64_t>(ids.size());
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.rbegin(), pages.rend(), 0);
  std::vector<SequenceRows> sequences;
  for (size_t i = 0, row = 0; i < prompts.size(); row += prompts[i++].size())
    sequences.push_back({.first_row = static_cast<int64_t>(row),
                         .num_rows = static_cast<int64_t>(prompts[i].size()),
                         .page_table = std::span(pages).subspan(static_cast<size_t>(first_page[i])),
                         .slot = static_cast<int32_t>(i) + 1});
  std::vector<int64_t> logit_rows(ids.size());
  std::iota(logit_rows.begin(), logit_rows.end(), 0);

  const ModelOptions options{.act_dtype = plan.act_dtype,
                             .kv_dtype = plan.kv_dtype,
                             .isa = plan.isa,
                             .moe_plan = plan.moe,
                             .max_batch_tokens = t,
                             .dense_quant = plan.dense_quant};
  FP4MOE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                          Model::load(checkpoint, config, options, pool, {}));
  FP4MOE_ASSIGN_OR_RETURN(
      KvCache kv,
      KvCache::make(config, plan.kv_dtype,
                    {.full = num_pages, .slots = StateCache::slots_for(config, std::ssize(prompts))},
                    run.page_size));
  std::vector<float> logits(static_cast<size_t>(t * config.vocab_size));
  FP4MOE_RETURN_IF_ERROR(
      model->forward_model({ids, positions, sequences, logit_rows}, kv, logits.data(), pool));
  return logits;
}

}  // namespace fp4moe
