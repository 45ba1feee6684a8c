#include "moe/transport/exchange_plan.h"

#include <algorithm>

#include "base/check.h"

namespace fp4moe {
namespace {

// Block sizes are chosen so that this many blocks of every rank fit into a round, whatever their
// destinations. A block of a single token can be larger.
constexpr int64_t kBlocksPerRound = 2;

int64_t goal(int64_t room, int64_t shares) { return std::max<int64_t>(1, room / (shares * kBlocksPerRound)); }

std::string in_range(const std::string& what, int64_t value, int64_t largest) {
  return what + std::to_string(value) + " (allowed: 0.." + std::to_string(largest) + ")";
}

}  // namespace

int64_t exchange_record_bytes(const ExchangeShape& s) {
  return static_cast<int64_t>(sizeof(RankRecord)) +
         s.max_blocks * s.num_units * static_cast<int64_t>(sizeof(BlockCount));
}

BlockPacker::BlockPacker(const ExchangeShape& shape)
    : shape_(shape),
      block_rows_(goal(shape.unit_rows, shape.num_ranks)),
      block_slots_(goal(shape.unit_slots, shape.num_ranks)),
      block_returns_(goal(shape.return_rows, 1)) {
  FP4MOE_CHECK(std::min({shape.unit_rows, shape.unit_slots, shape.return_rows}) >= shape.top_k,
               "a token's K=" + std::to_string(shape.top_k) + " rows do not fit");
}

void BlockPacker::start(int64_t first, RankRecord* record) {
  record_ = record;
  *record_ = {};
  block_ = nullptr;
  first_token_.clear();
  next_ = first;
}

void BlockPacker::open_block() {
  block_ = record_->counts() + record_->num_blocks * shape_.num_units;
  std::fill(block_, block_ + shape_.num_units, BlockCount{});
  ++record_->num_blocks;
  first_token_.push_back(next_);
  returns_ = 0;
}

// Whether the open block stays within its target sizes with these rows. A token can name an expert twice, so
// rows are counted one by one.
bool BlockPacker::fits(std::span<const Send> sends) {
  bool within = true;
  int64_t returns = returns_;
  for (const Send& s : sends) {
    BlockCount& c = block_[s.unit];
    ++c.rows;
    c.slots += s.slots;
    returns += shape_.slots_return ? s.slots : 1;
    within &= c.rows <= block_rows_ && c.slots <= block_slots_ && returns <= block_returns_;
  }
  for (const Send& s : sends) {
    --block_[s.unit].rows;
    block_[s.unit].slots -= s.slots;
  }
  return within;
}

bool BlockPacker::add(std::span<const Send> sends) {
  if (block_ == nullptr || (!fits(sends) && next_ > first_token_.back())) {
    if (record_->num_blocks == shape_.max_blocks) return false;
    open_block();
  }
  for (const Send& s : sends) {
    ++block_[s.unit].rows;
    block_[s.unit].slots += s.slots;
    returns_ += shape_.slots_return ? s.slots : 1;
    ++record_->total_rows;
    record_->total_slots += s.slots;
  }
  ++next_;
  return true;
}

void BlockPacker::finish(int64_t group_rows, int64_t rows_left) {
  record_->group_rows = group_rows;
  record_->rows_left = rows_left;
  // Unused blocks are sent as zeros, because records are compared and hashed whole.
  std::fill(record_->counts() + record_->num_blocks * shape_.num_units,
            record_->counts() + shape_.max_blocks * shape_.num_units, BlockCount{});
}

Shard BlockPacker::tokens(Shard blocks) const {
  const auto start_of = [&](int64_t block) {
    return block < static_cast<int64_t>(first_token_.size()) ? first_token_[static_cast<size_t>(block)]
                                                             : next_;
  };
  return {start_of(blocks.first), start_of(blocks.first + blocks.count) - start_of(blocks.first)};
}

ExchangePlan::ExchangePlan(const ExchangeShape& shape)
    : shape_(shape),
      used_(static_cast<size_t>(shape.num_units)),
      returned_(static_cast<size_t>(shape.num_ranks)),
      next_block_(returned_.size()),
      count_(static_cast<size_t>(shape.num_ranks * shape.num_units)),
      first_row_(count_.size()),
      first_return_(count_.size()) {}

const RankRecord& ExchangePlan::record(int source) const {
  return *reinterpret_cast<const RankRecord*>(records_ + source * exchange_record_bytes(shape_));
}

Status ExchangePlan::check_block(int source, int64_t block, RankRecord& sums) const {
  const BlockCount* counts = record(source).counts() + block * shape_.num_units;
  const auto bad = [&](const std::string& what) {
    return data_loss("a2a counts of rank " + std::to_string(source) + ", block " + std::to_string(block) +
                     ": " + what);
  };
  int64_t returns = 0;
  for (int64_t u = 0; u < shape_.num_units; ++u) {
    const int64_t rows = counts[u].rows, slots = counts[u].slots;
    const std::string_view unit = shape_.unit_name;
    const auto name = [&](const char* what) {
      return std::string(what) + " for " + std::string(unit) + " " + std::to_string(u) + ": ";
    };
    if (rows < 0 || rows > shape_.unit_rows) return bad(in_range(name("rows"), rows, shape_.unit_rows));
    if (slots < rows || slots > std::min(shape_.unit_slots, rows * shape_.top_k))
      return bad(name("slots") + std::to_string(slots) + " (allowed: " + std::to_string(rows) + ".." +
                 std::to_string(std::min(shape_.unit_slots, rows * shape_.top_k)) + ")");
    sums.total_rows += rows;
    sums.total_slots += slots;
    returns += shape_.slots_return ? slots : rows;
  }
  if (returns > shape_.return_rows) return bad(in_range("total rows: ", returns, shape_.return_rows));
  return {};
}

Status ExchangePlan::check(int source) const {
  const RankRecord& r = record(source);
  const auto bad = [&](const std::string& what) {
    return data_loss("a2a counts of rank " + std::to_string(source) + ": " + what);
  };
  if (r.num_blocks < 0 || r.num_blocks > shape_.max_blocks)
    return bad(in_range("blocks: ", r.num_blocks, shape_.max_blocks));
  if (r.group_rows < 0 || r.group_rows > shape_.max_group_rows)
    return bad(in_range("tokens: ", r.group_rows, shape_.max_group_rows));
  if (r.rows_left < 0 || r.rows_left > r.group_rows)
    return bad(in_range("tokens left: ", r.rows_left, r.group_rows));
  const int leader = source - source % shape_.group_ranks;
  if (r.group_rows != record(leader).group_rows)
    return invalid_argument("a2a: rank " + std::to_string(source) + " has a batch of " +
                            std::to_string(r.group_rows) + " tokens, but rank " + std::to_string(leader) +
                            " of the same group has " + std::to_string(record(leader).group_rows));
  RankRecord sums;
  for (int64_t b = 0; b < r.num_blocks; ++b) FP4MOE_RETURN_IF_ERROR(check_block(source, b, sums));
  if (sums.total_rows != r.total_rows || sums.total_slots != r.total_slots)
    return bad("they add up to " + std::to_string(sums.total_rows) + " rows and " +
               std::to_string(sums.total_slots) + " slots, announced: " + std::to_string(r.total_rows) +
               " and " + std::to_string(r.total_slots));
  return {};
}

bool ExchangePlan::add_block(int source, int64_t block) {
  const BlockCount* counts = record(source).counts() + block * shape_.num_units;
  int64_t& returned = returned_[static_cast<size_t>(source)];
  int64_t returns = returned;
  for (int64_t u = 0; u < shape_.num_units; ++u) {
    const BlockCount& used = used_[static_cast<size_t>(u)];
    if (used.rows + counts[u].rows > shape_.unit_rows || used.slots + counts[u].slots > shape_.unit_slots)
      return false;
    returns += shape_.slots_return ? counts[u].slots : counts[u].rows;
  }
  if (returns > shape_.return_rows) return false;
  returned = returns;
  for (int64_t u = 0; u < shape_.num_units; ++u) {
    used_[static_cast<size_t>(u)].rows += counts[u].rows;
    used_[static_cast<size_t>(u)].slots += counts[u].slots;
  }
  return true;
}

// Fills one round: adds the next block of each rank in turn, until no rank's next block fits. A rank whose
// block does not fit adds no more blocks to this round, because its blocks are sent in order. R = 3, round 1:
//
//   turn            0              1              2
//   rank            1   2   0      1   2   0      2   0
//   its next block  4   7   3      5   8   4      9   5
//   fits            yes yes yes    no  yes yes    no  no
//   next_block_ ends at 4 + 1, 7 + 2, 3 + 2 for ranks 1, 2, 0
//
// The rank that starts rotates from round to round, so that full units do not always delay the same ranks.
int64_t ExchangePlan::fill_round() {
  const auto R = static_cast<size_t>(shape_.num_ranks);
  std::fill(used_.begin(), used_.end(), BlockCount{});
  std::fill(returned_.begin(), returned_.end(), 0);
  std::vector<char> is_open(R, 1);
  int64_t num_added = 0;
  for (bool added = true; added;) {
    added = false;
    for (size_t i = 0; i < R; ++i) {
      const size_t s = (i + static_cast<size_t>(num_rounds_)) % R;
      if (!is_open[s]) continue;
      const int source = static_cast<int>(s);
      is_open[s] = next_block_[s] < record(source).num_blocks && add_block(source, next_block_[s]);
      if (!is_open[s]) continue;
      ++next_block_[s], ++num_added;
      added = true;
    }
  }
  return num_added;
}

Status ExchangePlan::make(const uint8_t* records) {
  records_ = records;
  num_rounds_ = 0;
  more_chunks_ = false;
  block_ends_.clear();
  std::fill(next_block_.begin(), next_block_.end(), 0);
  int64_t blocks_left = 0;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    FP4MOE_RETURN_IF_ERROR(check(r));
    more_chunks_ |= record(r).rows_left > 0;
    blocks_left += record(r).num_blocks;
  }
  for (; blocks_left > 0; ++num_rounds_) {
    blocks_left -= fill_round();  // at least one block: a checked block fits an empty round
    block_ends_.insert(block_ends_.end(), next_block_.begin(), next_block_.end());
  }
  return {};
}

