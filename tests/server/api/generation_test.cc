// A generation whose exchange is stalled holds bounded memory while a fake engine runs at full speed.
#include "server/api/generation.h"

#include <deque>

#include "server/api/apis.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

// An exchange whose posted tasks wait until run() is called.
class StalledExchange final : public HttpExchange {
 public:
  void post(std::function<void()> task) override {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  void run_long(std::function<void()> task) override { task(); }
  bool hold(int64_t) override { return true; }
  const HttpRequest& request() const override { return request_; }
  std::string peer() const override { return "127.0.0.1"; }
  void set_headers(std::string) override {}
  void respond(HttpResponse response) override { answer = response.body; }
  void start_stream(const std::string&) override {}
  void write(std::string bytes) override { answer += bytes; }
  void finish() override {}
  void drop(const std::string& reason) override {
    dropped = reason;
    if (on_disconnect_) std::exchange(on_disconnect_, nullptr)();
  }
  void on_quiet(double, std::function<void()>) override {}
  void on_disconnect(std::function<void()> task) override { on_disconnect_ = std::move(task); }

  int64_t num_tasks() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(tasks_.size());
  }
  void run() {
    std::deque<std::function<void()>> tasks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks.swap(tasks_);
    }
    for (const auto& task : tasks) task();
  }

  std::string answer, dropped;

 private:
  const HttpRequest request_;
  mutable std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;
  std::function<void()> on_disconnect_;
};

// A /generate request on a stalled exchange.
struct Stalled {
  explicit Stalled(int64_t max_unsent_bytes, FakeOptions options = {}) : engine(options) {
    config.max_unsent_bytes = max_unsent_bytes;
  }

  void start(const char* body) {
    const Result<json> parsed = parse_json(body);
    ASSERT_TRUE(parsed.ok());
    Fields fields(*parsed);
    GenerationCall call = parse_generate(engine, fields);
    ASSERT_TRUE(fields.ok());
    run_generation({&engine, &metrics, &config, live}, exchange, std::move(call));
  }

  ServerConfig config;
  Metrics metrics;
  std::shared_ptr<LiveRequests> live = std::make_shared<LiveRequests>();
  std::shared_ptr<StalledExchange> exchange = std::make_shared<StalledExchange>();
  FakeEngine engine;  // declared last, because its thread uses the members above
};

struct Endless {
  const char* name;
  const char* body;
};
constexpr Endless kEndless[] = {
    {"Stream",
     R"({"text":"abc","stream":true,"sampling_params":{"max_new_tokens":1000000000,"ignore_eos":true}})"},
    {"Whole", R"({"text":"abc","sampling_params":{"max_new_tokens":1000000000,"ignore_eos":true}})"},
    {"Choices",
     R"({"text":["a","b"],"sampling_params":{"n":5,"max_new_tokens":1000000000,"ignore_eos":true}})"},
    {"Logprobs", R"({"text":"abc","return_logprob":true,"top_logprobs_num":20,"sampling_params":)"
                 R"({"max_new_tokens":1000000000,"ignore_eos":true}})"},
};

class Backlog : public testing::TestWithParam<Endless> {};

TEST_P(Backlog, IsBounded) {
  constexpr int64_t kBytes = 100000;
  Stalled s(kBytes);
  s.start(GetParam().body);
  // The engine's thread alone ended the request: the exchange has not run any task yet.
  s.live->wait_for_none();
  const int64_t tasks = s.exchange->num_tasks();
  EXPECT_GT(tasks, 1);
  EXPECT_LE(tasks, kBytes / static_cast<int64_t>(sizeof(Delta)) + 1);  // plus the task that drops the client
  s.exchange->run();
  EXPECT_EQ(s.exchange->dropped, "its unprocessed deltas exceed max_unsent_bytes=100000");
  EXPECT_EQ(s.exchange->answer, "");
}

INSTANTIATE_TEST_SUITE_P(Requests, Backlog, testing::ValuesIn(kEndless),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Exchange, MayStallBelowTheBound) {
  Stalled s(1 << 20);
  s.start(R"({"text":"abc","sampling_params":{"max_new_tokens":1000,"ignore_eos":true}})");
  s.live->wait_for_none();
  EXPECT_EQ(s.exchange->num_tasks(), 1000);
  s.exchange->run();
  EXPECT_EQ(s.exchange->dropped, "");
  EXPECT_EQ(nlohmann::json::parse(s.exchange->answer)["meta_info"]["completion_tokens"], 1000);
}

TEST(Exchange, ThatTakesItsNewsFreesTheBacklog) {
  constexpr int64_t kTokens = 200;
  Stalled s(kTokens / 2 * static_cast<int64_t>(sizeof(Delta)), FakeOptions{std::chrono::milliseconds(2)});
  s.start(R"({"text":"abc","sampling_params":{"max_new_tokens":200,"ignore_eos":true}})");
  ASSERT_TRUE(eventually([&] {
    s.exchange->run();
    return !s.exchange->answer.empty() || !s.exchange->dropped.empty();
  }));
  EXPECT_EQ(s.exchange->dropped, "");
  EXPECT_EQ(nlohmann::json::parse(s.exchange->answer)["meta_info"]["completion_tokens"], kTokens);
}

}  // namespace
}  // namespace fp4moe
