#include "bench/bench_cpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/check.h"
#include "base/run_ranges.h"
#include "bench/bench_spread.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMiB = int64_t{1} << 20, kReadChunk = kMiB / 4;
constexpr int64_t kUnknownCacheColdBytes = 256 * kMiB;

double seconds_of(const std::function<void()>& work) {
  const Clock::time_point start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Rate rate_of(std::vector<double> values) {
  return {*std::max_element(values.begin(), values.end()), spread_of(values).median};
}

// Bytes of this process's anonymous memory in huge pages; -1 if the system does not report it.
int64_t huge_page_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string key; file >> key;) {
    int64_t kib = 0;
    if (key == "AnonHugePages:" && file >> kib) return kib << 10;
  }
  return -1;
}

struct DotRates {
  Rate f32, bf16, int8;  // GFLOP/s; 0 if the ISA lacks the instruction
};

// All limits for one number of threads.
struct PeakRow {
  int threads;
  Rate read_gbps;
  std::vector<std::pair<const CpuPeakOps*, DotRates>> dots;  // per instruction set, widest first
};

std::vector<const CpuPeakOps*> all_ops() {
  std::vector<const CpuPeakOps*> list;
  if (amx_peak_ops() != nullptr) list.push_back(amx_peak_ops());
  list.push_back(&cpu_peak_ops(best_isa()));
  return list;
}

Result<PeakRow> measure_row(const PeakOptions& options, int threads, int64_t& huge_pages) {
  ThreadPool pool(threads);
  PeakRow row{.threads = threads, .read_gbps = {}, .dots = {}};
  FP4MOE_ASSIGN_OR_RETURN(ReadTest read, ReadTest::make(cold_bytes(options.cold_mib), pool));
  huge_pages = huge_page_bytes();
  std::vector<double> reads;
  for (int r = 0; r < options.repeats; ++r) reads.push_back(read.gbps());
  row.read_gbps = rate_of(reads);
  const auto rate = [&](const CpuDot& dot) {
    return dot.run == nullptr ? Rate() : measure_dots(dot, options.repeats, pool);
  };
  for (const CpuPeakOps* ops : all_ops())
    row.dots.push_back({ops, {rate(ops->f32), rate(ops->bf16), rate(ops->int8)}});
  return row;
}

nlohmann::ordered_json to_json(const PeakOptions& options, const std::vector<PeakRow>& rows,
                               int64_t huge_pages) {
  using Json = nlohmann::ordered_json;
  Json list = Json::array();
  for (const PeakRow& row : rows) {
    Json dots = Json::array();
    for (const auto& [ops, rates] : row.dots) {
      Json entry = {{"isa", ops->name}};
      const auto add = [&](const std::string& type, const CpuDot& dot, const Rate& rate) {
        if (dot.run == nullptr) return;
        entry[type + "_instruction"] = dot.name;
        entry[type + "_gflops"] = rate.best;
        entry[type + "_gflops_median"] = rate.median;
      };
      add("f32", ops->f32, rates.f32);
      add("bf16", ops->bf16, rates.bf16);
      add("int8", ops->int8, rates.int8);
      dots.push_back(std::move(entry));
    }
    list.push_back({{"threads", row.threads},
                    {"read_gbps", row.read_gbps.best},
                    {"read_gbps_median", row.read_gbps.median},
                    {"dots", std::move(dots)}});
  }
  return {{"machine", describe_cpu(rows.back().threads)},
          {"isa", isa_name(best_isa())},
          {"repeats", options.repeats},
          {"read_bytes", cold_bytes(options.cold_mib)},
          {"huge_page_bytes", huge_pages},
          {"rows", std::move(list)}};
}

void print_row(const std::string& what, const PeakRow& row, const Rate& rate) {
  fmt::print("| {} | {} | {:.1f} | {:.1f} |\n", what, row.threads, rate.best, rate.median);
}

void print(const PeakOptions& options, const std::vector<PeakRow>& rows, int64_t huge_pages) {
  const int64_t read_mib = cold_bytes(options.cold_mib) / kMiB;
  fmt::print("machine: {}\n{} repeats; {} MiB are read; {} of this process's memory is in huge pages\n\n",
             describe_cpu(rows.back().threads), options.repeats, read_mib,
             huge_pages < 0 ? "an unknown amount" : fmt::format("{} MiB", huge_pages / kMiB));
  fmt::print("| limit | threads | best | median |\n| --- | ---: | ---: | ---: |\n");
  for (const PeakRow& row : rows) print_row("memory read, GB/s", row, row.read_gbps);
  for (size_t i = 0; i < rows.front().dots.size(); ++i) {
    const CpuPeakOps& ops = *rows.front().dots[i].first;
    const auto print_dots = [&](const char* type, const CpuDot& dot, Rate DotRates::*rate) {
      if (dot.run == nullptr) return;
      for (const PeakRow& row : rows)
        print_row(fmt::format("{} ({}), GFLOP/s", type, dot.name), row, row.dots[i].second.*rate);
    };
    print_dots("f32", ops.f32, &DotRates::f32);
    print_dots("bf16", ops.bf16, &DotRates::bf16);
    print_dots("int8", ops.int8, &DotRates::int8);
  }
}

}  // namespace

