#include "io/jinja/chat_template.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "io/temp_folder.h"

namespace fp4moe {
namespace {

using Json = nlohmann::ordered_json;

Result<std::string> render(std::string_view source, std::string_view messages = "[]",
                           ChatTemplateOptions options = {}) {
  auto parsed = ChatTemplate::parse(source);
  if (!parsed.ok()) return parsed.status();
  return parsed->render(messages, options);
}

std::string read_data(const std::string& name) {
  std::ifstream file(std::string(FP4MOE_TEMPLATES) + "/" + name);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const TempFolder& folder, const std::string& name, const std::string& text) {
  std::ofstream(folder.file(name)) << text;
}

void expect_error(std::string_view source, StatusCode code, const std::string& part) {
  const auto got = render(source);
  ASSERT_FALSE(got.ok()) << source << " gives " << *got;
  EXPECT_EQ(got.status().code(), code) << got.status().to_string();
  EXPECT_NE(got.status().message().find(part), std::string::npos) << got.status().to_string();
}

// The expected texts were produced by Jinja2 (data/templates/expected.py).
TEST(ChatTemplate, EqualsJinja2OnEveryConstruct) {
  const Json conversations = Json::parse(read_data("conversations.json"));
  for (const char* name :
       {"constructs", "thinking", "tool_types", "argument_tags", "call_tokens", "function_tags"}) {
    const Json expected = Json::parse(read_data(std::string(name) + ".json"));
    ASSERT_EQ(expected.size(), conversations.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      ChatTemplateOptions options;
      options.add_generation_prompt = conversations[i].at("add_generation_prompt");
      options.kwargs_json = conversations[i].at("kwargs").dump();
      if (conversations[i].contains("tools")) options.tools_json = conversations[i]["tools"].dump();
      const auto text =
          render(read_data(std::string(name) + ".jinja"), conversations[i].at("messages").dump(), options);
      ASSERT_TRUE(text.ok()) << name << ": " << text.status().to_string();
      EXPECT_EQ(*text, expected[i].get<std::string>()) << name << " " << i;
    }
  }
}

TEST(ChatTemplate, SyntaxErrorsNameTheLine) {
  expect_error("a\n{% if x %}", StatusCode::kInvalidArgument,
               "line 2: unexpected end of template, expected 'endif'");
  expect_error("\n\n{{ 1 + }}", StatusCode::kInvalidArgument, "line 3: ");
  expect_error("{{ x|nothing }}", StatusCode::kInvalidArgument, "no filter named 'nothing'");
  expect_error("{% extends 'x' %}", StatusCode::kInvalidArgument, "unknown tag 'extends'");
  expect_error("{{ 99999999999999999999 }}", StatusCode::kInvalidArgument, "does not fit in 64 bits");
  expect_error("\xff", StatusCode::kInvalidArgument, "not valid UTF-8");
}

TEST(ChatTemplate, RuntimeErrorsNameTheLine) {
  expect_error("\n{{ raise_exception('No system role') }}", StatusCode::kInvalidArgument,
               "line 2: No system role");
  expect_error("{{ x.y.z }}", StatusCode::kInvalidArgument, "'x' is undefined");
  expect_error("{{ {}.y.z }}", StatusCode::kInvalidArgument, "'dict object' has no attribute 'y'");
  expect_error("{{ messages.append(1) }}", StatusCode::kInvalidArgument, "unsafe");
  expect_error("{{ ''.__class__.__mro__ }}", StatusCode::kInvalidArgument, "unsafe");
  expect_error("{{ 9223372036854775807 + 1 }}", StatusCode::kInvalidArgument, "does not fit in 64 bits");
}

TEST(ChatTemplate, HostileTemplatesMeetLimits) {
  const std::string loop = "{% set r = range(100000) %}{% for i in r %}{% for j in r %}";
  expect_error(loop + "{% endfor %}{% endfor %}", StatusCode::kDoesNotFit, "steps");
  expect_error(loop + "xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}", StatusCode::kDoesNotFit, "bytes");
  expect_error("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", StatusCode::kDoesNotFit, "levels");
  expect_error("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
               StatusCode::kDoesNotFit, "memory");
  expect_error(
      "{% set n = namespace(s=[]) %}{% for i in range(5000) %}{% set n.s = [n.s] %}{% endfor %}{{ n.s }}",
      StatusCode::kDoesNotFit, "levels");
  expect_error("{{ 'x' * 9999999999 }}", StatusCode::kDoesNotFit, "memory");
  expect_error("{{ " + std::string(20000, '(') + "1" + std::string(20000, ')') + " }}",
               StatusCode::kDoesNotFit, "deep");
  expect_error("{{ " + std::string(20000, '-') + "1 }}", StatusCode::kDoesNotFit, "deep");
  std::string sum = "{{ 1", ifs;
  for (int i = 0; i < 20000; ++i) sum += "+1", ifs += "{% if x %}";
  expect_error(sum + " }}", StatusCode::kDoesNotFit, "deep");
  expect_error(ifs, StatusCode::kDoesNotFit, "deep");
  const auto deep = render("{{ messages }}", std::string(20000, '['));
  EXPECT_EQ(deep.status().code(), StatusCode::kDoesNotFit);
}

TEST(ChatTemplate, BadInputIsRefused) {
  EXPECT_EQ(render("x", "{").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(render("x", "{}").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(render("x", "[18446744073709551615]").status().code(), StatusCode::kInvalidArgument);
  ChatTemplateOptions options;
  options.continue_final_message = true;
  EXPECT_EQ(render("x", R"([{"content": "a"}])", options).status().code(), StatusCode::kInvalidArgument);
}

TEST(ChatTemplate, ContinuesTheFinalMessage) {
  ChatTemplateOptions options;
  options.add_generation_prompt = false;
  options.continue_final_message = true;
  const char* messages = R"([{"content": "a"}, {"content": "b "}])";
  EXPECT_EQ(*render("{% for m in messages %}<{{ m.content }}>{% endfor %}", messages, options), "<a><b ");
  EXPECT_EQ(*render("{% for m in messages %}<{{ m.content|trim }}>{% endfor %}", messages, options), "<a><b");
}

TEST(ChatTemplate, LoadsFromTheFolder) {
  const TempFolder folder;
  const auto load = [&](const std::string& override_path = "") {
    return ChatTemplate::load(folder.path(), override_path);
  };
  EXPECT_EQ(load().status().code(), StatusCode::kUnsupported);
  write(folder, "tokenizer_config.json",
        R"({"bos_token": "<s>", "eos_token": {"content": "</s>", "special": true}, "chat_template":
                   [{"name": "other", "template": "o"}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"},
                    {"name": "tool_use", "template": "tools"}]})");
  EXPECT_EQ(*load()->render("[]", {}), "<s></s>");
  ChatTemplateOptions with_tools;
  with_tools.tools_json = "[]";
  EXPECT_EQ(*load()->render("[]", with_tools), "tools");
  write(folder, "chat_template.jinja", "file{{ bos_token }}{{ pad_token }}");
  EXPECT_EQ(*load()->render("[]", {}), "file<s>");
  write(folder, "mine.jinja", "mine");
  EXPECT_EQ(*load(folder.path() + "/mine.jinja")->render("[]", {}), "mine");
  EXPECT_EQ(load(folder.path() + "/absent").status().code(), StatusCode::kNotFound);
  write(folder, "chat_template.jinja", "{% bad %}");
  EXPECT_EQ(load().status().code(), StatusCode::kInvalidArgument);
}

TEST(ChatTemplate, RendersFromManyThreads) {
  const auto parsed = ChatTemplate::parse(
      "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}");
  ASSERT_TRUE(parsed.ok());
  std::vector<std::thread> threads;
  std::vector<std::string> texts(4);
  for (size_t i = 0; i < texts.size(); ++i)
    threads.emplace_back([&, i] { texts[i] = *parsed->render("[1, 2, " + std::to_string(i) + "]", {}); });
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(texts[i], std::to_string(3 + i));
}

}  // namespace
}  // namespace fp4moe
