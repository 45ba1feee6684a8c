// Byte-pair encoding of one word, with the tie rules of Hugging Face's implementation.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fp4moe/status.h"
#include "io/tokenizer/tokenizer_json.h"

namespace fp4moe {

// Reverses GPT-2's mapping of bytes to printable characters, in which token strings are written.
// Returns the bytes of `token`, or nothing if it contains a character outside the mapping.
std::optional<std::string> bytes_of_byte_level(std::string_view token);
// Returns the UTF-8 character that represents one byte.
std::string byte_level_of(uint8_t byte);

// Rank and result of merging two adjacent tokens, looked up by their ids.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank;  // lower ranks merge first
    int32_t merged;
  };
  // The capacity is fixed at `count` merges.
  explicit MergeTable(size_t count = 0);
  // Overwrites the rank and result of an existing pair.
  void insert(int32_t left, int32_t right, Merge merge);
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge{};
  };
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  size_t slot_of(uint64_t key) const;  // the slot of key, or where to insert it

  std::vector<Slot> slots_;  // open addressing; the size is a power of two, the load at most 1/2
};

class BpeModel {
 public:
  using Vocab = std::unordered_map<std::string, int32_t>;

  // Parses tokenizer.json's "model". kInvalidArgument, kUnsupported: as in Tokenizer::parse.
  static Result<BpeModel> parse(const JsonCursor& model);
  // tiktoken's rule: ids are ranks, a word that is a token is not merged, and any two neighbours whose joined
  // bytes are a token merge, lowest rank first. `tokens` are unique and not empty. kDataLoss if a byte has no
  // token; kDoesNotFit if there are too many ways to merge.
  static Result<BpeModel> from_ranks(const std::vector<std::string>& tokens);

  // Whether some bytes have no token, or are fused into one unknown token with their neighbours.
  bool drops_bytes() const;

  // Token strings as in the file; ids are unique and below kMaxTokenIds.
  const Vocab& vocab() const { return vocab_; }

  struct Symbol {
    int32_t id;              // -1: merged into its left neighbour
    int32_t previous, next;  // indices into symbols; -1 at the ends
  };
  struct Candidate {
    uint32_t rank;
    int32_t position;  // of the left symbol
    int32_t merged;
    // std heaps are max-heaps: the greatest candidate has the lowest rank, then the leftmost position.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  // Scratch memory reused between calls to encode().
  struct Scratch {
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };
  // Appends the ids of `word` (raw bytes) in O(n log n) time.
  void encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const;

 private:
  Status parse_vocab(const JsonCursor& vocab);
  Status parse_options(const JsonCursor& model);
  Status parse_merges(const JsonCursor& merges);
  Status insert_merge(const JsonCursor& where, std::string_view left, std::string_view right, size_t rank);

  Vocab vocab_;
  Vocab whole_words_;                  // keyed by raw bytes; filled only for ignore_merges and ranks
  std::array<int32_t, 256> byte_ids_;  // -1: the vocabulary lacks this byte
  int32_t unknown_id_ = -1;            // -1: bytes without a token are dropped
  bool fuse_unknown_ = false;
  MergeTable merges_;
};

}  // namespace fp4moe
