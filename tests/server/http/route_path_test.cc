#include "server/http/route_path.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

TEST(RoutePath, VersionAndLastSlashDoNotMatter) {
  for (const char* path : {"/v1/completions", "/completions", "/v1/completions/", "/completions/"})
    EXPECT_TRUE(is_route("/v1/completions", path)) << path;
  for (const char* path : {"/tokenize", "/v1/tokenize", "/tokenize/", "/v1/tokenize/"})
    EXPECT_TRUE(is_route("/tokenize", path)) << path;
  for (const char* path : {"/v1/v1/completions", "//completions", "/completions//", "/v1completions",
                           "/v1//completions", "/v2/completions", "completions", "", "/", "/v1", "/v1/",
                           "/Completions", "/completions/x", "/v1/completions%2F"})
    EXPECT_FALSE(is_route("/v1/completions", path)) << path;
  EXPECT_TRUE(is_route("/", "/"));
  for (const char* path : {"/v1", "/v1/", "///", ""}) EXPECT_FALSE(is_route("/", path)) << path;
}

TEST(RoutePath, TailsNeedAName) {
  for (const char* path : {"/v1/models/a", "/models/a", "/v1/models/a/", "/models/org/name", "/models/%2F"})
    EXPECT_TRUE(is_route("/v1/models/", path)) << path;
  for (const char* path : {"/v1/models", "/v1/models/", "/models/", "/v1/models//", "/v1/modelsx/a"})
    EXPECT_FALSE(is_route("/v1/models/", path)) << path;
}

TEST(RoutePath, TailsArePercentDecoded) {
  const auto tail = [](const char* path) { return path_tail("/v1/models/", path); };
  EXPECT_EQ(tail("/v1/models/fake"), "fake");
  EXPECT_EQ(tail("/models/fake/"), "fake");
  EXPECT_EQ(tail("/v1/models/openai/gpt-oss-20b"), "openai/gpt-oss-20b");
  EXPECT_EQ(tail("/v1/models/openai%2Fgpt-oss-20b"), "openai/gpt-oss-20b");
  EXPECT_EQ(tail("/v1/models/openai%2fgpt%2Doss%C3%A9/"), "openai/gpt-oss\xC3\xA9");
  EXPECT_EQ(tail("/v1/models/a%2"), "a%2");
  EXPECT_EQ(tail("/v1/models/a%zz%+1%"), "a%zz%+1%");
  EXPECT_EQ(tail("/v1/models/%252F"), "%2F");
  EXPECT_EQ(tail("/v1/models/%00"), std::string(1, '\0'));
  for (const char* path : {"/v1/models/", "/v1/models//", "/v1/models", "/models/", "/", ""})
    EXPECT_EQ(tail(path), "") << path;
}

}  // namespace
}  // namespace fp4moe
