#include "engine/schedule/page_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace fp4moe {
namespace {

using Tokens = std::vector<int32_t>;

TEST(PagePool, GrowsByWholePagesAndChangesNothingWhenItCannot) {
  PagePool pool({3, 4});
  PageTables a, b;
  EXPECT_TRUE(pool.grow(a, 0));
  EXPECT_TRUE(pool.grow(a, 5));
  EXPECT_EQ(a.full.size(), 2u);
  EXPECT_TRUE(pool.grow(a, 8));
  EXPECT_EQ(a.full.size(), 2u);
  EXPECT_FALSE(pool.grow(b, 5));
  EXPECT_TRUE(b.full.empty());
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_TRUE(pool.grow(b, 4));
  pool.release(a);
  pool.release(b);
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(PagePoolDeathTest, DoubleFreeForeignPageAndLeakAreCaught) {
  EXPECT_DEATH(
      {
        PagePool pool({3, 4});
        PageTables table;
        pool.grow(table, 4);
        PageTables copy = table;
        pool.release(table);
        pool.release(copy);
      },
      "is not in use");
  EXPECT_DEATH(
      {
        PagePool pool({3, 4});
        PageTables table = {.full = {3}};
        pool.release(table);
      },
      "KV page 3 of 3");
  EXPECT_DEATH(
      {
        PagePool pool({3, 4});
        PageTables table;
        pool.grow(table, 4);
      },
      "leaked KV pages: only 2 of 3");
}

TEST(PagePool, APrefixIsFoundByWholePagesAndSharedWhileItIsUsed) {
  PagePool pool({6, 2});
  PageTables a, b;
  pool.grow(a, 6);
  EXPECT_EQ(pool.publish_prefix(Tokens{1, 2, 3, 4, 5}, a, 0), 2);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3, 4, 5, 6}).num_pages, 2);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3, 9}).num_pages, 1);
  EXPECT_EQ(pool.find_prefix(Tokens{1}).num_pages, 0);
  EXPECT_EQ(pool.find_prefix(Tokens{3, 4}).num_pages, 0) << "the same tokens after another prefix match";
  pool.take_prefix(Tokens{1, 2, 3, 4}, b);
  EXPECT_EQ(b.full, (Tokens{a.full[0], a.full[1]}));
  EXPECT_EQ(pool.num_used(), 3);
  pool.release(a);
  EXPECT_EQ(pool.num_used(), 2);
  EXPECT_EQ(pool.num_cached(), 0);
  pool.release(b);
  EXPECT_EQ(pool.num_cached(), 2);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3, 4}).num_cached, 2);
  EXPECT_EQ(pool.num_free(), 4);
  pool.flush();
  EXPECT_EQ(pool.num_free(), 6);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2}).num_pages, 0);
}

TEST(PagePool, APageWithTheSameTokensIsGivenBackForTheKnownOne) {
  PagePool pool({4, 2});
  PageTables a, b;
  pool.grow(a, 4);
  pool.grow(b, 4);
  const Tokens tokens = {1, 2, 3, 4};
  pool.publish_prefix(tokens, a, 0);
  pool.publish_prefix(tokens, b, 0);
  EXPECT_EQ(a.full, b.full);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.num_references(), 4);
  pool.release(a);
  pool.release(b);
}

TEST(PagePool, WhatWasLetGoFirstIsEvictedFirstAndLeavesBeforeTheirParents) {
  PagePool pool({4, 1});
  PageTables a, b, c;
  pool.grow(a, 2);
  pool.publish_prefix(Tokens{1, 2}, a, 0);
  pool.grow(b, 2);
  pool.publish_prefix(Tokens{3, 4}, b, 0);
  pool.release(b);
  pool.release(a);
  EXPECT_TRUE(pool.grow(c, 1));
  EXPECT_EQ(pool.find_prefix(Tokens{3, 4}).num_pages, 1);
  pool.take_prefix(Tokens{3}, b);  // used again, so it is now the most recent
  pool.release(b);
  EXPECT_TRUE(pool.grow(c, 3));
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2}).num_pages, 0);
  EXPECT_EQ(pool.find_prefix(Tokens{3, 4}).num_pages, 1);
  EXPECT_FALSE(pool.grow(c, 5));
  EXPECT_TRUE(pool.grow(c, 4));
  pool.release(c);
}

TEST(PagePool, ForgettingKeepsWhatOthersUse) {
  PagePool pool({4, 1});
  PageTables a, b;
  pool.grow(a, 3);
  pool.publish_prefix(Tokens{1, 2, 3}, a, 0);
  pool.take_prefix(Tokens{1}, b);
  pool.forget(a);
  pool.release(a);
  EXPECT_EQ(pool.num_free(), 3);
  pool.release(b);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3}).num_pages, 1);
}

// A simple reference model. For each page of a user it stores the whole prefix that ends with the page. Each
// prefix is published with one page.
class SimpleModel {
 public:
  SimpleModel(int64_t num_pages, int page_size) : num_pages_(num_pages), page_size_(page_size) {}

  struct User {
    Tokens tokens;
    PageTables tables;
    int64_t num_published = 0;
  };
  std::map<int, User> users;
  std::map<Tokens, int32_t> known;  // prefixes of whole pages

