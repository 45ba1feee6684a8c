// A job under mpirun, for mpi_test.py:  mpi_ranks MODE RANKS [SECONDS]
//   all        checks every collective and put against its expected result; process 0 prints "ok"
//   loop       runs all_reduce and data rounds for SECONDS, deadline 3 s; an error aborts the job
//   config, heap, version   process 1 has a different value
//   missing    the last process starts late; the other processes wait 2 s for it
//   leave      the last process exits in the middle of the job without notice
//   disagree   rank 1 runs a different operation from the other ranks
//   idle       waits for SECONDS in a barrier without a deadline; prints the CPU seconds of the process
//   latency    prints the microseconds of small and large all_reduces
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "comm/communicator.h"
#include "comm/job.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kRecord = 256, kStaging = 64 << 10,
                  kRow = 300'000;  // a row takes more than one put operation

struct Setup {
  std::string mode;
  int num_ranks = 1;
  double seconds = 5;
};

int64_t comm_bytes(const Setup& s) { return Communicator::heap_bytes(s.num_ranks, kRecord, kStaging); }

Status expect(bool ok, const char* what) { return ok ? Status() : data_loss(std::string("wrong ") + what); }

uint8_t byte_of(int rank, int64_t i) { return static_cast<uint8_t>(rank * 41 + i * 7 + i / 256); }

