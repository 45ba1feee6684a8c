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
  void respond(HttpResponse response) override {
    answer = response.body;
    finish();
  }
  void start_stream(const std::string&) override {}
  void write(std::string bytes) override { answer += bytes; }
  void finish() override { on_sent_ = nullptr; }
  int64_t unsent_bytes() const override { return unsent; }
  void on_sent(std::function<void()> task) override { on_sent_ = std::move(task); }
  void take_unsent() {
    unsent = 0;
    const std::function<void()> task = on_sent_;
    task();
  }
  void drop(const std::string& reason) override {
    dropped = reason;
    if (on_disconnect_) std::exchange(on_disconnect_, nullptr)();
    on_sent_ = nullptr;
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
  int64_t unsent = 0;

 private:
  const HttpRequest request_;
  mutable std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;
  std::function<void()> on_disconnect_, on_sent_;
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

// The events of an exchange's stream; the last one is [DONE].
std::vector<nlohmann::json> events_of(const StalledExchange& exchange) {
  EXPECT_EQ(exchange.dropped, "");
  return parse_events(exchange.answer);
}

TEST(CumulativeStream, LeavesOutEventsThatTheClientIsTooSlowFor) {
  Stalled s(8 << 20);
  s.exchange->unsent = 1 << 20;
  s.start(
      R"({"text":"abc","stream":true,"sampling_params":{"n":2,"max_new_tokens":1000,"ignore_eos":true}})");
  s.live->wait_for_none();
  s.exchange->run();
  EXPECT_EQ(s.exchange->answer, "");
  s.exchange->take_unsent();
  const std::vector<nlohmann::json> events = events_of(*s.exchange);
  ASSERT_EQ(events.size(), 3u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(events[i]["index"], i);
    EXPECT_EQ(events[i]["output_ids"].size(), 1000u);
    EXPECT_EQ(events[i]["meta_info"]["finish_reason"]["type"], "length");
  }
  EXPECT_EQ(events[2], "[DONE]");
}

TEST(CumulativeStream, LeavesOutEventsWhileManyDeltasWait) {
  Stalled s(8 << 20);
  s.start(R"({"text":"abc","stream":true,"sampling_params":{"max_new_tokens":1000,"ignore_eos":true}})");
  s.live->wait_for_none();
  s.exchange->run();
  const std::vector<nlohmann::json> events = events_of(*s.exchange);
  EXPECT_LT(events.size(), (64u << 10) / sizeof(Delta) + 3);
  EXPECT_EQ(events[events.size() - 2]["output_ids"].size(), 1000u);
  for (size_t i = 0; i + 2 < events.size(); ++i)
    EXPECT_LT(events[i]["output_ids"].size(), events[i + 1]["output_ids"].size());
}

TEST(CumulativeStream, ThatFailsFirstSendsWhatIsDue) {
  Stalled s(8 << 20);
  s.exchange->unsent = 1 << 20;
  s.start(R"({"text":"FAIL","stream":true})");
  s.live->wait_for_none();
  s.exchange->run();
  const std::vector<nlohmann::json> events = events_of(*s.exchange);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0]["text"], "FA");
  EXPECT_TRUE(events[1].contains("error"));
}

TEST(Outputs, HaveABudgetOfBytes) {
  ServerConfig config;
  config.max_output_bytes = 20000;
  TestServer s({}, config);
  const std::string body = R"({"prompt":"abc","n":3,"ignore_eos":true,"logprobs":5,"max_tokens":)";
  EXPECT_EQ(http_post(s.port, "/v1/completions", body + "20}").status, 200);
  const HttpAnswer whole = http_post(s.port, "/v1/completions", body + "100}");
  EXPECT_EQ(whole.status, 400);
  EXPECT_NE(whole.body.find("the limit is 20000 (--max-output-bytes)"), std::string::npos) << whole.body;
  const auto events = parse_events(http_post(s.port, "/v1/completions", body + R"(100,"stream":true})").body);
  EXPECT_NE(events[events.size() - 2]["error"]["message"].get<std::string>().find("--max-output-bytes"),
            std::string::npos);
  EXPECT_TRUE(eventually([&] { return s.engine.running() == 0; }));
}

TEST(StreamInterval, SpacesTheEventsOfAllApis) {
  ServerConfig config;
  config.stream_interval = 4;
  TestServer s({}, config);
  const auto texts = [&](const char* path, const char* body, const char* pointer) {
    std::vector<std::string> found;
    for (const nlohmann::json& event : parse_events(http_post(s.port, path, body).body))
      if (const nlohmann::json::json_pointer at(pointer); event.is_object() && event.contains(at))
        if (const std::string text = event[at]; !text.empty()) found.push_back(text);
    return found;
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(texts("/generate",
                  R"({"text":"abcdefghij","stream":true,"sampling_params":{"max_new_tokens":10}})", "/text"),
            (Texts{"a", "abcde", "abcdefghi", "abcdefghij"}));
  EXPECT_EQ(texts("/v1/completions", R"({"prompt":"abcdefghij","stream":true,"logprobs":1,"max_tokens":10})",
                  "/choices/0/text"),
            (Texts{"a", "bcde", "fghi", "j"}));
  EXPECT_EQ(texts("/v1/chat/completions",
                  R"({"messages":[{"role":"user","content":"abcdef"}],"stream":true,"max_tokens":6})",
                  "/choices/0/delta/content")
                .size(),
            3u);
}

}  // namespace
}  // namespace fp4moe