  Tokens prefix(const Tokens& tokens, int64_t num_pages) const {
    return {tokens.begin(), tokens.begin() + num_pages * page_size_};
  }
  int64_t longest_known(const Tokens& tokens) const {
    int64_t n = 0;
    while ((n + 1) * page_size_ <= std::ssize(tokens) && known.contains(prefix(tokens, n + 1))) ++n;
    return n;
  }
  // Removes the prefixes that the pool no longer finds.
  void drop_forgotten(const PagePool& pool) {
    std::map<Tokens, int32_t> left;
    for (const auto& [prefix, page] : known)
      if (pool.find_prefix(prefix).num_pages * page_size_ == std::ssize(prefix)) left[prefix] = page;
    known = left;
  }
  // Checks that every page is either used, published and unused, or free, and that tables share only
  // published pages.
  void check(const PagePool& pool) {
    std::set<int32_t> used, known_pages;
    std::map<int32_t, Tokens> holds;
    int64_t num_references = 0;
    for (const auto& [id, user] : users) {
      for (int64_t i = 0; i < std::ssize(user.tables.full); ++i) {
        const int32_t page = user.tables.full[static_cast<size_t>(i)];
        ASSERT_TRUE(page >= 0 && page < num_pages_);
        const bool first = used.insert(page).second;
        const Tokens held = i < user.num_published ? prefix(user.tokens, i + 1) : Tokens{-id - 1};
        if (first) holds[page] = held;
        ASSERT_EQ(holds[page], held) << "page " << page;
        ++num_references;
      }
    }
    for (auto entry = known.begin(); entry != known.end();) {
      // An evicted or unpublished page: no user has it, and the pool no longer finds it.
      if (pool.find_prefix(entry->first).num_pages * page_size_ == std::ssize(entry->first)) {
        ASSERT_TRUE(known_pages.insert(entry->second).second);
        ++entry;
      } else {
        ASSERT_FALSE(used.contains(entry->second) && holds[entry->second] == entry->first);
        entry = known.erase(entry);
      }
    }
    int64_t num_cached = 0;
    for (const int32_t page : known_pages) num_cached += !used.contains(page);
    ASSERT_EQ(pool.num_used(), std::ssize(used));
    ASSERT_EQ(pool.num_cached(), num_cached);
    ASSERT_EQ(pool.num_free(), num_pages_ - std::ssize(used) - num_cached);
    ASSERT_EQ(pool.num_references(), num_references);
  }

 private:
  int64_t num_pages_;
  int page_size_;
};

// Users start from published prefixes, grow, publish their pages and leave at random. There are few different
// tokens, so that many prefixes are equal.
TEST(PagePool, EveryPageIsFreeUsedOrCachedWhateverHappens) {
  std::mt19937 random(3);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 60; ++round) {
    const int page_size = 1 + round % 4;
    const int64_t num_pages = 4 + round % 23;
    PagePool pool({num_pages, page_size});
    SimpleModel model(num_pages, page_size);
    int next_id = 0;
    for (int step = 0; step < 300; ++step) {
      const int64_t what = below(100);
      if (what < 30 || model.users.empty()) {
        SimpleModel::User user;
        for (int64_t n = 1 + below(6 * page_size); n > 0; --n)
          user.tokens.push_back(static_cast<int32_t>(below(2)));
        user.num_published = model.longest_known(user.tokens);
        ASSERT_EQ(pool.find_prefix(user.tokens).num_pages, user.num_published);
        pool.take_prefix(user.tokens, user.tables);
        ASSERT_EQ(std::ssize(user.tables.full), user.num_published);
        for (int64_t i = 0; i < user.num_published; ++i)
          ASSERT_EQ(user.tables.full[static_cast<size_t>(i)],
                    model.known.at(model.prefix(user.tokens, i + 1)));
        model.users[next_id++] = user;
      } else if (what < 99) {
        auto at = model.users.begin();
        std::advance(at, below(std::ssize(model.users)));
        SimpleModel::User& user = at->second;
        if (what < 60) {
          const int64_t num_tokens = below(std::ssize(user.tokens) + 1);
          const int64_t wanted = pool.pages_for(num_tokens) - std::ssize(user.tables.full);
          const bool fits = wanted <= pool.num_available();
          const Tokens before = user.tables.full;
          ASSERT_EQ(pool.grow(user.tables, num_tokens), fits);
          if (!fits || wanted <= 0) {
            ASSERT_EQ(user.tables.full, before);
          }
        } else if (what < 80) {
          Tokens covered = user.tokens;
          covered.resize(std::min(covered.size(), user.tables.full.size() * static_cast<size_t>(page_size)));
          user.num_published = pool.publish_prefix(covered, user.tables, user.num_published);
          ASSERT_EQ(user.num_published, std::ssize(covered) / page_size);
          for (int64_t i = 0; i < user.num_published; ++i)
            model.known[model.prefix(covered, i + 1)] = user.tables.full[static_cast<size_t>(i)];
        } else {
          if (what < 84) {
            pool.forget(user.tables);
            user.num_published = 0;
            model.drop_forgotten(pool);
          }
          pool.release(user.tables);
          model.users.erase(at);
        }
      } else {
        pool.flush();
      }
      model.check(pool);
      if (testing::Test::HasFatalFailure()) return;
    }
    for (auto& [id, user] : model.users) pool.release(user.tables);
  }
}

}  // namespace
}  // namespace fp4moe
