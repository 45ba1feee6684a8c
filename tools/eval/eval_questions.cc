#include "eval/eval_questions.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <sstream>

namespace fp4moe {

namespace {

using Rows = std::vector<std::vector<std::string>>;

// One parsed row of the data.
struct Item {
  std::string question;  // includes the choices, if any
  std::string worked;    // the answer as shown in a few-shot example
  std::string expected;
};

Result<std::string> read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return not_found("--data-path " + path + " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Result<std::vector<Item>> gsm8k_items(const std::string& text) {
  std::vector<Item> items;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find_first_not_of(" \r\t") == std::string::npos) continue;
    const auto row = nlohmann::json::parse(line, nullptr, false);
    const std::string place = "line " + std::to_string(items.size() + 1);
    if (!row.is_object() || !row.value("question", nlohmann::json()).is_string() ||
        !row.value("answer", nlohmann::json()).is_string())
      return data_loss(place + " must be a JSON object with the strings \"question\" and \"answer\"");
    Item item{row["question"], row["answer"], ""};
    item.expected = extract_answer("gsm8k", item.worked);
    if (item.expected.empty()) return data_loss(place + ": the answer contains no number");
    items.push_back(std::move(item));
  }
  return items;
}

std::string with_choices(const std::string& question, const std::array<std::string, 4>& choices) {
  std::string text = question + "\n";
  for (size_t i = 0; i < 4; ++i) text += std::string("\n") + "ABCD"[i] + ") " + choices[i];
  return text;
}

Item choice_item(const std::string& question, const std::array<std::string, 4>& choices, size_t right) {
  const std::string letter(1, "ABCD"[right]);
  return {with_choices(question, choices), "Answer: " + letter, letter};
}

Result<std::vector<Item>> gpqa_items(const Rows& rows, uint64_t seed) {
  static const char* const kColumns[] = {"Question", "Correct Answer", "Incorrect Answer 1",
                                         "Incorrect Answer 2", "Incorrect Answer 3"};
  std::array<size_t, 5> at{};
  for (size_t c = 0; c < 5; ++c) {
    at[c] = static_cast<size_t>(std::find(rows[0].begin(), rows[0].end(), kColumns[c]) - rows[0].begin());
    if (at[c] == rows[0].size()) return data_loss(std::string("the header has no column ") + kColumns[c]);
  }
  std::vector<Item> items;
  std::mt19937_64 random(seed);
  for (size_t r = 1; r < rows.size(); ++r) {
    std::array<size_t, 4> order{0, 1, 2, 3};
    for (size_t i = 3; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
    std::array<std::string, 4> choices;
    for (size_t i = 0; i < 4; ++i) choices[i] = rows[r][at[1 + order[i]]];
    const auto right = static_cast<size_t>(std::find(order.begin(), order.end(), 0) - order.begin());
    items.push_back(choice_item(rows[r][at[0]], choices, right));
  }
  return items;
}

// Columns question,A,B,C,D,answer, with or without a header row.
Result<std::vector<Item>> mmlu_items(const Rows& rows) {
  std::vector<Item> items;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].size() < 6) return data_loss("row " + std::to_string(r + 1) + " has fewer than 6 columns");
    const size_t right = std::string("ABCD").find(rows[r][5]);
    if (rows[r][5].size() != 1 || right == std::string::npos) {
      if (r == 0) continue;  // the header
      return data_loss("row " + std::to_string(r + 1) + ": the answer must be A, B, C or D; got '" +
                       rows[r][5] + "'");
    }
    items.push_back(choice_item(rows[r][0], {rows[r][1], rows[r][2], rows[r][3], rows[r][4]}, right));
  }
  return items;
}

Result<std::vector<Item>> load_items(const QuestionOptions& options) {
  auto text = read_text(options.data_path);
  if (!text.ok()) return text.status();
  if (options.eval_name == "gsm8k") return gsm8k_items(*text);
  auto rows = parse_csv(*text);
  if (!rows.ok()) return rows.status();
  if (rows->empty()) return data_loss("the file is empty");
  for (size_t r = 1; r < rows->size(); ++r) {
    if ((*rows)[r].size() < (*rows)[0].size())
      return data_loss("row " + std::to_string(r + 1) + " has fewer columns than the first");
  }
  return options.eval_name == "gpqa" ? gpqa_items(*rows, options.seed) : mmlu_items(*rows);
}

