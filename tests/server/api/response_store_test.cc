#include "server/api/response_store.h"

#include <gtest/gtest.h>

namespace fp4moe {
namespace {

std::shared_ptr<const Turn> turn(const std::string& id, size_t text_bytes = 10,
                                 std::shared_ptr<const Turn> previous = nullptr) {
  return std::make_shared<const Turn>(
      std::move(previous), std::vector<StoredItem>{{"in_" + id, std::string(text_bytes, 'i')}},
      std::vector<StoredItem>{{"out_" + id, std::string(text_bytes, 'o')}}, 100);
}
void put(ResponseStore& store, const std::string& id, std::shared_ptr<const Turn> turn,
         const std::string& owner = "") {
  store.put({id, owner, "{}", std::move(turn)});
}

TEST(ResponseStore, KeepsWhatWasPut) {
  ResponseStore store(1 << 20);
  put(store, "a", turn("a"));
  ASSERT_NE(store.find("", "a"), nullptr);
  EXPECT_EQ(store.find("", "a")->turn->output()[0].id, "out_a");
  EXPECT_EQ(store.find_item("", "out_a"), std::string(10, 'o'));
  EXPECT_EQ(store.find_item("", "in_a"), std::string(10, 'i'));
  EXPECT_EQ(store.find("", "b"), nullptr);
  EXPECT_EQ(store.find_item("", "a"), std::nullopt);
  EXPECT_GT(store.bytes(), 20);
  EXPECT_TRUE(store.remove("", "a"));
  EXPECT_FALSE(store.remove("", "a"));
  EXPECT_EQ(store.find_item("", "out_a"), std::nullopt);
  EXPECT_EQ(store.bytes(), 0);
}

TEST(ResponseStore, SeparatesOwners) {
  ResponseStore store(1 << 20);
  put(store, "a", turn("a"), "key 0");
  EXPECT_EQ(store.find("key 1", "a"), nullptr);
  EXPECT_EQ(store.find_item("key 1", "out_a"), std::nullopt);
  EXPECT_FALSE(store.remove("key 1", "a"));
  EXPECT_NE(store.find("key 0", "a"), nullptr);
}

TEST(ResponseStore, EvictsTheLeastRecentlyUsed) {
  ResponseStore store(1 << 20, 2);
  put(store, "a", turn("a"));
  put(store, "b", turn("b"));
  EXPECT_NE(store.find("", "a"), nullptr);
  put(store, "c", turn("c"));
  EXPECT_EQ(store.find("", "b"), nullptr);
  EXPECT_EQ(store.find_item("", "out_b"), std::nullopt);
  EXPECT_NE(store.find("", "a"), nullptr);
  EXPECT_NE(store.find("", "c"), nullptr);
  EXPECT_EQ(store.size(), 2u);
}

TEST(ResponseStore, EvictsByBytes) {
  ResponseStore store(10000);
  for (const char* id : {"a", "b", "c", "d"}) put(store, id, turn(id, 1000));
  EXPECT_LE(store.bytes(), 10000);
  EXPECT_EQ(store.find("", "a"), nullptr);
  EXPECT_NE(store.find("", "d"), nullptr);
  put(store, "huge", turn("huge", 6000));  // does not fit at all, and evicts nothing
  EXPECT_EQ(store.find("", "huge"), nullptr);
  EXPECT_NE(store.find("", "d"), nullptr);
}

TEST(ResponseStore, SharesTheTurnsOfAConversation) {
  ResponseStore store(64 << 20);
  std::shared_ptr<const Turn> last;
  for (int i = 0; i < 1000; ++i) put(store, std::to_string(i), last = turn(std::to_string(i), 1000, last));
  EXPECT_LT(store.bytes(), 4 << 20);  // 1000 turns of about 3 KB, not 1000 conversations
  EXPECT_EQ(last->conversation().size(), 1000u);
  EXPECT_EQ(last->conversation().front()->input()[0].id, "in_0");
  EXPECT_EQ(last->conversation_parsed_bytes(), 100000);
}

TEST(ResponseStore, KeepsTheTurnsThatAnotherResponseContinues) {
  ResponseStore store(1 << 20);
  const auto first = turn("a");
  put(store, "a", first);
  put(store, "b", turn("b", 10, first));
  EXPECT_TRUE(store.remove("", "a"));
  const int64_t both = store.bytes();
  EXPECT_EQ(store.find("", "b")->turn->conversation().size(), 2u);
  EXPECT_EQ(store.find_item("", "out_a"), std::nullopt);
  EXPECT_TRUE(store.remove("", "b"));
  EXPECT_LT(store.bytes(), both);
  EXPECT_GT(store.bytes(), 0) << "the test holds the first turn";
}

TEST(ResponseStore, BoundsOneLongConversation) {
  ResponseStore store(100000);
  std::shared_ptr<const Turn> last;
  for (int i = 0; i < 1000; ++i) put(store, std::to_string(i), last = turn(std::to_string(i), 1000, last));
  last.reset();
  EXPECT_LE(store.bytes(), 100000);
}

TEST(ResponseStore, FreesAMillionTurnsWithoutRecursion) {
  std::shared_ptr<const Turn> last;
  for (int i = 0; i < 1000000; ++i)
    last = std::make_shared<const Turn>(std::move(last), std::vector<StoredItem>{}, std::vector<StoredItem>{},
                                        0);
  last.reset();
}

}  // namespace
}  // namespace fp4moe
