// The prefix cache with window layers against a simple model: what a sequence can reuse, what is evicted, and
// whether every page still holds the tokens for which it is used.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "engine/schedule/page_pool.h"

namespace fp4moe {
namespace {

using Tokens = std::vector<int32_t>;

TEST(KvWindow, CountsTheQuerysOwnToken) {
  const KvWindow window{.tokens = 5, .page_size = 4};
  // A query at 8 reads tokens 4 to 8, one at 9 reads 5 to 9; a sequence that continues from 8 needs 4 too.
  EXPECT_EQ(window.first_page(7), 0);
  EXPECT_EQ(window.first_page(8), 1);
  EXPECT_EQ(window.first_page(11), 1);
  EXPECT_EQ(window.first_page(12), 2);
  EXPECT_EQ((KvWindow{.tokens = 0, .page_size = 4}).first_page(1000), 0);
  EXPECT_EQ((KvWindow{.tokens = 1, .page_size = 4}).first_page(8), 2);
}

// For all small windows and pages: every token that a later query reads is kept, and most_pages() is reached
// but never exceeded.
TEST(KvWindow, KeepsExactlyWhatIsRead) {
  for (int64_t tokens = 1; tokens <= 12; ++tokens)
    for (int page_size = 1; page_size <= 6; ++page_size) {
      const KvWindow window{tokens, page_size};
      for (int64_t num_rows = 1; num_rows <= 9; ++num_rows) {
        int64_t most = 0;
        for (int64_t position = 0; position < 60; ++position) {
          const int64_t first = window.first_page(position);
          ASSERT_LE(first * page_size, std::max<int64_t>(0, position - tokens + 1));
          if (position % page_size == 0) {  // and no page more
            ASSERT_EQ(first, std::max<int64_t>(0, position - tokens + 1) / page_size);
          }
          most = std::max(most, (position + num_rows - 1) / page_size + 1 - first);
        }
        EXPECT_EQ(most, window.most_pages(num_rows)) << tokens << " " << page_size << " " << num_rows;
      }
    }
}

TEST(WindowPages, APrefixEndsWhereItsWindowIsComplete) {
  PagePool pool({.num_pages = 12, .page_size = 2, .num_window_pages = 5, .window = 4});
  PageTables a, b, c;
  const Tokens tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  pool.grow(a, 8);
  pool.grow_window(a, 8);
  pool.publish_prefix(tokens, a, 0);
  pool.leave_window(a, 8);
  EXPECT_EQ(a.first_window, 2);  // tokens 5 to 7 are read by a query at 8
  EXPECT_EQ(pool.num_window_cached(), 2);
  EXPECT_EQ(pool.find_prefix(tokens).num_pages, 4);
  EXPECT_TRUE(pool.grow_window(b, 4));  // takes the free page and evicts the page of tokens 0 and 1
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2}).num_pages, 0);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3, 4}).num_pages, 0);
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3, 4, 5, 6}).num_pages, 3) << "tokens 3 to 5 are there";
  pool.take_prefix(tokens, c);
  EXPECT_EQ(c.full, a.full);
  EXPECT_EQ(c.window, (Tokens{0, 0, a.window[2], a.window[3]}));
  for (PageTables* tables : {&a, &b, &c}) pool.release(*tables);
  EXPECT_EQ(pool.window_pages().num_available(), 5);
}

TEST(WindowPages, ALongPromptDoesNotEvictTheEndOfAnEarlierOne) {
  PagePool pool({.num_pages = 40, .page_size = 1, .num_window_pages = 6, .window = 3});
  const auto run = [&](const Tokens& tokens) {
    PageTables tables;
    EXPECT_TRUE(pool.grow(tables, std::ssize(tokens)));
    int64_t published = 0;
    for (size_t n = 1; n <= tokens.size(); ++n) {
      EXPECT_TRUE(pool.grow_window(tables, static_cast<int64_t>(n)));
      published = pool.publish_prefix(std::span(tokens).first(n), tables, published);
      pool.leave_window(tables, static_cast<int64_t>(n));
    }
    pool.release(tables);
  };
  run({1, 2, 3, 4});
  run(Tokens(20, 7));
  EXPECT_EQ(pool.find_prefix(Tokens{1, 2, 3, 4}).num_pages, 4);
  EXPECT_EQ(pool.find_prefix(Tokens(20, 7)).num_pages, 20);
}

TEST(WindowPagesDeathTest, ALeakIsCaught) {
  EXPECT_DEATH(
      {
        PagePool pool({.num_pages = 3, .page_size = 4, .num_window_pages = 2, .window = 4});
        PageTables tables;
        pool.grow_window(tables, 4);
      },
      "leaked window pages: only 1 of 2");
}