std::string zero_shot_prompt(const std::string& eval_name, const std::string& question) {
  if (eval_name == "gsm8k") return question;
  return "Answer the following multiple choice question. The last line of your response should be of the "
         "following "
         "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before "
         "answering.\n\n" +
         question;
}

}  // namespace

Result<std::vector<std::vector<std::string>>> parse_csv(const std::string& text) {
  Rows rows;
  std::vector<std::string> row;
  std::string field;
  bool quoted = false, any = false;  // whether inside quotes; whether the current row is not empty
  const auto end_row = [&] {
    row.push_back(std::move(field));
    field.clear();
    rows.push_back(std::move(row));
    row.clear();
    any = false;
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '"' && i + 1 < text.size() && text[i + 1] == '"') {
      field += text[++i];
    } else if (c == '"') {
      quoted = !quoted;
      any = true;
    } else if (quoted) {
      field += c;
    } else if (c == ',') {
      row.push_back(std::move(field));
      field.clear();
      any = true;
    } else if (c == '\n') {
      if (any) end_row();
    } else if (c != '\r') {
      field += c;
      any = true;
    }
  }
  if (quoted) return data_loss("a quoted field is not terminated");
  if (any) end_row();
  return rows;
}

std::string extract_answer(const std::string& eval_name, const std::string& answer) {
  if (eval_name != "gsm8k") {
    static const std::regex kLetter(R"(Answer\s*:\s*\$?\(?([A-D])\b)", std::regex::icase);
    std::string letter;
    for (std::sregex_iterator at(answer.begin(), answer.end(), kLetter), end; at != end; ++at)
      letter = (*at)[1];
    if (!letter.empty()) letter[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(letter[0])));
    return letter;
  }
  static const std::regex kNumber(R"(-?\d[\d,]*(\.\d+)?)");
  const size_t mark = answer.rfind("####");
  const std::string part = mark == std::string::npos ? answer : answer.substr(mark);
  std::string number;
  for (std::sregex_iterator at(part.begin(), part.end(), kNumber), end; at != end; ++at) {
    number = at->str();
    if (mark != std::string::npos) break;  // use the first number after the mark
  }
  number.erase(std::remove(number.begin(), number.end(), ','), number.end());
  if (number.find('.') != std::string::npos) {
    number.erase(number.find_last_not_of('0') + 1);
    if (number.back() == '.') number.pop_back();
  }
  return number;
}

Result<QuestionSet> load_questions(const QuestionOptions& options) {
  auto loaded = load_items(options);
  if (!loaded.ok()) return loaded.status().with_context(options.data_path);
  const std::vector<Item>& items = *loaded;
  const auto shots = static_cast<size_t>(options.num_shots);
  if (items.size() <= shots)
    return invalid_argument("--num-shots " + std::to_string(shots) + " must be less than the " +
                            std::to_string(items.size()) + " questions in " + options.data_path);
  QuestionSet set;
  set.few_shot = shots > 0;
  std::string examples;
  for (size_t i = 0; i < shots; ++i)
    examples += "Question: " + items[i].question + "\nAnswer: " + items[i].worked + "\n\n";
  if (set.few_shot) set.stop = {"Question", "Assistant:", "<|separator|>"};
  size_t end = items.size();
  if (options.num_examples > 0) end = std::min(end, shots + static_cast<size_t>(options.num_examples));
  for (size_t i = shots; i < end; ++i) {
    const Item& item = items[i];
    set.questions.push_back({item.question,
                             set.few_shot ? examples + "Question: " + item.question + "\nAnswer:"
                                          : zero_shot_prompt(options.eval_name, item.question),
                             item.expected});
  }
  return set;
}

}  // namespace fp4moe
