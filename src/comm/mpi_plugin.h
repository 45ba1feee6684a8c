// The interface of the MPI plug-in (libfp4moe_mpi.so), the only library linked against MPI; it is loaded only
// for the mpi fabric. The interface is in C, so that it does not depend on the compiler. One thread makes all
// calls, init() first.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FP4MOE_MPI_ABI 1u

// Functions return 0 or an MPI error code, which error_text() describes.
typedef struct Fp4moeMpi {
  uint32_t abi;  // FP4MOE_MPI_ABI
  int (*init)(int* process, int* num_processes);
  // Reports whether a message from `process` is waiting, and its length.
  int (*probe)(int process, int* num_bytes, int* is_there);
  // Start a send, or the receive of the probed message. `data` belongs to MPI until done() reports
  // completion, which sets *request to null. No call blocks, because the other process may end in the middle
  // of a message.
  int (*send)(int process, const void* data, int num_bytes, void** request);
  int (*receive)(int process, void* data, int num_bytes, void** request);
  int (*done)(void** request, int* is_done);
  int (*finalize)(void);
  void (*abort)(int exit_code);
  void (*error_text)(int error, char* text, int text_bytes);
} Fp4moeMpi;

// The only exported function, "fp4moe_mpi".
const Fp4moeMpi* fp4moe_mpi(void);

#ifdef __cplusplus
}
#endif
