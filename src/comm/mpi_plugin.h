// The interface of the MPI plug-in (libfp4moe_mpi.so), which alone is linked against MPI and is loaded only
// for the fabric mpi. C, so that it does not depend on the compiler. One thread makes all calls, init()
// first.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FP4MOE_MPI_ABI 1u

// Functions return 0 or MPI's error code, for which error_text() has words.
typedef struct Fp4moeMpi {
  uint32_t abi;  // FP4MOE_MPI_ABI
  int (*init)(int* process, int* num_processes);
  // Whether a message of that process is there, and how long it is.
  int (*probe)(int process, int* num_bytes, int* is_there);
  // Start sending, and receiving the probed message; data belongs to MPI until done() says so, which makes
  // *request null again. Nothing blocks: the other process may end in the middle of a message.
  int (*send)(int process, const void* data, int num_bytes, void** request);
  int (*receive)(int process, void* data, int num_bytes, void** request);
  int (*done)(void** request, int* is_done);
  int (*finalize)(void);
  void (*abort)(int exit_code);
  void (*error_text)(int error, char* text, int text_bytes);
} Fp4moeMpi;

// The one exported function, "fp4moe_mpi".
const Fp4moeMpi* fp4moe_mpi(void);

#ifdef __cplusplus
}
#endif