// A model that finds everything by searching. A page is identified by the tokens from the beginning of the
// sequence to the page's end; its contents are recorded when they are computed.
class Model {
 public:
  Model(const PoolShape& shape) : pool(shape), window_(shape.window), size_(shape.page_size) {
    for (int32_t page = 0; page < shape.num_pages; ++page) free_full_.insert(page);
    for (int32_t page = 0; page < shape.num_window_pages; ++page) free_window_.insert(page);
  }

  struct User {
    Tokens tokens;
    PageTables tables;
    int64_t num_computed = 0, num_published = 0;
  };
  PagePool pool;
  std::map<int, User> users;

  void start(int id, const Tokens& tokens);
  void grow(User& user, int64_t num_tokens);
  void compute(User& user, int64_t num_tokens);
  void end(int id, bool forgets);
  void flush();
  void check();

 private:
  struct Node {
    int32_t full = 0, window = -1;
    int64_t time = 0;
  };
  struct WindowPage {
    bool was_shared = false, is_passed = false;
    int64_t time = 0;
  };
  Tokens prefix(const Tokens& tokens, int64_t num_pages) const {
    return {tokens.begin(), tokens.begin() + num_pages * size_};
  }
  bool is_used(int32_t page, bool is_window) const {
    for (const auto& [id, user] : users) {
      const auto& t = user.tables;
      const auto begin = is_window ? t.window.begin() + t.first_window : t.full.begin();
      if (std::find(begin, is_window ? t.window.end() : t.full.end(), page) !=
          (is_window ? t.window.end() : t.full.end()))
        return true;
    }
    return false;
  }
  // The most pages of a known prefix whose last window_ - 1 tokens all have window pages.
  int64_t usable(const Tokens& tokens) const {
    int64_t best = 0;
    for (int64_t n = 1; n * size_ <= std::ssize(tokens) && nodes_.contains(prefix(tokens, n)); ++n) {
      bool complete = true;
      for (int64_t t = std::max<int64_t>(0, n * size_ - window_ + 1); t < n * size_; ++t)
        complete = complete && nodes_.at(prefix(tokens, t / size_ + 1)).window >= 0;
      if (complete) best = n;
    }
    return best;
  }
  void drop_window(Node& node) {
    if (node.window >= 0 && !is_used(node.window, true)) free_window_.insert(node.window);
    node.window = -1;
  }
  void evict_full() {
    auto oldest = nodes_.end();
    for (auto node = nodes_.begin(); node != nodes_.end(); ++node) {
      const auto is_child = [&](const auto& other) {
        return other.first.size() == node->first.size() + static_cast<size_t>(size_) &&
               std::equal(node->first.begin(), node->first.end(), other.first.begin());
      };
      if (is_used(node->second.full, false) || std::any_of(nodes_.begin(), nodes_.end(), is_child)) continue;
      const auto key = [](const Node& n) { return std::pair(n.time, n.full); };
      if (oldest == nodes_.end() || key(node->second) < key(oldest->second)) oldest = node;
    }
    ASSERT_NE(oldest, nodes_.end());
    drop_window(oldest->second);
    free_full_.insert(oldest->second.full);
    nodes_.erase(oldest);
  }
  void evict_window() {
    Node* oldest = nullptr;
    const auto key = [&](const Node& n) {
      const WindowPage& page = window_pages_[n.window];
      return std::tuple(!page.is_passed, page.time, n.window);
    };
    for (auto& [tokens, node] : nodes_)
      if (node.window >= 0 && !is_used(node.window, true) && (oldest == nullptr || key(node) < key(*oldest)))
        oldest = &node;
    ASSERT_NE(oldest, nullptr);
    drop_window(*oldest);
  }
  int64_t num_cached(bool is_window) const {
    int64_t n = 0;
    for (const auto& [tokens, node] : nodes_) {
      const int32_t page = is_window ? node.window : node.full;
      n += page >= 0 && !is_used(page, is_window);
    }
    return n;
  }
  // After `user` has lost the pages: those that no user has become cached, or free.
  void let_go(const std::vector<int32_t>& full, const std::vector<int32_t>& window, bool is_passed) {
    ++time_;
    for (const int32_t page : full) {
      if (is_used(page, false)) continue;
      const auto node = std::ranges::find_if(nodes_, [&](const auto& n) { return n.second.full == page; });
      if (node == nodes_.end())
        free_full_.insert(page);
      else
        node->second.time = time_;
    }
    for (const int32_t page : window) {
      if (is_used(page, true)) continue;
      WindowPage& state = window_pages_[page];
      state.time = time_;
      state.is_passed = is_passed && !state.was_shared;
      if (std::ranges::none_of(nodes_, [&](const auto& n) { return n.second.window == page; }))
        free_window_.insert(page);
    }
  }

