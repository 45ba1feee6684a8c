// fp4moe bench peak: measures the achievable limits of this machine's GPU with the access patterns of the
// kernels. bench_cpu.cc implements --device cpu.
#include "bench/bench_peak.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/buffer.h"
#include "base/check.h"
#include "bench/bench_cpu.h"
#include "bench/bench_device.h"
#include "device/cuda_probe.h"
#include "device/device_memory.h"
#include "device/pinned_memory.h"
#include "flag_checks.h"
#include "kernels/device_peak.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20, kGibibyte = int64_t{1} << 30;
constexpr int64_t kReadBytes = 8 * kGibibyte, kMatmulSize = 8192, kCopyBytes = 256 * kMebibyte;
constexpr int64_t kShortReads[] = {1, 2, 4, 8, 16, 25, 50, 100, 200, 400, 800};  // MiB

struct Measurement {
  Stream& stream;
  const DevicePeakOps& ops;
  int repeats;
  PeakFigures& figures;
};

double gbps(int64_t num_bytes, double us) { return static_cast<double>(num_bytes) / us * 1e-3; }

// Long reads alternate between the halves of a 16 GiB buffer; short reads are spread over the whole buffer.
Status measure_reads(const Measurement& m) {
  const auto buffer = Buffer::make(2 * kReadBytes, device_memory());
  if (!buffer.ok()) return buffer.status();
  m.ops.fill_random(buffer->as<uint64_t>(), 2 * kReadBytes / 8, 1);
  const auto whole = time_graph(
      m.stream,
      [&] {
        m.ops.read(buffer->data(), kReadBytes);
        m.ops.read(buffer->data() + kReadBytes, kReadBytes);
        return Status();
      },
      std::max(m.repeats / 2, 5));
  if (!whole.ok()) return whole.status();
  m.figures.hbm_gbps = gbps(2 * kReadBytes, whole->median);
  for (const int64_t mib : kShortReads) {
    const int64_t num_bytes = mib * kMebibyte;
    const int64_t calls = std::clamp<int64_t>(2 * kGibibyte / num_bytes, 2, 64);
    const int64_t apart = 2 * kReadBytes / calls / kMebibyte * kMebibyte;
    const auto time = time_graph(
        m.stream,
        [&] {
          for (int64_t i = 0; i < calls; ++i) m.ops.read(buffer->data() + i * apart, num_bytes);
          return Status();
        },
        m.repeats);
    if (!time.ok()) return time.status();
    m.figures.short_reads.push_back({num_bytes, time->median / static_cast<double>(calls)});
  }
  return {};
}

Status measure_matmul(const Measurement& m) {
  constexpr int kCalls = 4;
  constexpr int64_t kElems = kMatmulSize * kMatmulSize, kMatrix = kElems * 2;
  const auto buffer = Buffer::make(3 * kMatrix + kPeakMatmulWorkspace, device_memory());
  if (!buffer.ok()) return buffer.status();
  bf16* const a = buffer->as<bf16>();
  m.ops.fill_normal(a, 2 * kElems, 2);
  const auto call = [&] {
    return m.ops.matmul(a, a + kElems, a + 2 * kElems, kMatmulSize, buffer->data() + 3 * kMatrix);
  };
  if (Status status = call(); !status.ok()) return status;
  const auto time = time_graph(
      m.stream,
      [&] {
        Status status;
        for (int i = 0; i < kCalls && status.ok(); ++i) status = call();
        return status;
      },
      2 * m.repeats);
  if (!time.ok()) return time.status();
  const double flops = 2.0 * kCalls * static_cast<double>(kMatmulSize) * static_cast<double>(kElems);
  m.figures.bf16_tflops = flops / time->median * 1e-6;
  return {};
}

Status measure_empty(const Measurement& m) {
  constexpr int kCalls = 200;
  const auto time = time_graph(
      m.stream,
      [&] {
        for (int i = 0; i < kCalls; ++i) m.ops.empty();
        return Status();
      },
      m.repeats);
  if (!time.ok()) return time.status();
  m.figures.empty_us = time->median / kCalls;
  return {};
}

Status measure_links(const Measurement& m) {
  const auto host = Buffer::make(kCopyBytes, pinned_memory());
  if (!host.ok()) return host.status();
  const auto device = Buffer::make(kCopyBytes, device_memory());
  if (!device.ok()) return device.status();
  const int repeats = std::max(m.repeats / 3, 3);
  const auto time = [&](uint8_t* to, const uint8_t* from) {
    return time_graph(
        m.stream,
        [&] {
          copy_async(to, from, kCopyBytes);
          return Status();
        },
        repeats);
  };
  const auto up = time(device->data(), host->data());
  if (!up.ok()) return up.status();
  const auto down = time(host->data(), device->data());
  if (!down.ok()) return down.status();
  m.figures.h2d_gbps = gbps(kCopyBytes, up->median);
  m.figures.d2h_gbps = gbps(kCopyBytes, down->median);
  return {};
}

