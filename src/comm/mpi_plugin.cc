#include "comm/mpi_plugin.h"

#include <mpi.h>

#include <cstdio>

namespace {

constexpr int kTag = 4;

int init(int* process, int* num_processes) {
  int is_initialized = 0, provided = 0;
  if (int error = MPI_Initialized(&is_initialized)) return error;
  if (is_initialized == 0)
    if (int error = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided)) return error;
  if (is_initialized == 0 && provided < MPI_THREAD_FUNNELED) return MPI_ERR_OTHER;
  if (int error = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN)) return error;
  if (int error = MPI_Comm_rank(MPI_COMM_WORLD, process)) return error;
  return MPI_Comm_size(MPI_COMM_WORLD, num_processes);
}

int probe(int process, int* num_bytes, int* is_there) {
  MPI_Status status;
  const int error = MPI_Iprobe(process, kTag, MPI_COMM_WORLD, is_there, &status);
  if (error != MPI_SUCCESS || *is_there == 0) return error;
  return MPI_Get_count(&status, MPI_BYTE, num_bytes);
}

// If the request was started, stores a copy of it on the heap in *request.
int hand_out(int error, MPI_Request started, void** request) {
  if (error == MPI_SUCCESS) *request = new MPI_Request(started);
  return error;
}

int send(int process, const void* data, int num_bytes, void** request) {
  MPI_Request started;
  const int error = MPI_Isend(data, num_bytes, MPI_BYTE, process, kTag, MPI_COMM_WORLD, &started);
  return hand_out(error, started, request);
}

int receive(int process, void* data, int num_bytes, void** request) {
  MPI_Request started;
  const int error = MPI_Irecv(data, num_bytes, MPI_BYTE, process, kTag, MPI_COMM_WORLD, &started);
  return hand_out(error, started, request);
}

int done(void** request, int* is_done) {
  MPI_Request* started = static_cast<MPI_Request*>(*request);
  const int error = MPI_Test(started, is_done, MPI_STATUS_IGNORE);
  if (error == MPI_SUCCESS && *is_done == 0) return error;
  delete started;
  *request = nullptr;
  return error;
}

void abort_job(int exit_code) { MPI_Abort(MPI_COMM_WORLD, exit_code); }

void error_text(int error, char* text, int text_bytes) {
  char words[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(error, words, &length);
  std::snprintf(text, static_cast<size_t>(text_bytes), "%s", words);
}

constexpr Fp4moeMpi kPlugin = {FP4MOE_MPI_ABI, init,         probe,     send,      receive,
                               done,           MPI_Finalize, abort_job, error_text};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Fp4moeMpi* fp4moe_mpi(void) { return &kPlugin; }
