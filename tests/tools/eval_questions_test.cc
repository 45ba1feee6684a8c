#include "eval/eval_questions.h"

#include <gtest/gtest.h>

#include <fstream>

namespace fp4moe {
namespace {

using Rows = std::vector<std::vector<std::string>>;

TEST(ExtractAnswer, Numbers) {
  const std::pair<const char*, const char*> cases[] = {{"so 3 + 4 = 7\n#### 7", "7"},
                                                       {"#### -12", "-12"},
                                                       {"#### 1,234.50 dollars", "1234.5"},
                                                       {"#### 2.0", "2"},
                                                       {"first 5, then 6.", "6"},
                                                       {"no number here", ""},
                                                       {"", ""},
                                                       {"#### none", ""},
                                                       {"#### 8 of 10", "8"},
                                                       {"it is $1,000.", "1000"}};
  for (const auto& [answer, expected] : cases) EXPECT_EQ(extract_answer("gsm8k", answer), expected) << answer;
}

TEST(ExtractAnswer, Letters) {
  const std::pair<const char*, const char*> cases[] = {{"Answer: B", "B"},
                                                       {"A) 1 no\nB) 2 yes\nAnswer: B", "B"},
                                                       {"Answer: A ... Answer: D", "D"},
                                                       {"answer: c", "C"},
                                                       {"Answer: (C)", "C"},
                                                       {"Answer: E", ""},
                                                       {"B", ""},
                                                       {"Answer: Apple", ""}};
  for (const auto& [answer, expected] : cases) EXPECT_EQ(extract_answer("gpqa", answer), expected) << answer;
}

TEST(ParseCsv, QuotesAndLines) {
  EXPECT_EQ(*parse_csv("a,b\r\n\"x, \"\"y\"\"\",\"1\n2\"\n\n,\n"),
            (Rows{{"a", "b"}, {"x, \"y\"", "1\n2"}, {"", ""}}));
  EXPECT_EQ(*parse_csv("a"), (Rows{{"a"}}));
  EXPECT_EQ(*parse_csv(""), Rows{});
  EXPECT_EQ(parse_csv("\"open").status().code(), StatusCode::kDataLoss);
}

class Questions : public testing::Test {
 protected:
  QuestionOptions write(const std::string& name, const std::string& text) {
    QuestionOptions options;
    options.eval_name = name;
    options.data_path = testing::TempDir() + "/eval_questions_" + name;
    std::ofstream(options.data_path) << text;
    return options;
  }
};

TEST_F(Questions, ShotsAreNotAsked) {
  QuestionOptions options =
      write("gsm8k",
            "{\"question\":\"q1\",\"answer\":\"a\\n#### 1\"}\n{\"question\":\"q2\",\"answer\":\"#### 2\"}\n");
  options.num_shots = 1;
  const auto set = load_questions(options);
  ASSERT_TRUE(set.ok()) << set.status().to_string();
  ASSERT_EQ(set->questions.size(), 1u);
  EXPECT_EQ(set->questions[0].prompt, "Question: q1\nAnswer: a\n#### 1\n\nQuestion: q2\nAnswer:");
  EXPECT_EQ(set->questions[0].expected, "2");
  options.num_shots = 2;
  EXPECT_EQ(load_questions(options).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Questions, ChoicesAreShuffledBySeedAndStayRight) {
  std::string text = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n";
  for (int i = 0; i < 64; ++i) text += "q,right,w1,w2,w3\n";
  const QuestionOptions options = write("gpqa", text);
  const auto set = load_questions(options), again = load_questions(options);
  ASSERT_TRUE(set.ok());
  int count[4] = {};
  for (size_t i = 0; i < 64; ++i) {
    const Question& q = set->questions[i];
    EXPECT_NE(q.prompt.find(q.expected + ") right"), std::string::npos);
    EXPECT_EQ(q.prompt, again->questions[i].prompt);
    ++count[q.expected[0] - 'A'];
  }
  for (const int c : count) EXPECT_GT(c, 0);
}

TEST_F(Questions, MmluWithAndWithoutHeader) {
  const auto with = load_questions(write("mmlu", "question,A,B,C,D,answer\nq,1,2,3,4,C\n"));
  ASSERT_TRUE(with.ok()) << with.status().to_string();
  ASSERT_EQ(with->questions.size(), 1u);
  EXPECT_EQ(with->questions[0].expected, "C");
  EXPECT_EQ(load_questions(write("mmlu", "q,1,2,3,4,C\nq,1,2,3,4,A\n"))->questions.size(), 2u);
  EXPECT_EQ(load_questions(write("mmlu", "q,1,2,3,4,C\nq,1,2,3,4,E\n")).status().code(),
            StatusCode::kDataLoss);
}

TEST_F(Questions, BadDataIsNamed) {
  EXPECT_EQ(load_questions(write("gsm8k", "{\"question\":5}\n")).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(load_questions(write("gpqa", "Question\nq\n")).status().code(), StatusCode::kDataLoss);
  QuestionOptions missing;
  missing.eval_name = "gsm8k";
  missing.data_path = "/no/such/file";
  EXPECT_EQ(load_questions(missing).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace fp4moe