  const int64_t window_, size_;
  int64_t time_ = 0;
  std::map<Tokens, Node> nodes_;
  std::set<int32_t> free_full_, free_window_;
  std::map<int32_t, WindowPage> window_pages_;
  std::map<int32_t, Tokens> full_contents_, window_contents_;  // the tokens up to the last computed one
};

void Model::start(int id, const Tokens& tokens) {
  User user{.tokens = tokens};
  const int64_t n = usable(tokens);
  ASSERT_EQ(pool.find_prefix(tokens).num_pages, n);
  pool.take_prefix(tokens, user.tables);
  ASSERT_EQ(std::ssize(user.tables.full), n);
  ASSERT_EQ(std::ssize(user.tables.window), n);
  for (int64_t i = 0; i < n; ++i) {
    const Node& node = nodes_.at(prefix(tokens, i + 1));
    ASSERT_EQ(user.tables.full[static_cast<size_t>(i)], node.full);
    if (i < user.tables.first_window) continue;
    ASSERT_EQ(user.tables.window[static_cast<size_t>(i)], node.window);
    window_pages_[node.window].was_shared = true;
  }
  user.num_published = n;
  user.num_computed = n * size_;
  users[id] = user;
}

void Model::grow(User& user, int64_t num_tokens) {
  const auto take = [&](std::vector<int32_t>& table, const std::vector<int32_t>& before,
                        std::set<int32_t>& free, bool is_window) {
    for (size_t i = before.size(); i < table.size(); ++i) {
      if (free.empty()) {
        const std::vector<int32_t> now = table;  // its new pages are not used yet
        table.resize(i);
        is_window ? evict_window() : evict_full();
        table = now;
      }
      ASSERT_EQ(free.erase(table[i]), 1u) << "page " << table[i] << " is not free";
      if (is_window) window_pages_[table[i]] = {};
    }
  };
  const PageTables before = user.tables;
  const int64_t wanted = (num_tokens + size_ - 1) / size_;
  ASSERT_EQ(pool.grow(user.tables, num_tokens),
            wanted - std::ssize(before.full) <= std::ssize(free_full_) + num_cached(false));
  take(user.tables.full, before.full, free_full_, false);
  const bool fits = wanted - std::ssize(before.window) <= std::ssize(free_window_) + num_cached(true);
  ASSERT_EQ(pool.grow_window(user.tables, num_tokens), fits);
  take(user.tables.window, before.window, free_window_, true);
}

// Computes tokens up to num_tokens, publishes the full pages and leaves the window.
void Model::compute(User& user, int64_t num_tokens) {
  for (int64_t i = user.num_computed / size_; i * size_ < num_tokens; ++i) {
    const int64_t end = std::min(num_tokens, (i + 1) * size_);
    const Tokens now(user.tokens.begin(), user.tokens.begin() + end);
    full_contents_[user.tables.full[static_cast<size_t>(i)]] = now;
    window_contents_[user.tables.window[static_cast<size_t>(i)]] = now;
  }
  user.num_computed = num_tokens;
  const PageTables before = user.tables;
  const int64_t published = pool.publish_prefix(std::span(user.tokens).first(static_cast<size_t>(num_tokens)),
                                                user.tables, user.num_published);
  ASSERT_EQ(published, num_tokens / size_);
  for (int64_t i = user.num_published; i < published; ++i) {
    const auto at = static_cast<size_t>(i);
    const auto [node, is_new] = nodes_.try_emplace(prefix(user.tokens, i + 1), Node{before.full[at]});
    ASSERT_EQ(user.tables.full[at], node->second.full);
    if (!is_new) let_go({before.full[at]}, {}, false);
    if (node->second.window < 0) {
      node->second.window = before.window[at];
    } else {
      window_pages_[node->second.window].was_shared = true;
      ASSERT_EQ(user.tables.window[at], node->second.window);
      let_go({}, {before.window[at]}, false);
    }
    ASSERT_EQ(user.tables.window[at], node->second.window);
  }
  user.num_published = published;
  const PageTables all = user.tables;
  pool.leave_window(user.tables, num_tokens);
  let_go({}, {all.window.begin() + all.first_window, all.window.begin() + user.tables.first_window}, true);
}

