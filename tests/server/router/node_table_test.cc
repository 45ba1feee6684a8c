// The choice of the node for the next request.
#include "server/router/node_table.h"

#include <gtest/gtest.h>

#include <map>
#include <stdexcept>

namespace fp4moe {
namespace {

RouterConfig three_decode_nodes() {
  return {.prefill = {{"http://p:1", 8998}, {"http://q:1"}},
          .decode = {"http://a:1", "http://b:1", "http://c:1/v1"}};
}

TEST(NodeTable, TheLeastLoadedNodeThatAnswersIsNextAndEqualOnesInTurn) {
  NodeTable nodes;
  ASSERT_TRUE(nodes.add(three_decode_nodes()).ok());
  EXPECT_FALSE(nodes.acquire("decode")) << "no node has answered yet";
  EXPECT_NE(nodes.problems("decode").find("http://b:1 (not checked yet)"), std::string::npos);
  for (size_t i = 0; i < nodes.size(); ++i) EXPECT_TRUE(nodes.set_up(i));
  EXPECT_FALSE(nodes.set_up(0)) << "the node is already up";
  std::map<size_t, NodeLease> leases;
  for (int i = 0; i < 3; ++i) {
    NodeLease lease = nodes.acquire("decode");
    const size_t index = lease.index();
    leases[index] = std::move(lease);
  }
  ASSERT_EQ(leases.size(), 3u);
  EXPECT_EQ(leases.begin()->first, 2u);
  leases.erase(3);
  leases[3] = nodes.acquire("decode");
  EXPECT_EQ(leases[3].index(), 3u);
  leases.erase(2);
  leases[4].release(/*failed=*/true);
  leases[4].release(/*failed=*/true);  // counted once
  EXPECT_EQ(nodes.node(4).num_failed, 1);
  EXPECT_EQ(nodes.node(4).num_running, 0);
  const NodeLease first = nodes.acquire("decode");
  EXPECT_NE(first.index(), 3u);
  EXPECT_EQ(nodes.acquire("decode", {2, 4}).index(), 3u) << "node 3 is the only untried decode node";
  EXPECT_FALSE(nodes.acquire("decode", {2, 3, 4}));
  const size_t prefill = nodes.acquire("prefill").index();
  EXPECT_NE(nodes.acquire("prefill").index(), prefill)
      << "equal nodes must take turns, independent of other roles";
}

TEST(NodeTable, ALeaseEndsOnceWhereverItGoes) {
  NodeTable nodes;
  ASSERT_TRUE(nodes.add(three_decode_nodes()).ok());
  nodes.set_up(2);
  {
    NodeLease lease = nodes.acquire("decode");
    EXPECT_EQ(nodes.node(2).num_running, 1);
    NodeLease other = std::move(lease);
    EXPECT_FALSE(lease);  // NOLINT: checks the moved-from lease
    EXPECT_TRUE(other);
    EXPECT_EQ(nodes.node(2).num_running, 1);
    other = nodes.acquire("decode");
    EXPECT_EQ(nodes.node(2).num_running, 1) << "the first lease must have ended";
  }
  EXPECT_EQ(nodes.node(2).num_running, 0);
  EXPECT_THROW(nodes.node(5), std::out_of_range);
  EXPECT_THROW(nodes.set_down(SIZE_MAX, ""), std::out_of_range);
}

TEST(NodeTable, NodesThatAreDownAreLeftOutAndSayWhy) {
  NodeTable nodes;
  ASSERT_TRUE(nodes.add(three_decode_nodes()).ok());
  for (size_t i = 0; i < nodes.size(); ++i) nodes.set_up(i);
  EXPECT_TRUE(nodes.set_down(2, "refused"));
  EXPECT_FALSE(nodes.set_down(2, "refused"));
  for (int i = 0; i < 6; ++i) EXPECT_NE(nodes.acquire("decode").index(), 2u);
  EXPECT_TRUE(nodes.has("decode"));
  nodes.set_down(3, "x");
  nodes.set_down(4, "y");
  EXPECT_FALSE(nodes.has("decode"));
  EXPECT_EQ(nodes.problems("decode"),
            "no decode node is up: http://a:1 (refused), http://b:1 (x), http://c:1 (y)");
  EXPECT_NE(nodes.print_metrics().find("fp4moe_router_node_up{role=\"decode\",url=\"http://a:1\"} 0"),
            std::string::npos);
}

TEST(NodeTable, BootstrapPortsAreGivenOrLearned) {
  NodeTable nodes;
  ASSERT_TRUE(nodes.add(three_decode_nodes()).ok());
  nodes.set_bootstrap_port(0, 1234);
  nodes.set_bootstrap_port(1, 1234);
  EXPECT_EQ(nodes.node(0).bootstrap_port, 8998);
  EXPECT_EQ(nodes.node(1).bootstrap_port, 1234);
}

TEST(NodeTable, WhatIsNoNodeIsRefusedByName) {
  const auto refusal = [](RouterConfig config) { return NodeTable().add(config).message(); };
  EXPECT_NE(refusal({.prefill = {{"http://p"}}}).find("0 decode nodes"), std::string::npos);
  EXPECT_NE(refusal({.prefill = {{"ftp://p"}}, .decode = {"http://d"}}).find("--prefill"), std::string::npos);
  EXPECT_NE(refusal({.prefill = {{"http://p", 65536}}, .decode = {"http://d"}}).find("65536"),
            std::string::npos);
  EXPECT_NE(refusal({.prefill = {{"http://p:x"}}, .decode = {"http://d"}}).find("http://p:x must look like"),
            std::string::npos);
}

}  // namespace
}  // namespace fp4moe
