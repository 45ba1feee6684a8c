// What the operations of a group without shared memory exchange over its plane (group_plane.h): this rank's
// parts for all other ranks, and the places for theirs in its region.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device_a2a.h"
#include "kernels/device_comm.h"

namespace fp4moe {

// Sums: sends `mine` [num_bytes] to all ranks; rank r's operand arrives at words [r].
std::vector<PlaneTransfer> sum_transfers(const CommGroup& group, const void* mine, int64_t num_bytes);
// Returns the address of rank r's operand in this rank's region.
uint8_t* staged_words(const CommGroup& group, int r);

// Gathers: sends args.mine to all ranks; rank r's part, [rows][first[r + 1] - first[r]], arrives at byte
// rows * first[r] of the gather memory.
std::vector<PlaneTransfer> gather_transfers(const GatherArgs& args);

// Rounds of an exchange: this rank's lanes go to all ranks, with their rows, ids and weights.
std::vector<PlaneTransfer> row_transfers(const A2aRound& round);
// The results in A2aArea::outgoing go to their ranks, and arrive in A2aArea::returns.
std::vector<PlaneTransfer> result_transfers(const A2aRound& round);

}  // namespace fp4moe
