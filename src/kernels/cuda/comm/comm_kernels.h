// The kernels behind DeviceCommOps (kernels/device_comm.h).
#pragma once

#include "kernels/device_a2a.h"
#include "kernels/device_comm.h"

namespace fp4moe::cuda {

void arm_group(const CommGroup& group);
void all_reduce(const AllReduceArgs& args);
bool may_be_sent(const AllReduceArgs& args);  // precondition of AllReduceArgs::are_sent
void all_reduce_norm(const AllReduceNormArgs& args);
void reduce_norm_gather(const ReduceNormGatherArgs& args);
void gather_columns(const GatherArgs& args);
void gather_shares(const GatherSharesArgs& args);
// The parts of DeviceA2aOps for groups with a plane; staged_send() follows the kernel that fills this rank's
// lanes.
void staged_send(const A2aRound& round);
void staged_wait(const A2aRound& round, const A2aDecoded& decoded);
void staged_combine(const A2aRound& round, const A2aResults& results, float* out);
// How many flags send() raises for each token of a round of bf16 rows, those of token t after those of token
// t - 1; 0: for several tokens together.
int send_flags_per_token(const A2aRound& round);
// Loads the kernel of send() for bf16 rows, which waits for the GPU (DeviceCommunicator::rehearse()).
void load_send();
void send_direct(const A2aRound& round, const bf16* x);
void load_send_direct();  // as load_send()
void add_direct(const A2aRound& round, float* out);
// Return how many blocks of a kernel fit on an SM of the current GPU.
int all_reduce_blocks_per_sm();
int gather_blocks_per_sm();
int a2a_blocks_per_sm();

}  // namespace fp4moe::cuda