Shard ExchangePlan::blocks(int source) const {
  const int64_t R = shape_.num_ranks;
  const int64_t end = block_ends_[static_cast<size_t>(round_ * R + source)];
  const int64_t first = round_ == 0 ? 0 : block_ends_[static_cast<size_t>((round_ - 1) * R + source)];
  return {first, end - first};
}

// Sums the counts of the source's blocks in the round, for each unit.
void ExchangePlan::count_rows(int source) {
  BlockCount* sum = &count_[index(source, 0)];
  const Shard range = blocks(source);
  for (int64_t b = range.first; b < range.first + range.count; ++b) {
    const BlockCount* counts = record(source).counts() + b * shape_.num_units;
    for (int64_t u = 0; u < shape_.num_units; ++u) {
      sum[u].rows += counts[u].rows;
      sum[u].slots += counts[u].slots;
    }
  }
}

// Places the rows. A unit's area is ordered by source, and a source's return area by unit. first_row_ and
// first_return_ are the running sums of the counts, down a column and along a row:
//
//   rows       unit 0  1  2      first_row_  unit 0  1  2      first_return_  unit 0  1  2
//   source 0        3  0  2                       0  0  0                          0  3  3
//   source 1        1  4  2                       3  0  2                          0  1  5
//   used_.rows      4  4  4
void ExchangePlan::enter(int64_t round) {
  FP4MOE_CHECK(round >= 0 && round < num_rounds_, "round " + std::to_string(round) +
                                                      " does not exist; the number of rounds is " +
                                                      std::to_string(num_rounds_));
  round_ = round;
  std::fill(count_.begin(), count_.end(), BlockCount{});
  std::fill(used_.begin(), used_.end(), BlockCount{});
  for (int source = 0; source < shape_.num_ranks; ++source) {
    count_rows(source);
    int64_t returned = 0;
    for (int64_t u = 0; u < shape_.num_units; ++u) {
      BlockCount& used = used_[static_cast<size_t>(u)];
      first_row_[index(source, u)] = used.rows;
      first_return_[index(source, u)] = returned;
      used.rows += static_cast<int32_t>(rows(source, u));
      used.slots += static_cast<int32_t>(slots(source, u));
      returned += returns(source, u);
    }
  }
}

}  // namespace fp4moe
