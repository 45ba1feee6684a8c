// A library with NCCL's functions for tests without a GPU: ranks are threads of one process, and buffers are
// host memory. Sends and receives of a group complete while the caller polls for its end.
// FAKE_NCCL_WITHOUT_RECEIVE leaves out ncclRecv.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace {

enum { kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7 };

struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
struct Receive {
  void* data;
  size_t count;
  int peer;
};
struct Comm {
  std::string id;
  int rank = 0, num_ranks = 1;
  std::deque<Receive> receives;  // not complete yet
};

std::mutex mutex;
int num_ids = 0;
std::map<std::string, int> joined;                                                    // ranks, by id
std::map<std::tuple<std::string, int, int>, std::deque<std::vector<char>>> messages;  // by id, source, rank

std::atomic<int> version = 22809;
std::atomic<const char*> fault = "";
bool fault_is(const char* name) { return std::strcmp(fault, name) == 0; }

// Completes the receives whose messages have been sent; returns whether all are complete.
bool progress(Comm& comm) {
  std::lock_guard lock(mutex);
  if (fault_is("connect") || joined[comm.id] < comm.num_ranks) return false;
  if (fault_is("group")) return false;
  while (!comm.receives.empty()) {
    const Receive& receive = comm.receives.front();
    auto& queue = messages[{comm.id, receive.peer, comm.rank}];
    if (queue.empty()) return false;
    std::copy_n(queue.front().begin(), std::min(receive.count, queue.front().size()),
                static_cast<char*>(receive.data));
    queue.pop_front();
    comm.receives.pop_front();
  }
  return true;
}

}  // namespace

extern "C" {

// For tests. `name` is a string literal: connect (ranks never connect), send (ncclSend fails), group (a group
// never ends), async (the communicator reports an error) or empty.
void fake_nccl_set_fault(const char* name) { fault = name; }
void fake_nccl_set_version(int number) { version = number; }

int ncclGetVersion(int* number) {
  *number = version;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited or there was a network error" : "invalid usage";
}
const char* ncclGetLastError(Comm*) { return "fake details"; }

int ncclGetUniqueId(Id* id) {
  std::lock_guard lock(mutex);
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::snprintf(id->bytes, sizeof id->bytes, "fake %d", ++num_ids);
  return kSuccess;
}

int ncclCommInitRankConfig(Comm** comm, int num_ranks, Id id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0) return kInvalidUsage;
  *comm = new Comm{std::string(id.bytes), rank, num_ranks, {}};
  std::lock_guard lock(mutex);
  ++joined[(*comm)->id];
  return kInProgress;
}

int ncclCommGetAsyncError(Comm* comm, int* result) {
  *result = fault_is("async") ? kRemoteError : progress(*comm) ? kSuccess : kInProgress;
  return kSuccess;
}
int ncclCommAbort(Comm* comm) {
  delete comm;
  return kInProgress;
}
int ncclCommDestroy(Comm* comm) { return ncclCommAbort(comm); }

int ncclGroupStart() { return kSuccess; }
int ncclGroupEnd() { return kInProgress; }

int ncclSend(const void* data, size_t count, int, int peer, Comm* comm, void*) {
  if (fault_is("send")) return kInvalidUsage;
  const auto* const bytes = static_cast<const char*>(data);
  std::lock_guard lock(mutex);
  messages[{comm->id, comm->rank, peer}].emplace_back(bytes, bytes + count);
  return kSuccess;
}
#ifndef FAKE_NCCL_WITHOUT_RECEIVE
int ncclRecv(void* data, size_t count, int, int peer, Comm* comm, void*) {
  std::lock_guard lock(mutex);
  comm->receives.push_back({data, count, peer});
  return kSuccess;
}
#endif
// Not supported, whatever their arguments.
int ncclCommInitAll() { return kInvalidUsage; }
int ncclAllReduce() { return kInvalidUsage; }
int ncclAllGather() { return kInvalidUsage; }

}  // extern "C"
