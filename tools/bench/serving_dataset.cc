#include "bench/serving_dataset.h"

#include <algorithm>
#include <fstream>
#include <random>

namespace fp4moe {

namespace {

using json = nlohmann::ordered_json;

constexpr uint64_t kWords = 1000;  // random words are the numbers below this one

int64_t random_length(int64_t most, double ratio, std::mt19937_64& random) {
  const int64_t least = std::max<int64_t>(static_cast<int64_t>(static_cast<double>(most) * ratio), 1);
  return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
}

std::vector<ServingPrompt> random_prompts(const DatasetOptions& options) {
  std::mt19937_64 random(options.seed);
  std::vector<ServingPrompt> prompts(static_cast<size_t>(options.num_prompts));
  for (ServingPrompt& prompt : prompts) {
    const int64_t length = random_length(options.random_input_len, options.random_range_ratio, random);
    prompt.max_tokens = random_length(options.random_output_len, options.random_range_ratio, random);
    if (!options.chat) {
      prompt.num_ids = length;
      prompt.content = json::array();
      for (int64_t i = 0; i < length; ++i)
        prompt.content.push_back(random() % static_cast<uint64_t>(options.vocab_size));
      continue;
    }
    std::string text;
    for (int64_t i = 0; i < length; ++i) text += (i == 0 ? "" : " ") + std::to_string(random() % kWords);
    prompt.content = text;
  }
  return prompts;
}

Result<ServingPrompt> prompt_of_line(const std::string& line, const DatasetOptions& options) {
  const json row = json::parse(line, nullptr, false);
  if (!row.is_object()) return data_loss("the line is not a JSON object");
  ServingPrompt prompt;
  prompt.content = row.value("prompt", json());
  const bool is_ids = prompt.content.is_array() && !prompt.content.empty() &&
                      std::all_of(prompt.content.begin(), prompt.content.end(),
                                  [](const json& id) { return id.is_number_unsigned(); });
  if (!is_ids && !prompt.content.is_string())
    return data_loss("\"prompt\" must be a string or a list of token ids");
  if (is_ids && options.chat)
    return invalid_argument("\"prompt\" has token ids, which /v1/chat/completions does not accept");
  if (is_ids) prompt.num_ids = static_cast<int64_t>(prompt.content.size());
  const json most = row.value("max_tokens", json(options.random_output_len));
  if (!most.is_number_integer() || most.get<int64_t>() < 1)
    return data_loss("\"max_tokens\": " + most.dump() + " must be an integer of at least 1");
  prompt.max_tokens = most.get<int64_t>();
  return prompt;
}

Result<std::vector<ServingPrompt>> file_prompts(const DatasetOptions& options) {
  std::ifstream file(options.path, std::ios::binary);
  if (!file) return not_found("--dataset-path " + options.path + " cannot be read");
  std::vector<ServingPrompt> prompts;
  int64_t number = 0;
  for (std::string line; std::getline(file, line) && std::ssize(prompts) < options.num_prompts;) {
    ++number;
    if (line.find_first_not_of(" \r\t") == std::string::npos) continue;
    auto prompt = prompt_of_line(line, options);
    if (!prompt.ok()) return prompt.status().with_context(options.path + ": line " + std::to_string(number));
    prompts.push_back(std::move(*prompt));
  }
  if (prompts.empty()) return data_loss(options.path + " contains no prompts");
  return prompts;
}

}  // namespace

Result<std::vector<ServingPrompt>> make_prompts(const DatasetOptions& options) {
  if (options.name == "file") return file_prompts(options);
  return random_prompts(options);
}

}  // namespace fp4moe
