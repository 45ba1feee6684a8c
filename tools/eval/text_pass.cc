#include "eval/text_pass.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/check.h"
#include "base/cpu_info.h"
#include "io/file.h"
#include "io/tokenizer/tokenizer.h"
#include "model/plan_model.h"

namespace fp4moe {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr int kPageSize = 16;

Result<std::string> text_of_line(const std::string& line, const std::string& where) {
  const nlohmann::json parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto has = [&](const char* key) {
    return parsed.is_object() && parsed.contains(key) && parsed[key].is_string();
  };
  if (has("text")) return parsed["text"].get<std::string>();
  if (has("question") && has("answer"))
    return parsed["question"].get<std::string>() + "\n" + parsed["answer"].get<std::string>();
  return invalid_argument(where + ": expected an object with \"text\", or with \"question\" and \"answer\"");
}

Result<std::vector<std::string>> split_texts(const std::string& path, const std::string& content) {
  if (!path.ends_with(".jsonl")) return std::vector<std::string>{content};
  std::vector<std::string> texts;
  int64_t line_number = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const std::string line = content.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    FP4MOE_ASSIGN_OR_RETURN(std::string text,
                            text_of_line(line, path + ": line " + std::to_string(line_number)));
    texts.push_back(std::move(text));
  }
  return texts;
}

// log(sum(exp(logits))) in double.
double log_sum(std::span<const float> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - top);
  return top + std::log(sum);
}

double divergence(std::span<const float> p, std::span<const float> q) {
  const double log_p = log_sum(p), log_q = log_sum(q);
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i)
    if (const double weight = std::exp(p[i] - log_p); weight > 0)
      sum += weight * ((p[i] - log_p) - (q[i] - log_q));
  return std::max(0.0, sum);
}

size_t top(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

Result<std::vector<std::vector<int32_t>>> read_texts(const std::string& path, const std::string& model_path,
                                                     int64_t max_tokens) {
  FP4MOE_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::load(model_path));
  FP4MOE_ASSIGN_OR_RETURN(const std::string content, read_text_file(path, kMaxTextBytes));
  FP4MOE_ASSIGN_OR_RETURN(const std::vector<std::string> texts, split_texts(path, content));
  std::vector<std::vector<int32_t>> sequences;
  int64_t left = max_tokens;
  for (const std::string& text : texts) {
    FP4MOE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.encode(text, true));
    for (size_t first = 0; first < ids.size() && left >= 2;) {
      const size_t n =
          std::min({ids.size() - first, static_cast<size_t>(kTextChunk), static_cast<size_t>(left)});
      if (n < 2) break;
      const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(first);
      sequences.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(n));
      first += n;
      left -= static_cast<int64_t>(n);
    }
  }
  if (sequences.empty()) return invalid_argument(path + " contains no text of at least 2 tokens");
  return sequences;
}

Result<TextModel> TextModel::load(const std::string& model_path, int threads) {
  TextModel text;
  EngineConfig flags;
  flags.model_path = model_path;
  flags.device = "cpu";
  FP4MOE_ASSIGN_OR_RETURN(text.config_, load_model_config(model_path));
  FP4MOE_ASSIGN_OR_RETURN(const ModelPlan plan, plan_model(text.config_, flags));
  FP4MOE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(model_path));
  text.pool_ = std::make_unique<ThreadPool>(threads > 0 ? threads : available_cores());
  const ModelOptions options{.act_dtype = plan.act_dtype,
                             .kv_dtype = plan.kv_dtype,
                             .isa = plan.isa,
                             .moe_plan = plan.moe,
                             .max_batch_tokens = kTextChunk,
                             .max_logit_rows = kTextChunk};
  FP4MOE_ASSIGN_OR_RETURN(text.model_, Model::load(checkpoint, text.config_, options, *text.pool_, {}));
  FP4MOE_ASSIGN_OR_RETURN(text.kv_, KvCache::make(text.config_, plan.kv_dtype,
                                                  {.full = kTextChunk / kPageSize,
                                                   .slots = StateCache::slots_for(text.config_, 1)},
                                                  kPageSize));
  return text;
}

Result<std::span<const float>> TextModel::forward(std::span<const int32_t> ids) {
  const int64_t t = std::ssize(ids);
  std::vector<int64_t> rows(ids.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<int32_t> pages(static_cast<size_t>((t + kPageSize - 1) / kPageSize));
  std::iota(pages.begin(), pages.end(), 0);
  const SequenceRows sequence{.num_rows = t, .page_table = pages, .slot = 1};
  logits_.resize(static_cast<size_t>(t * config_.vocab_size));
  FP4MOE_RETURN_IF_ERROR(
      model_->forward_model({ids, rows, {&sequence, 1}, rows}, kv_, logits_.data(), *pool_));
  return std::span<const float>(logits_);
}

Result<PredictionReport> compare_predictions(TextModel& reference, TextModel& other,
                                             const std::vector<std::vector<int32_t>>& texts,
                                             const std::function<void(int64_t)>& progress) {
  PredictionReport report;
  std::vector<double> divergences;
  double nll_reference = 0, nll_other = 0;
  const auto v = static_cast<size_t>(reference.vocab_size());
  for (size_t text = 0; text < texts.size(); ++text) {
    const std::vector<int32_t>& ids = texts[text];
    FP4MOE_ASSIGN_OR_RETURN(const std::span<const float> p, reference.forward(ids));
    FP4MOE_ASSIGN_OR_RETURN(const std::span<const float> q, other.forward(ids));
    for (size_t t = 0; t + 1 < ids.size(); ++t) {
      const auto p_row = p.subspan(t * v, v), q_row = q.subspan(t * v, v);
      const auto next = static_cast<size_t>(ids[t + 1]);
      divergences.push_back(divergence(p_row, q_row));
      report.same_top1 += top(p_row) == top(q_row);
      nll_reference += log_sum(p_row) - p_row[next];
      nll_other += log_sum(q_row) - q_row[next];
    }
    progress(static_cast<int64_t>(text) + 1);
  }
  const auto n = static_cast<double>(divergences.size());
  report.num_tokens = std::ssize(divergences);
  report.kl_mean = std::accumulate(divergences.begin(), divergences.end(), 0.0) / n;
  std::sort(divergences.begin(), divergences.end());
  report.kl_p99 = divergences[(divergences.size() - 1) * 99 / 100];
  report.kl_max = divergences.back();
  report.same_top1 /= n;
  report.perplexity_reference = std::exp(nll_reference / n);
  report.perplexity_other = std::exp(nll_other / n);
  return report;
}

}  // namespace fp4moe