void Model::end(int id, bool forgets) {
  User user = users.at(id);
  if (forgets) {
    pool.forget(user.tables);
    for (int64_t i = user.num_published; i > 0; --i) {
      const Tokens last = prefix(user.tokens, i);
      const auto extends = [&](const auto& node) {
        return node.first.size() > last.size() && std::equal(last.begin(), last.end(), node.first.begin());
      };
      users.erase(id);
      const bool is_shared = is_used(nodes_.at(last).full, false);
      users[id] = user;
      if (is_shared || std::ranges::any_of(nodes_, extends)) break;
      drop_window(nodes_.at(last));
      nodes_.erase(last);
    }
  }
  pool.release(users.at(id).tables);
  users.erase(id);
  let_go(user.tables.full, {user.tables.window.begin() + user.tables.first_window, user.tables.window.end()},
         false);
}

void Model::flush() {
  pool.flush();
  while (num_cached(false) > 0) evict_full();
  while (num_cached(true) > 0) evict_window();
}

void Model::check() {
  std::set<int32_t> full, window;
  int64_t num_references = 0;
  for (const auto& [id, user] : users) {
    const PageTables& t = user.tables;
    full.insert(t.full.begin(), t.full.end());
    window.insert(t.window.begin() + t.first_window, t.window.end());
    num_references += t.num_window_pages();
    for (int64_t i = 0; i < t.first_window; ++i) ASSERT_EQ(t.window[static_cast<size_t>(i)], 0);
    const auto holds = [&](const Tokens& contents, int64_t token) {
      return std::ssize(contents) > token &&
             std::equal(contents.begin(), contents.begin() + token + 1, user.tokens.begin());
    };
    for (int64_t token = 0; token < user.num_computed; ++token) {
      const auto page = static_cast<size_t>(token / size_);
      ASSERT_TRUE(holds(full_contents_[t.full[page]], token)) << "token " << token;
      if (token <= user.num_computed - window_) continue;
      ASSERT_GE(static_cast<int64_t>(page), t.first_window);
      ASSERT_TRUE(holds(window_contents_[t.window[page]], token)) << "token " << token;
    }
  }
  ASSERT_EQ(pool.num_used(), std::ssize(full));
  ASSERT_EQ(pool.num_cached(), num_cached(false));
  ASSERT_EQ(pool.num_free(), std::ssize(free_full_));
  ASSERT_EQ(pool.num_window_used(), std::ssize(window));
  ASSERT_EQ(pool.num_window_cached(), num_cached(true));
  ASSERT_EQ(pool.num_window_free(), std::ssize(free_window_));
  ASSERT_EQ(pool.window_pages().references().num_references(), num_references);
}

// Users start from cached prefixes, compute, publish and leave at random. There are few different tokens, so
// that many prefixes are equal.
TEST(WindowPages, AgreeWithASimpleModelWhateverHappens) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  int64_t num_reused = 0;
  for (int round = 0; round < 80; ++round) {
    const int page_size = 1 + round % 4;
    const int64_t num_pages = 6 + round % 23;
    Model model({.num_pages = num_pages,
                 .page_size = page_size,
                 .num_window_pages = 3 + below(num_pages - 2),
                 .window = 1 + below(3 * page_size + 2)});
    int next_id = 0;
    for (int step = 0; step < 250; ++step) {
      const int64_t what = below(100);
      if (what < 25 || model.users.empty()) {
        Tokens tokens;
        for (int64_t n = 1 + below(7 * page_size); n > 0; --n)
          tokens.push_back(static_cast<int32_t>(below(2)));
        model.start(next_id, tokens);
        num_reused += std::ssize(model.users[next_id].tables.full);
        ++next_id;
      } else if (what < 99) {
        auto at = model.users.begin();
        std::advance(at, below(std::ssize(model.users)));
        Model::User& user = at->second;
        const int64_t left = std::ssize(user.tokens) - user.num_computed;
        if (what < 45) {
          model.grow(user, user.num_computed + below(left + 1));
        } else if (what < 85) {
          const int64_t covered =
              page_size * std::min(std::ssize(user.tables.full), std::ssize(user.tables.window));
          const int64_t most = std::min(std::ssize(user.tokens), covered);
          if (most > user.num_computed)
            model.compute(user, user.num_computed + 1 + below(most - user.num_computed));
        } else {
          model.end(at->first, /*forgets=*/what < 88);
        }
      } else {
        model.flush();
      }
      if (!testing::Test::HasFatalFailure()) model.check();
      ASSERT_FALSE(testing::Test::HasFatalFailure())
          << "round " << round << " step " << step << " op " << what;
    }
    while (!model.users.empty()) model.end(model.users.begin()->first, false);
  }
  EXPECT_GT(num_reused, 1000);
}

}  // namespace
}  // namespace fp4moe