std::string describe_cpu(int num_threads) {
  const int64_t cache = last_level_cache_bytes();
  return fmt::format("{}, {}, widest dots {}, {} of {} cores, last-level cache {}", cpu_model_name(),
                     isa_name(best_isa()), widest_ops().name, num_threads, available_cores(),
                     cache == 0 ? "unknown" : fmt::format("{} MiB", cache / kMiB));
}

int64_t cold_bytes(int64_t mib) {
  if (mib > 0) return mib * kMiB;
  return std::max(4 * last_level_cache_bytes(), kUnknownCacheColdBytes);
}

Status refuse_cpu_flags(int threads, int64_t cold_mib) {
  if (threads > 0)
    return unsupported(fmt::format("--threads {} is supported only with --device cpu", threads));
  if (cold_mib > 0)
    return unsupported(fmt::format("--cold-mib {} is supported only with --device cpu", cold_mib));
  return {};
}

Result<ReadTest> ReadTest::make(int64_t num_bytes, ThreadPool& pool) {
  const int64_t available = available_memory_bytes();
  const auto refusal = [&] {
    return does_not_fit(fmt::format(
        "the read test needs {} MiB, but only {} MiB are available; reduce the size with --cold-mib",
        num_bytes / kMiB, available / kMiB));
  };
  if (num_bytes > available) return refusal();
  auto buffer = Buffer::make(num_bytes);
  if (!buffer.ok()) return refusal();
  ReadTest test;
  test.pool_ = &pool;
  test.buffer_ = std::move(buffer).value();
  run_ranges(pool, num_bytes, kReadChunk, [&](int64_t first, int64_t last) {
    std::memset(test.buffer_.data() + first, 1, static_cast<size_t>(last - first));
  });
  return test;
}

double ReadTest::gbps() {
  const int64_t quarter = buffer_.num_bytes() / 4 / kReadChunk * kReadChunk;
  const uint8_t* const data = buffer_.data() + next_ * quarter;
  next_ = (next_ + 1) % 4;
  const double seconds = seconds_of([&] {
    run_ranges(*pool_, quarter, kReadChunk,
               [&](int64_t first, int64_t last) { cpu_read(best_isa(), data + first, last - first); });
  });
  return static_cast<double>(quarter) / seconds * 1e-9;
}

const CpuPeakOps& widest_ops() { return *all_ops().front(); }

Rate measure_dots(const CpuDot& dot, int repeats, ThreadPool& pool) {
  // Ten short windows (about 1 ms) per repeat, so that some are undisturbed even on a busy machine.
  constexpr double kChunkSeconds = 2e-4;
  constexpr int64_t kChunksPerThread = 4;  // a slow core takes fewer chunks
  constexpr int kWindows = 10;
  int64_t rounds = 256;
  while (seconds_of([&] { dot.run(rounds); }) < kChunkSeconds) rounds *= 2;
  const int64_t chunks = kChunksPerThread * pool.num_threads();
  std::vector<double> gflops;
  for (int r = 0; r < repeats * kWindows; ++r) {
    const double seconds = seconds_of([&] { pool.run(chunks, [&](int64_t, int) { dot.run(rounds); }); });
    gflops.push_back(static_cast<double>(chunks * rounds * dot.flops) / seconds * 1e-9);
  }
  return rate_of(gflops);
}

Status bench_cpu_peak(const PeakOptions& options) {
  const int all = options.threads > 0 ? options.threads : available_cores();
  std::vector<PeakRow> rows;
  int64_t huge_pages = 0;
  for (const int threads : {1, all}) {
    if (!rows.empty() && threads == 1) continue;
    FP4MOE_ASSIGN_OR_RETURN(PeakRow row, measure_row(options, threads, huge_pages));
    rows.push_back(std::move(row));
  }
  if (options.json) {
    fmt::print("{}\n", to_json(options, rows, huge_pages).dump(1));
  } else {
    print(options, rows, huge_pages);
  }
  return {};
}

}  // namespace fp4moe
