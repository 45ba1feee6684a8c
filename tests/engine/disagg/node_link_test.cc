#include "engine/disagg/node_link.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

namespace fp4moe {
namespace {

EngineConfig config_of(const std::string& mode) {
  EngineConfig config;
  config.disaggregation_mode = mode;
  return config;
}

std::string secret_file() {
  const std::string path = testing::TempDir() + "node_link_secret." + std::to_string(getpid());
  std::ofstream(path) << "a secret of some length\n";
  EXPECT_EQ(chmod(path.c_str(), 0600), 0);
  return path;
}

TEST(NodeLink, LoopbackNeedsNoSecret) {
  for (const std::string mode : {"null", "prefill", "decode"})
    for (const std::string host : {"127.0.0.1", "127.1.2.3", "::1"}) {
      EngineConfig config = config_of(mode);
      config.disaggregation_bootstrap_host = host;
      const auto options = node_link_options(config);
      ASSERT_TRUE(options.ok()) << options.status().to_string();
      EXPECT_FALSE(options->secret->is_set());
    }
}

TEST(NodeLink, AnyOtherAddressNeedsASecret) {
  const std::string path = secret_file();
  for (const std::string host : {"0.0.0.0", "::", "10.1.2.3"}) {
    EngineConfig config = config_of("prefill");
    config.disaggregation_bootstrap_host = host;
    const Status status = node_link_options(config).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << host;
    EXPECT_NE(status.message().find("--disaggregation-secret-file"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(host), std::string::npos) << status.message();
    config.disaggregation_secret_file = path;
    const auto options = node_link_options(config);
    ASSERT_TRUE(options.ok()) << options.status().to_string();
    EXPECT_TRUE(options->secret->is_set());
  }
  for (const std::string host : {"*", "10.1.2.3", "prefill.example:8998"}) {
    EngineConfig config = config_of("decode");
    config.disaggregation_allowed_hosts = {"127.0.0.1", host};
    const Status status = node_link_options(config).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << host;
    EXPECT_NE(status.message().find("--disaggregation-allowed-hosts " + host), std::string::npos);
    config.disaggregation_secret_file = path;
    EXPECT_TRUE(node_link_options(config).ok());
  }
  unlink(path.c_str());
}

TEST(NodeLink, WrongValuesAreRefusedByName) {
  EngineConfig config = config_of("decode");
  config.disaggregation_secret_file = "/no/such/file";
  EXPECT_NE(node_link_options(config).status().message().find("--disaggregation-secret-file: /no/such/file"),
            std::string::npos);
  config = config_of("decode");
  config.disaggregation_allowed_hosts = {"a b"};
  EXPECT_EQ(node_link_options(config).status().code(), StatusCode::kInvalidArgument);
  config = config_of("prefill");
  config.disaggregation_max_connections = 0;
  EXPECT_NE(node_link_options(config).status().message().find("--disaggregation-max-connections"),
            std::string::npos);
  config = config_of("prefill");
  config.disaggregation_io_timeout = 0;
  EXPECT_NE(node_link_options(config).status().message().find("--disaggregation-io-timeout"),
            std::string::npos);
  config = config_of("prefill");
  config.disaggregation_bootstrap_port = 70000;  // would be 4464 on the wire
  EXPECT_NE(node_link_options(config).status().message().find("--disaggregation-bootstrap-port"),
            std::string::npos);
  config = config_of("prefill");
  config.disaggregation_timeout = std::nan("");
  EXPECT_NE(node_link_options(config).status().message().find("--disaggregation-timeout"), std::string::npos);
}

}  // namespace
}  // namespace fp4moe