Status check_collectives(Communicator& comm, int layer) {
  const int n = comm.size(), me = comm.rank();
  std::vector<int32_t> all(static_cast<size_t>(n));
  const int32_t mine = me * 3 + layer;
  FP4MOE_RETURN_IF_ERROR(comm.exchange({"counts", layer}, &mine, 4, all.data()));
  for (int r = 0; r < n; ++r)
    FP4MOE_RETURN_IF_ERROR(expect(all[static_cast<size_t>(r)] == r * 3 + layer, "record"));
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{3000}, int64_t{200'000}}) {
    std::vector<float> x(static_cast<size_t>(size)), sum(x.size());
    for (int64_t i = 0; i < size; ++i) {
      x[static_cast<size_t>(i)] = static_cast<float>(me + 1) * 0.1f + static_cast<float>(i);
      for (int r = 0; r < n; ++r)
        sum[static_cast<size_t>(i)] += static_cast<float>(r + 1) * 0.1f + static_cast<float>(i);
    }
    FP4MOE_RETURN_IF_ERROR(comm.all_reduce({"all_reduce", layer}, x.data(), size));
    FP4MOE_RETURN_IF_ERROR(expect(x == sum, "all_reduce"));
  }
  std::vector<int64_t> counts(static_cast<size_t>(n));
  for (int r = 0; r < n; ++r) counts[static_cast<size_t>(r)] = (r + layer) % 3 * 50'000;
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::vector<uint8_t> part, out(static_cast<size_t>(total)), expected;
  for (int r = 0; r < n; ++r)
    for (int64_t i = 0; i < counts[static_cast<size_t>(r)]; ++i) expected.push_back(byte_of(r, i));
  for (int64_t i = 0; i < counts[static_cast<size_t>(me)]; ++i) part.push_back(byte_of(me, i));
  FP4MOE_RETURN_IF_ERROR(comm.all_gather({"all_gather", layer}, part.data(), counts, out.data()));
  FP4MOE_RETURN_IF_ERROR(expect(out == expected, "all_gather"));
  std::vector<float> addends(static_cast<size_t>(total), static_cast<float>(me)),
      scattered(static_cast<size_t>(counts[static_cast<size_t>(me)]));
  FP4MOE_RETURN_IF_ERROR(
      comm.reduce_scatter({"reduce_scatter", layer}, addends.data(), counts, scattered.data()));
  for (const float v : scattered)
    FP4MOE_RETURN_IF_ERROR(expect(v == static_cast<float>(n * (n - 1) / 2), "reduce_scatter"));
  std::vector<uint8_t> data(70'000, static_cast<uint8_t>(me == layer % n ? 0xa5 : 0));
  FP4MOE_RETURN_IF_ERROR(comm.broadcast({"broadcast", layer}, layer % n, data.data(), 70'000));
  FP4MOE_RETURN_IF_ERROR(expect(data == std::vector<uint8_t>(70'000, 0xa5), "broadcast"));
  return comm.barrier({"barrier", layer});
}

// Each rank puts a row to every other rank and receives it back inverted; two rounds use the same regions.
Status check_rounds(Communicator& comm, const Setup& s, int layer) {
  const OpName op = {"dispatch", layer, 9};
  const int n = comm.size(), me = comm.rank();
  const int64_t dispatch_at = comm_bytes(s), combine_at = dispatch_at + n * kRow;
  FP4MOE_RETURN_IF_ERROR(comm.exchange(op, nullptr, 0, nullptr));
  std::vector<uint8_t> row(kRow);
  for (int round = 0; round < 2; ++round) {
    for (int dst = 0; dst < n; ++dst) {
      std::memset(row.data(), layer * 16 + round * 64 + me * 5 + dst, kRow);
      FP4MOE_RETURN_IF_ERROR(comm.put(dst, dispatch_at + me * kRow, row.data(), kRow));
      FP4MOE_RETURN_IF_ERROR(comm.data_ready(op, dst));
    }
    for (int src = 0; src < n; ++src) {
      FP4MOE_RETURN_IF_ERROR(comm.wait_data(op, src));
      const uint8_t* got = comm.endpoint().heap() + dispatch_at + src * kRow;
      const uint8_t value = static_cast<uint8_t>(layer * 16 + round * 64 + src * 5 + me);
      FP4MOE_RETURN_IF_ERROR(
          expect(std::all_of(got, got + kRow, [&](uint8_t b) { return b == value; }), "row"));
      std::memset(row.data(), ~value, kRow);
      FP4MOE_RETURN_IF_ERROR(comm.put(src, combine_at + me * kRow, row.data(), kRow));
      FP4MOE_RETURN_IF_ERROR(comm.data_ready(op, src));
    }
    for (int dst = 0; dst < n; ++dst) {
      FP4MOE_RETURN_IF_ERROR(comm.wait_data(op, dst));
      const uint8_t* got = comm.endpoint().heap() + combine_at + dst * kRow;
      const uint8_t value = static_cast<uint8_t>(~(layer * 16 + round * 64 + me * 5 + dst));
      FP4MOE_RETURN_IF_ERROR(
          expect(std::all_of(got, got + kRow, [&](uint8_t b) { return b == value; }), "reply"));
    }
  }
  return {};
}

Status measure(Communicator& comm) {
  for (const int64_t elems : {int64_t{1}, int64_t{2880}, int64_t{1} << 20}) {
    const int repeats = elems > 100'000 ? 20 : 2000;
    std::vector<float> x(static_cast<size_t>(elems), 0.0f);
    const auto begin = Clock::now();
    for (int i = 0; i < repeats; ++i) FP4MOE_RETURN_IF_ERROR(comm.all_reduce({"latency"}, x.data(), elems));
    if (comm.rank() == 0)
      std::printf("all_reduce of %lld f32: %.1f us\n", static_cast<long long>(elems),
                  std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / repeats);
  }
  return {};
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

Status idle(Communicator& comm, const Setup& s) {
  comm.set_timeout(kNoDeadline);
  FP4MOE_RETURN_IF_ERROR(comm.barrier({"begin"}));
  const double begin = cpu_seconds();
  if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::duration<double>(s.seconds));
  FP4MOE_RETURN_IF_ERROR(comm.barrier({"idle"}));
  std::printf("cpu %.3f\n", cpu_seconds() - begin);
  return {};
}

Status run_rank(Job& job, int rank, const Setup& s) {
  Communicator comm(job.endpoint(rank), 0, s.num_ranks, {.record_bytes = kRecord, .staging_bytes = kStaging},
                    {.timeout = std::chrono::seconds(3), .first_epoch = 0xfffffff0u});
  if (s.mode == "latency") return measure(comm);
  if (s.mode == "idle") return idle(comm, s);
  if (s.mode == "disagree")
    return comm.exchange({rank == 1 ? "combine" : "dispatch", 7}, nullptr, 0, nullptr);
  const auto end = Clock::now() + std::chrono::duration<double>(s.seconds);
  for (int layer = 0;; ++layer) {
    int go_on = s.mode == "all" ? layer < 10 : Clock::now() < end;
    FP4MOE_RETURN_IF_ERROR(comm.broadcast({"go_on"}, 0, &go_on, sizeof go_on));
    if (go_on == 0) return {};
    if (s.mode == "leave" && layer == 3 && rank == s.num_ranks - 1) std::_Exit(0);
    if (s.mode == "all") FP4MOE_RETURN_IF_ERROR(check_collectives(comm, layer));
    FP4MOE_RETURN_IF_ERROR(check_rounds(comm, s, layer));
  }
}

Result<std::unique_ptr<Job>> open(const Setup& s) {
  const LauncherInfo launcher = launcher_info();
  JobOptions options;
  options.num_ranks = s.num_ranks;
  options.heap_bytes = comm_bytes(s) + 2 * s.num_ranks * kRow;
  options.timeout_seconds = 3;
  options.start_timeout_seconds = s.mode == "missing" ? 2 : 30;
  options.first_signal = 0xffffffefu;
  options.config_text =
      "model demo\nlayers " + std::string(s.mode == "config" && launcher.process == 1 ? "5" : "4");
  options.data = "data of process " + std::to_string(launcher.process);
  if (s.mode == "heap" && launcher.process == 1) options.heap_bytes += 64;
  if (s.mode == "missing" && launcher.process == launcher.num_processes - 1)
    std::this_thread::sleep_for(std::chrono::seconds(20));
  return Job::open(options);
}

int run(const Setup& s) {
  Result<std::unique_ptr<Job>> job = open(s);
  if (!job.ok()) {
    std::fprintf(stderr, "error: %s\n", job.status().message().c_str());
    return 3;
  }
  std::printf("process %d pid %d ranks %d+%d\n", (*job)->process(), getpid(), (*job)->first_rank(),
              (*job)->num_local_ranks());
  std::fflush(stdout);
  if ((*job)->data() != "data of process 0") (*job)->abort(data_loss("wrong data: " + (*job)->data()));
  std::vector<std::thread> threads;
  for (int i = 0; i < (*job)->num_local_ranks(); ++i)
    threads.emplace_back([&, rank = (*job)->first_rank() + i] {
      const Status status = run_rank(**job, rank, s);
      if (!status.ok()) (*job)->abort(status);
    });
  for (std::thread& thread : threads) thread.join();
  if ((*job)->process() == 0) std::printf("ok\n");
  return 0;
}

}  // namespace
}  // namespace fp4moe

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  // Ignores SIGTERM: the server keeps running to drain, and so must this program.
  std::signal(SIGTERM, [](int) {});
  fp4moe::set_log_sink([](fp4moe::LogLevel, std::string_view line) {
    std::fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
  });
  return fp4moe::run({argv[1], std::atoi(argv[2]), argc > 3 ? std::atof(argv[3]) : 5});
}
