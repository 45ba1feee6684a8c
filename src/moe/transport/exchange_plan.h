// ExchangePlan: the destination of every row of an exchange, computed by each rank from all ranks' counts.
//
// Each rank divides its tokens into blocks and announces, for each block, how many rows go to each unit. A
// unit is an expert or a rank, whichever has its own buffer for arriving rows. Whole blocks of all ranks are
// packed into rounds that fit the buffers at both ends. Positions follow from the counts: a unit's rows are
// stored by source, and the rows of one source in the order of its tokens and slots. The plan uses no I/O and
// no clock, so equal records give equal plans.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fp4moe/status.h"
#include "moe/plan/rank_layout.h"

namespace fp4moe {

struct ExchangeShape {
  int num_ranks = 1;           // R
  int group_ranks = 1;         // consecutive ranks that must announce the same group_rows
  int64_t num_units = 1;       // U = R * units per rank: unit u is on rank u / (U / R)
  int64_t top_k = 1;           // K: a token has at most K rows and K slots on a unit
  int64_t max_group_rows = 0;  // largest allowed group_rows
  int64_t max_blocks = 1;      // per record
  int64_t unit_rows = 0;       // row capacity of a unit; >= K
  int64_t unit_slots = 0;      // slot capacity of a unit (a row has one slot per expert that it visits); >= K
  int64_t return_rows = 0;     // capacity of a source's return area, in rows; >= K
  bool slots_return = false;   // one row is returned per slot, else one per row
  const char* unit_name = "expert";  // for messages

  int64_t units_per_rank() const { return num_units / num_ranks; }
};

// A block's rows for one unit.
struct BlockCount {
  int32_t rows = 0, slots = 0;  // slots: (row, expert) pairs on this unit
};

// One rank's announcement of a chunk of its tokens, followed in memory by BlockCount [max_blocks][U].
struct RankRecord {
  int64_t group_rows = 0;                   // T of the rank's group
  int64_t rows_left = 0;                    // tokens of the rank in later chunks
  int64_t num_blocks = 0;                   // in this chunk
  int64_t total_rows = 0, total_slots = 0;  // sums of the counts

  BlockCount* counts() { return reinterpret_cast<BlockCount*>(this + 1); }
  const BlockCount* counts() const { return reinterpret_cast<const BlockCount*>(this + 1); }
};
int64_t exchange_record_bytes(const ExchangeShape& shape);

// One token's row for one unit.
struct Send {
  int64_t unit = 0;
  int32_t slots = 1;
  int32_t part = 0;  // index of its result among the token's returned rows; unused with slots_return
};

// Divides tokens into blocks and writes a chunk's record.
class BlockPacker {
 public:
  explicit BlockPacker(const ExchangeShape& shape);
  // Starts a chunk at token `first`; `record` has exchange_record_bytes().
  void start(int64_t first, RankRecord* record);
  // Appends the next token. Returns false if the chunk is full; the token then starts the next chunk.
  bool add(std::span<const Send> sends);
  // Completes the record.
  void finish(int64_t group_rows, int64_t rows_left);
  // The tokens of the chunk's blocks [blocks.first, blocks.first + blocks.count).
  Shard tokens(Shard blocks) const;
  int64_t next_token() const { return next_; }

 private:
  bool fits(std::span<const Send> sends);
  void open_block();

  ExchangeShape shape_;
  int64_t block_rows_, block_slots_, block_returns_;  // target sizes: a round fits several per rank
  RankRecord* record_ = nullptr;
  BlockCount* block_ = nullptr;       // counts of the open block
  std::vector<int64_t> first_token_;  // of each block
  int64_t next_ = 0, returns_ = 0;
};

class ExchangePlan {
 public:
  explicit ExchangePlan(const ExchangeShape& shape);

  // records: R times exchange_record_bytes(); they must stay valid until the last enter(). kDataLoss for an
  // invalid count (negative, over capacity, inconsistent totals), with rank, unit, value and allowed range;
  // kInvalidArgument if the ranks of a group disagree on group_rows.
  Status make(const uint8_t* records);
  int64_t num_rounds() const { return num_rounds_; }
  bool more_chunks() const { return more_chunks_; }  // whether any rank has tokens left

  // Selects the round that the functions below refer to.
  void enter(int64_t round);
  Shard blocks(int source) const;
  int64_t rows(int source, int64_t unit) const { return at(count_, source, unit).rows; }
  int64_t slots(int source, int64_t unit) const { return at(count_, source, unit).slots; }
  // Index of the source's first row among the unit's rows.
  int64_t first_row(int source, int64_t unit) const { return at(first_row_, source, unit); }
  // Index of the unit's first returned row in the source's return area.
  int64_t first_return(int source, int64_t unit) const { return at(first_return_, source, unit); }
  int64_t returns(int source, int64_t unit) const {
    return shape_.slots_return ? slots(source, unit) : rows(source, unit);
  }
  // Rows from all sources.
  int64_t unit_rows(int64_t unit) const { return used_[static_cast<size_t>(unit)].rows; }

 private:
  template <class T>
  const T& at(const std::vector<T>& table, int source, int64_t unit) const {
    return table[index(source, unit)];
  }
  size_t index(int source, int64_t unit) const {
    return static_cast<size_t>(source * shape_.num_units + unit);
  }
  const RankRecord& record(int source) const;
  Status check(int source) const;
  Status check_block(int source, int64_t block, RankRecord& sums) const;
  bool add_block(int source, int64_t block);
  int64_t fill_round();
  void count_rows(int source);

  ExchangeShape shape_;
  const uint8_t* records_ = nullptr;
  bool more_chunks_ = false;
  int64_t num_rounds_ = 0;
  std::vector<int64_t> block_ends_;  // [round][R]
  std::vector<BlockCount> used_;     // [U]
  std::vector<int64_t> returned_;    // [R]
  std::vector<int64_t> next_block_;  // [R]: the first block that is in no round yet
  std::vector<BlockCount> count_;    // [R][U]
  std::vector<int64_t> first_row_, first_return_;
  int64_t round_ = 0;
};

}  // namespace fp4moe
