#include "kernels/staged_transfers.h"

namespace fp4moe {
namespace {

uint8_t* region_of(const CommGroup& group) { return group.regions[group.rank]; }

// Calls add(peer) for each other rank. All ranks go through their peers in a different order, so that no rank
// receives from all others at once.
template <class Add>
void for_peers(const CommGroup& group, const Add& add) {
  for (int i = 1; i < group.size; ++i) add((group.rank + i) % group.size);
}

}  // namespace

uint8_t* staged_words(const CommGroup& group, int r) {
  return region_of(group) + group.layout.words + r * group.layout.word_bytes;
}

std::vector<PlaneTransfer> sum_transfers(const CommGroup& group, const void* mine, int64_t num_bytes) {
  std::vector<PlaneTransfer> transfers;
  for_peers(group, [&](int peer) {
    transfers.push_back({peer, mine, num_bytes, staged_words(group, peer), num_bytes});
  });
  return transfers;
}

std::vector<PlaneTransfer> gather_transfers(const GatherArgs& args) {
  const CommGroup& group = args.group;
  const auto bytes = [&](int r) { return args.rows * (args.first[r + 1] - args.first[r]); };
  uint8_t* const staged = region_of(group) + group.layout.gather;
  std::vector<PlaneTransfer> transfers;
  for_peers(group, [&](int peer) {
    transfers.push_back(
        {peer, args.mine, bytes(group.rank), staged + args.rows * args.first[peer], bytes(peer)});
  });
  return transfers;
}

std::vector<PlaneTransfer> row_transfers(const A2aRound& round) {
  const CommGroup& group = round.group;
  uint8_t* const memory = region_of(group) + group.layout.exchange;
  const int64_t slot_bytes = round.num_tokens * round.shape.top_k * 4;
  const struct {
    int64_t offset, num_bytes;  // of one rank's lanes
  } parts[] = {{round.area.rows, round.num_tokens * round.shape.row_bytes()},
               {round.area.ids, slot_bytes},
               {round.area.weights, slot_bytes}};
  std::vector<PlaneTransfer> transfers;
  for_peers(group, [&](int peer) {
    for (const auto& part : parts) {
      uint8_t* const lanes = memory + part.offset;
      transfers.push_back({peer, lanes + group.rank * part.num_bytes, part.num_bytes,
                           lanes + peer * part.num_bytes, part.num_bytes});
    }
  });
  return transfers;
}

std::vector<PlaneTransfer> result_transfers(const A2aRound& round) {
  const CommGroup& group = round.group;
  uint8_t* const memory = region_of(group) + group.layout.exchange;
  const int64_t bytes = round.num_tokens * round.shape.parts_of_rank() * round.shape.result_bytes();
  std::vector<PlaneTransfer> transfers;
  for_peers(group, [&](int peer) {
    transfers.push_back({peer, memory + round.area.outgoing + peer * bytes, bytes,
                         memory + round.area.returns + peer * bytes, bytes});
  });
  return transfers;
}

}  // namespace fp4moe
