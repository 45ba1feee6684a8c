// GET /expert_load and /expert_load.svg, their building blocks, and the page that shows them.
#include "server/observe/load_history.h"
#include "server/observe/load_report.h"
#include "server/server_fixture.h"

namespace fp4moe {
namespace {

using nlohmann::json;
using Counts = std::vector<int64_t>;

TEST(LoadHistory, GivesTheCountsBeforeAWindow) {
  LoadHistory history(100, 60);
  for (int second = 0; second <= 50; ++second) history.add(100 + second, {second, 1000 + 10 * second});
  const LoadHistory::Since ten = history.before(150.5, 10);
  EXPECT_EQ(ten.counts, (Counts{40, 1400}));  // 140.5 is between two samples; the earlier one counts
  EXPECT_DOUBLE_EQ(ten.seconds, 10.5);
  EXPECT_EQ(history.before(150, 10).counts, (Counts{40, 1400}));
  EXPECT_DOUBLE_EQ(history.before(150, 10).seconds, 10);
  const LoadHistory::Since start = history.before(150, 60);  // longer than the history
  EXPECT_TRUE(start.counts.empty());
  EXPECT_DOUBLE_EQ(start.seconds, 50);
}

TEST(LoadHistory, CountsThatStandStillStayExact) {
  LoadHistory history(0, 60);
  history.add(0, {0});
  history.add(10, {7});
  for (int second = 11; second <= 500; ++second) history.add(second, {7});
  const LoadHistory::Since since = history.before(500.25, 60);
  EXPECT_EQ(since.counts, Counts{7});
  EXPECT_DOUBLE_EQ(since.seconds, 60);
  history.add(501, {9});
  EXPECT_EQ(history.before(501, 0.5).counts, Counts{7});
  EXPECT_DOUBLE_EQ(history.before(501, 0.5).seconds, 1);  // a change is located to within one sample
}

// Every window at every moment, compared with a complete record.
TEST(LoadHistory, AgreesWithAWholeRecord) {
  LoadHistory history(0, 20);
  Counts record;  // one entry per second
  int64_t count = 0;
  for (int now = 0; now < 200; ++now) {
    if (now * now % 7 < 3) count += now % 5;
    record.push_back(count);
    history.add(now, {count});
    for (int window = 1; window <= 20; ++window) {
      const LoadHistory::Since since = history.before(now, window);
      const int begin = std::max(0, now - window);
      const int64_t before = since.counts.empty() ? 0 : since.counts[0];
      EXPECT_EQ(before, now < window ? 0 : record[static_cast<size_t>(begin)]) << now << " " << window;
    }
  }
}

ExpertLoad two_layers() {
  return {.layers = {1, 4},
          .num_experts = 4,
          .tokens = {10, 0, 30, 0, 5, 5, 5, 5},
          .counted_ranks = 1,
          .num_ranks = 2};
}

TEST(LoadReport, BalanceOfEachLayer) {
  ExpertLoad load = two_layers();
  const std::vector<LayerBalance> balance = layer_balance(load);
  ASSERT_EQ(balance.size(), 2u);
  EXPECT_EQ(balance[0].tokens, 40);
  EXPECT_DOUBLE_EQ(balance[0].max_over_mean, 3);
  EXPECT_EQ(balance[0].idle_experts, 2);
  EXPECT_DOUBLE_EQ(balance[1].max_over_mean, 1);
  load.tokens.assign(8, 0);
  EXPECT_EQ(layer_balance(load)[0].max_over_mean, 0);
}

json get_json(const TestServer& s, const std::string& path) {
  const HttpAnswer answer = http_get(s.port, path);
  EXPECT_EQ(answer.status, 200) << answer.body;
  return json::parse(answer.body);
}

TEST(ExpertLoadRoute, SaysWhatTheEngineCounted) {
  TestServer s;
  s.engine.set_expert_load(two_layers());
  const json all = get_json(s, "/expert_load?window=all");
  EXPECT_EQ(all["model"], "fake");
  EXPECT_EQ(all["window_seconds"], "all");
  EXPECT_EQ(all["num_experts"], 4);
  EXPECT_EQ(all["counted_ranks"], 1);
  EXPECT_EQ(all["num_ranks"], 2);
  EXPECT_EQ(all["balance"], (json{{"mean", 2.0}, {"worst", 3.0}, {"worst_layer", 1}}));
  EXPECT_EQ(all["layers"][0], (json{{"layer", 1},
                                    {"tokens", 40},
                                    {"max_over_mean", 3.0},
                                    {"idle_experts", 2},
                                    {"experts", {10, 0, 30, 0}}}));
  ASSERT_EQ(all["hottest"].size(), 6u);  // excludes experts without a token
  EXPECT_EQ(all["hottest"][0], (json{{"layer", 1}, {"expert", 2}, {"tokens", 30}, {"over_mean", 3.0}}));
  EXPECT_EQ(all["hottest"][1]["layer"], 1);  // a tie goes to the first expert
  const json last = get_json(s, "/expert_load");
  EXPECT_EQ(last["window_seconds"], 60.0);
  EXPECT_EQ(last["layers"], all["layers"]);  // the server is younger than the window
}

TEST(ExpertLoadRoute, WindowsSlide) {
  TestServer s;
  s.engine.set_expert_load(two_layers());
  EXPECT_TRUE(eventually([&] {  // no change for longer than the window
    return get_json(s, "/expert_load?window=1.5")["layers"][0]["tokens"] == 0;
  }));
  const json quiet = get_json(s, "/expert_load?window=1.5");
  EXPECT_TRUE(quiet["balance"]["mean"].is_null());
  EXPECT_TRUE(quiet["layers"][0]["max_over_mean"].is_null());
  EXPECT_TRUE(quiet["hottest"].empty());
  ExpertLoad more = two_layers();
  more.tokens[3] = 8;
  s.engine.set_expert_load(more);
  EXPECT_EQ(get_json(s, "/expert_load?x=1&window=1.5")["layers"][0]["experts"], json::parse("[0,0,0,8]"));
  EXPECT_EQ(get_json(s, "/expert_load?window=all")["layers"][0]["tokens"], 48);
}

TEST(ExpertLoadRoute, WrongWindowsAreNamed) {
  TestServer s;
  s.engine.set_expert_load(two_layers());
  for (const char* path : {"/expert_load", "/expert_load.svg"})
    for (const char* window : {"0", "-1", "61", "nan", "inf", "1e99", "ten", "", "5s", "%35"}) {
      const HttpAnswer answer = http_get(s.port, std::string(path) + "?window=" + window);
      EXPECT_EQ(answer.status, 400) << window;
      EXPECT_EQ(json::parse(answer.body)["error"]["param"], "window") << window;
    }
}

TEST(ExpertLoadRoute, SaysWhyNothingCouldBeRead) {
  TestServer s;
  s.engine.set_expert_load({.failure = "the GPU is gone"});
  for (const char* path : {"/expert_load", "/expert_load.svg?window=all"}) {
    const HttpAnswer answer = http_get(s.port, path);
    EXPECT_EQ(answer.status, 500);
    EXPECT_EQ(json::parse(answer.body)["error"]["message"], "the GPU is gone");
  }
}

TEST(ExpertLoadRoute, APicture) {
  TestServer s;
  s.engine.set_expert_load(two_layers());
  const HttpAnswer answer = http_get(s.port, "/expert_load.svg?window=all");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.headers.at("content-type"), "image/svg+xml; charset=utf-8");
  EXPECT_EQ(answer.headers.at("content-security-policy"), "default-src 'none'");
  EXPECT_NE(answer.body.find("Expert load of fake, since the start"), std::string::npos);
  EXPECT_NE(answer.body.find("d=\"M2 0h1v1h-1z\""), std::string::npos)
      << "the hottest cell must have its colour alone";
  EXPECT_NE(answer.body.find("d=\"M1 0h1v1h-1zM3 0h1v1h-1z\""), std::string::npos)
      << "the idle cells must share a colour";
  EXPECT_NE(answer.body.find("1 of 2 ranks"), std::string::npos);
  EXPECT_EQ(answer.body.find("nan"), std::string::npos);
  EXPECT_EQ(answer.body.rfind("</svg>\n"), answer.body.size() - 7);
}

TEST(LoadReport, APictureOfAnyNameAndOfNoToken) {
  ModelInfo info;
  info.name = "<b>&\"\x01";
  LoadWatch::Window window{0, two_layers()};
  window.load.tokens.assign(8, 0);
  const std::string svg = load_svg({info, 0, window});
  EXPECT_NE(svg.find("&lt;b&gt;&amp;\" "), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(ChatPage, IsThereForAllUnderAStrictPolicy) {
  ServerConfig config;
  config.api_keys = {"secret"};
  TestServer s({}, config);
  EXPECT_EQ(http_get(s.port, "/expert_load").status, 401);
  for (const char* path : {"/", "/chat", "/?x=1"}) {
    const HttpAnswer page = http_get(s.port, path);
    EXPECT_EQ(page.status, 200);
    EXPECT_EQ(page.headers.at("content-type"), "text/html; charset=utf-8");
    EXPECT_EQ(page.body.rfind("<!doctype html>", 0), 0u);
    std::string body = page.body;
    const std::string name_space =
        "\"http://www.w3.org/1998/Math/MathML\"";  // a name, not an address to load
    if (const size_t at = body.find(name_space); at != std::string::npos) body.erase(at, name_space.size());
    EXPECT_EQ(body.find("http://"), std::string::npos) << "the page must not load anything from another host";
    EXPECT_EQ(body.find("https://"), std::string::npos);
    const std::string policy = page.headers.at("content-security-policy");
    EXPECT_NE(policy.find("default-src 'none'; script-src 'sha256-"), std::string::npos) << policy;
    EXPECT_NE(policy.find("frame-ancestors 'none'"), std::string::npos) << policy;
    EXPECT_EQ(policy.find("unsafe"), std::string::npos) << policy;
  }
  EXPECT_EQ(http_post(s.port, "/", "{}").status, 405);
}

}  // namespace
}  // namespace fp4moe
