// Forward passes over texts outside the engine, for calibration and for comparing models.
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

constexpr int64_t kTextChunk = 512;  // maximum tokens of a sequence

// Returns the token ids of a file's texts as sequences of 2 to kTextChunk tokens, at most max_tokens in
// total. In a file named *.jsonl, each line is an object whose "text", or "question" and "answer", form one
// text; any other file is one text. kInvalidArgument: no text has two tokens, or a line lacks these fields.
Result<std::vector<std::vector<int32_t>>> read_texts(const std::string& path, const std::string& model_path,
                                                     int64_t max_tokens);

// A model on one CPU rank.
class TextModel {
 public:
  // The model records activation amaxes if the calling thread has a CalibrationScope.
  static Result<TextModel> load(const std::string& model_path, int threads);

  int64_t vocab_size() const { return config_.vocab_size; }
  // Returns the logits [T, V] of one sequence that starts at position 0; valid until the next call.
  Result<std::span<const float>> forward(std::span<const int32_t> ids);

 private:
  ModelConfig config_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Model> model_;
  KvCache kv_;
  std::vector<float> logits_;
};

// Differences between two models' predictions, over all tokens except the first of every sequence.
struct PredictionReport {
  int64_t num_tokens = 0;
  double kl_mean = 0, kl_p99 = 0, kl_max = 0;  // KL(reference || other) in nats
  double same_top1 = 0;                        // fraction of tokens
  double perplexity_reference = 0, perplexity_other = 0;
};
Result<PredictionReport> compare_predictions(TextModel& reference, TextModel& other,
                                             const std::vector<std::vector<int32_t>>& texts,
                                             const std::function<void(int64_t done_texts)>& progress);

}  // namespace fp4moe
