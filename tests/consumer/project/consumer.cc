// A minimal user program: loads a model, submits one prompt and prints the output.
#include <fp4moe/config.h>
#include <fp4moe/engine.h>

#include <cstdio>
#include <future>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  fp4moe::EngineConfig config;
  config.model_path = argv[1];
  config.max_total_tokens = 1024;
  auto engine = fp4moe::Engine::make(config);
  if (!engine.ok()) return std::fprintf(stderr, "%s\n", engine.status().to_string().c_str()), 1;

  auto prompt = (*engine)->apply_chat_template(
      R"([{"role": "user", "content": "Mia has 12 apples. Mia buys 5 more and gives 3 to Tom. How many apples does Mia have now?"}])",
      {});
  auto ids = (*engine)->tokenize(prompt.ok() ? *prompt : "", false);
  if (!ids.ok()) return std::fprintf(stderr, "%s\n", ids.status().to_string().c_str()), 1;

  fp4moe::Request request{.input_ids = *ids};
  request.sampling.temperature = 0;
  std::string answer;
  std::promise<void> done;
  auto id = (*engine)->submit(request, [&](const fp4moe::Delta& delta) {
    answer += delta.text;
    if (delta.finish_reason != fp4moe::FinishReason::kNone) done.set_value();
  });
  if (!id.ok()) return std::fprintf(stderr, "%s\n", id.status().to_string().c_str()), 1;
  done.get_future().wait();
  std::printf("%s\n", answer.c_str());
  return answer.find("#### 14") == std::string::npos;
}