nlohmann::ordered_json to_json(const PeakFigures& figures) {
  nlohmann::ordered_json reads = nlohmann::ordered_json::array();
  for (const ShortRead& read : figures.short_reads)
    reads.push_back({{"bytes", read.num_bytes}, {"us", read.us}, {"gbps", gbps(read.num_bytes, read.us)}});
  return {{"machine", describe_cuda(kBenchGpu)}, {"hbm_gbps", figures.hbm_gbps},
          {"bf16_tflops", figures.bf16_tflops},  {"empty_kernel_us", figures.empty_us},
          {"h2d_gbps", figures.h2d_gbps},        {"d2h_gbps", figures.d2h_gbps},
          {"short_reads", std::move(reads)}};
}

void print(const PeakFigures& figures) {
  fmt::print("machine: {}\n\n| limit | result |\n| --- | ---: |\n", describe_cuda(kBenchGpu));
  fmt::print("| HBM read, 8 GiB per call over 16 GiB | {:.0f} GB/s |\n", figures.hbm_gbps);
  fmt::print("| bf16 8192^3 matmul (cuBLASLt) | {:.0f} TFLOP/s |\n", figures.bf16_tflops);
  fmt::print("| empty kernel in a graph | {:.2f} us |\n", figures.empty_us);
  fmt::print("| host to device, page-locked | {:.1f} GB/s |\n", figures.h2d_gbps);
  fmt::print("| device to host, page-locked | {:.1f} GB/s |\n", figures.d2h_gbps);
  fmt::print("\n| short cold read, MiB | us | GB/s |\n| ---: | ---: | ---: |\n");
  for (const ShortRead& read : figures.short_reads)
    fmt::print("| {} | {:.1f} | {:.0f} |\n", read.num_bytes / kMebibyte, read.us,
               gbps(read.num_bytes, read.us));
}

Status bench_gpu_peak(const PeakOptions& options) {
  FP4MOE_RETURN_IF_ERROR(refuse_cpu_flags(options.threads, options.cold_mib));
  FP4MOE_ASSIGN_OR_RETURN(auto* const gpu, bench_gpu());
  const DeviceScope on_gpu(*gpu);
  FP4MOE_ASSIGN_OR_RETURN(Stream stream, Stream::make());
  FP4MOE_ASSIGN_OR_RETURN(const PeakFigures figures, measure_peak(stream, options.repeats, true));
  if (options.json) {
    fmt::print("{}\n", to_json(figures).dump(1));
  } else {
    print(figures);
  }
  return {};
}

}  // namespace

Result<PeakFigures> measure_peak(Stream& stream, int repeats, bool all) {
  const DevicePeakOps* ops = sm90_peak_ops();
  if (ops == nullptr) return unsupported("built without CUDA");
  StreamScope scope(stream);
  PeakFigures figures;
  const Measurement m{stream, *ops, repeats, figures};
  if (Status status = measure_reads(m); !status.ok()) return status.with_context("memory reads");
  if (Status status = measure_matmul(m); !status.ok()) return status.with_context("bf16 matmul");
  if (Status status = measure_empty(m); !status.ok()) return status.with_context("empty kernel");
  if (!all) return figures;
  if (Status status = measure_links(m); !status.ok()) return status.with_context("copies");
  return figures;
}

double short_read_us(const PeakFigures& peak, double num_bytes) {
  const std::vector<ShortRead>& reads = peak.short_reads;
  const auto bytes_of = [](const ShortRead& read) { return static_cast<double>(read.num_bytes); };
  ShortRead before{0, peak.empty_us};
  for (const ShortRead& read : reads) {
    if (num_bytes <= bytes_of(read)) {
      const double part = (num_bytes - bytes_of(before)) / (bytes_of(read) - bytes_of(before));
      return before.us + part * (read.us - before.us);
    }
    before = read;
  }
  return before.us + (num_bytes - bytes_of(before)) / peak.hbm_gbps * 1e-3;
}

void add_bench_peak(CLI::App& bench, int& exit_code) {
  CLI::App* subcommand = bench.add_subcommand(
      "peak",
      "Measure the limits of the GPU (memory reads, bf16 matmul, empty kernel, copies) or of the CPU (memory "
      "reads, dot products)");
  struct Options {
    std::string device = "cuda";
    PeakOptions flags;
  };
  auto options = std::make_shared<Options>();
  subcommand->add_option("--device", options->device, "cuda or cpu")
      ->check(CLI::IsMember({"cuda", "cpu"}))
      ->capture_default_str();
  subcommand
      ->add_option("-t,--threads", options->flags.threads,
                   "cpu: threads, measured in addition to a single thread; 0: all cores")
      ->check(in_range(0, 4096))
      ->capture_default_str();
  subcommand->add_option("--cold-mib", options->flags.cold_mib, kColdMibHelp)->check(in_range(1, 1 << 24));
  subcommand->add_option("-r,--repeats", options->flags.repeats, "repeats; on a GPU, replays of each graph")
      ->check(in_range(5, 1000))
      ->capture_default_str();
  subcommand->add_flag("--json", options->flags.json, "print JSON");
  subcommand->callback([options, &exit_code] {
    const Status status =
        options->device == "cpu" ? bench_cpu_peak(options->flags) : bench_gpu_peak(options->flags);
    exit_code = status.ok() ? kExitOk : report_error(status);
  });
}

}  // namespace fp4moe
