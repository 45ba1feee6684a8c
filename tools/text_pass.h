// Forward passes over texts, outside of the engine: what calibration and comparisons of models look at.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/kv_cache.h"
#include "model/model.h"

namespace fp4moe {

constexpr int64_t kTextChunk = 512;  // tokens of one sequence at most

// Token ids of a file's texts, each sequence at least 2 and at most kTextChunk tokens, max_tokens in all. A
// name that ends in .jsonl holds one object a line, of which "text", or "question" and "answer", is a text;
// any other file is one. kInvalidArgument: no text of two tokens; a line that is not such an object.
Result<std::vector<std::vector<int32_t>>> read_texts(const std::string& path, const std::string& model_path,
                                                     int64_t max_tokens);

// A model on one rank of the CPU.
class TextModel {
 public:
  // What the layers pack is recorded if the thread has a CalibrationScope.
  static Result<TextModel> load(const std::string& model_path, int threads);

  int64_t vocab_size() const { return config_.vocab_size; }
  // Logits [T, V] of one sequence from its start, valid until the next call.
  Result<std::span<const float>> forward(std::span<const int32_t> ids);

 private:
  ModelConfig config_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Model> model_;
  KvCache kv_;
  std::vector<float> logits_;
};

// How one model's predictions differ from another's, over the tokens after the first of every text.
struct PredictionReport {
  int64_t num_tokens = 0;
  double kl_mean = 0, kl_p99 = 0, kl_max = 0;  // of reference || other, nats
  double same_top1 = 0;                        // share of tokens
  double perplexity_reference = 0, perplexity_other = 0;
};
Result<PredictionReport> compare_predictions(TextModel& reference, TextModel& other,
                                             const std::vector<std::vector<int32_t>>& texts,
                                             const std::function<void(int64_t done_texts)>& progress);

}  // namespace fp4moe
