// fp4moe bench comm: measures sums, gathers and row exchanges between the GPUs of one host, compared with
// NCCL.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/check.h"
#include "bench/comm_bench_layer.h"
#include "bench/comm_bench_ranks.h"
#include "device/cuda_probe.h"
#include "device/device.h"
#include "device/device_info.h"
#include "device/device_memory.h"
#include "flag_checks.h"
#include "moe/device/device_exchange.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

using json = nlohmann::ordered_json;

using Row = CommBenchRow;

A2aRowFormat format_of(const std::string& name) {
  return name == "fp8" ? A2aRowFormat::kFp8 : name == "bf16" ? A2aRowFormat::kBf16 : A2aRowFormat::kNvfp4;
}

// Measures an NCCL collective in the same way, after a first call that connects the ranks. Returns 0 without
// NCCL.
Result<double> time_nccl(const CommBenchRanks& all, int repeats,
                         const std::function<Status(int, CommBenchRank&)>& call) {
  if (all.nccl == nullptr) return 0.0;
  FP4MOE_RETURN_IF_ERROR(all.nccl->begin());
  FP4MOE_RETURN_IF_ERROR(all.for_each(call));
  FP4MOE_RETURN_IF_ERROR(all.nccl->end());
  FP4MOE_RETURN_IF_ERROR(all.synchronize());
  FP4MOE_ASSIGN_OR_RETURN(const CommTimes times, time_comm_calls(all, repeats, call));
  return times.p50;
}

// Bytes of a partial's element as it is sent, and the row's name for it.
double partial_bytes(const CommBenchOptions& o) { return o.reduce_dtype == "bfloat16" ? 2 : 4; }
std::string partial_name(const CommBenchOptions& o) { return o.reduce_dtype == "bfloat16" ? "bf16" : "f32"; }

Result<Row> bench_all_reduce(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens) {
  const int64_t n = tokens * o.hidden_size;
  Row row{.op = "all-reduce " + partial_name(o), .tokens = tokens};
  FP4MOE_ASSIGN_OR_RETURN(
      const CommTimes times, time_comm_calls(all, o.repeats, [&](int, CommBenchRank& rank) {
        rank.group->add_all_reduced({"all_reduce"}, rank.sum.as<float>(), rank.out.as<float>(), n);
        return Status();
      }));
  FP4MOE_ASSIGN_OR_RETURN(row.nccl, time_nccl(all, o.repeats, [&](int r, CommBenchRank& rank) {
                            return all.nccl->all_reduce(r, rank.sum.as<float>(), n, rank.stream.handle());
                          }));
  const double ranks = all.size(), elements = static_cast<double>(n), bytes = elements * partial_bytes(o);
  row.p50 = times.p50, row.p99 = times.p99;
  row.bytes = static_cast<int64_t>(bytes) >= two_shot_bytes(all.size())
                  ? (bytes + 4 * elements) * (ranks - 1) / ranks
                  : bytes * (ranks - 1);
  return row;
}

// The sum and the norm of its rows in one launch.
Result<Row> bench_all_reduce_norm(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens) {
  Row row{.op = "all-reduce + norm " + partial_name(o), .tokens = tokens};
  FP4MOE_ASSIGN_OR_RETURN(
      const CommTimes times, time_comm_calls(all, o.repeats, [&](int, CommBenchRank& rank) {
        const RmsNormArgs norm{.x = rank.out.as<float>(),
                               .weight = rank.norm_weight.as<float>(),
                               .eps = 1e-5f,
                               .out_act = {rank.y.data(), DType::kBF16, tokens, o.hidden_size}};
        rank.group->add_all_reduced_norm({"all_reduce"}, rank.sum.as<float>(), rank.out.as<float>(), norm);
        return Status();
      }));
  row.p50 = times.p50, row.p99 = times.p99;
  row.bytes = static_cast<double>(tokens * o.hidden_size * (all.size() - 1)) * partial_bytes(o);
  return row;
}

// The same with a share of the rows on each rank.
Result<Row> bench_norm_shares(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens) {
  Row row{.op = "norm of shares " + partial_name(o), .tokens = tokens};
  const std::vector<int64_t> first = all.ranks[0]->group->row_shares(tokens);
  FP4MOE_ASSIGN_OR_RETURN(
      const CommTimes times, time_comm_calls(all, o.repeats, [&](int, CommBenchRank& rank) {
        const RmsNormArgs norm{.x = rank.out.as<float>(),
                               .weight = rank.norm_weight.as<float>(),
                               .eps = 1e-5f,
                               .out_act = {rank.group->normed_rows(), DType::kBF16, tokens, o.hidden_size}};
        rank.group->sum_norm_shares({"norm_shares"}, rank.sum.as<float>(), rank.out.as<float>(), norm, first);
        return Status();
      }));
  const int64_t sent = first.back() - first[1];
  row.p50 = times.p50, row.p99 = times.p99;
  row.bytes = static_cast<double>(sent * o.hidden_size) * (partial_bytes(o) + 2);
  return row;
}

Result<Row> bench_all_gather(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens) {
  std::vector<int64_t> first;
  for (int r = 0; r <= all.size(); ++r) first.push_back(r * o.hidden_size * 4);
  Row row{.op = "all-gather f32", .tokens = tokens};
  FP4MOE_ASSIGN_OR_RETURN(
      const CommTimes times, time_comm_calls(all, o.repeats, [&](int, CommBenchRank& rank) {
        rank.group->gather_columns({"gather"}, rank.sum.data(), tokens, first, rank.gathered.data());
        return Status();
      }));
  const int64_t bytes = tokens * o.hidden_size * 4;
  FP4MOE_ASSIGN_OR_RETURN(row.nccl, time_nccl(all, o.repeats, [&](int r, CommBenchRank& rank) {
                            return all.nccl->all_gather(r, rank.sum.data(), bytes, rank.gathered.data(),
                                                        rank.stream.handle());
                          }));
  row.p50 = times.p50, row.p99 = times.p99;
  row.bytes = static_cast<double>(bytes * (all.size() - 1));
  return row;
}

// Numbers of rows and slots that a rank sends to other ranks, on average.
struct Remote {
  double rows = 0, slots = 0;
};
Result<Remote> remote_of(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens) {
  Remote remote;
  const Status status = all.for_each([&](int r, CommBenchRank& rank) -> Status {
    std::vector<int32_t> ids(static_cast<size_t>(tokens * o.top_k));
    FP4MOE_RETURN_IF_ERROR(device_memory().download(ids.data(), rank.ids.data(), std::ssize(ids) * 4));
    for (int64_t t = 0; t < tokens; ++t) {
      uint32_t ranks = 0;
      for (int64_t k = 0; k < o.top_k; ++k) {
        const auto to =
            static_cast<int>(ids[static_cast<size_t>(t * o.top_k + k)] / (o.num_experts / all.size()));
        if (to == r) continue;
        remote.slots += 1.0 / all.size();
        ranks |= 1u << to;
      }
      remote.rows += static_cast<double>(std::popcount(ranks)) / all.size();
    }
    return {};
  });
  FP4MOE_RETURN_IF_ERROR(status);
  return remote;
}

// What combine finds: the experts' rows, whose sums flashinfer's combine makes first; these sums; or, with
// deepep, rows that the experts' kernel has returned, so that only the flags and the sums are left.
enum class Results : uint8_t { kRows, kSums, kReturned };

// The exchange of one step between all ranks: one round per rank.
class Exchange {
 public:
  Exchange(const CommBenchRanks& all, const CommBenchOptions& o, const std::string& rows, int64_t tokens)
      : all_(all), tokens_(tokens), scales_rows_(rows == "nvfp4-row") {
    size_.shape = shape_of(o, all.size(), format_of(rows));
    size_.max_tokens = tokens;
    size_.area = a2a_area(size_.shape, all.size(), tokens);
    for (const auto& rank : all.ranks) exchanges_.emplace_back(size_, *rank->group);
  }

  A2aRound dispatch(int r, CommBenchRank& rank) const {
    const DeviceExchange& exchange = exchanges_[static_cast<size_t>(r)];
    const ExchangeTokens tokens{.num_lane_tokens = tokens_,
                                .num_own = tokens_,
                                .x = rank.x.as<bf16>(),
                                .ids = rank.ids.as<int32_t>(),
                                .weights = rank.weights.as<float>(),
                                .nvfp4_scale = scales_rows_ ? nullptr : rank.nvfp4_scale.as<float>()};
    const A2aRound round = exchange.round_of(tokens, 0);
    exchange.send(round, tokens);
    rank.scratch.reset();
    exchange.wait(round, false, rank.scratch);
    return round;
  }
  // Sends the tokens of every rank, outside the measured time.
  Status prepare_combine() {
    rounds_.clear();
    return all_.for_each([&](int r, CommBenchRank& rank) -> Status {
      rounds_.push_back(dispatch(r, rank));
      return {};
    });
  }
  // Assigns rows in the order of the slots; any other order costs the same.
  Status prepare_rows() {
    FP4MOE_RETURN_IF_ERROR(all_.synchronize());
    return all_.for_each([&](int r, CommBenchRank& rank) -> Status {
      const A2aRound& round = rounds_[static_cast<size_t>(r)];
      std::vector<int32_t> ids(static_cast<size_t>(all_.size() * tokens_ * size_.shape.top_k));
      const uint8_t* const lanes =
          round.group.regions[round.group.rank] + round.group.layout.exchange + size_.area.ids;
      FP4MOE_RETURN_IF_ERROR(device_memory().download(ids.data(), lanes, std::ssize(ids) * 4));
      int32_t rows = 0;
      for (int32_t& id : ids)
        id = id >= 0 && id / static_cast<int32_t>(size_.shape.experts_per_rank) == r ? rows++ : -1;
      return device_memory().upload(rank.row_of_slot.data(), ids.data(), std::ssize(ids) * 4);
    });
  }
  void combine(int r, CommBenchRank& rank, Results results) const {
    A2aResults given{.y_bf16 = rank.y.as<bf16>(), .row_of_slot = rank.row_of_slot.as<int32_t>()};
    if (results == Results::kSums) given = {.sums = rank.y.as<float>()};
    if (results == Results::kReturned) given = {.are_returned = true};
    exchanges_[static_cast<size_t>(r)].combine(rounds_[static_cast<size_t>(r)], given, rank.out.as<float>());
  }
  const A2aShape& shape() const { return size_.shape; }

 private:
  const CommBenchRanks& all_;
  int64_t tokens_;
  bool scales_rows_;  // each NVFP4 row has its own tensor scale, instead of the layer's
  DeviceExchangeSize size_;
  std::vector<DeviceExchange> exchanges_;
  std::vector<A2aRound> rounds_;
};

Result<Row> bench_dispatch(const CommBenchRanks& all, const CommBenchOptions& o, const std::string& rows,
                           int64_t tokens) {
  const Exchange exchange(all, o, rows, tokens);
  Row row{.op = "dispatch " + rows, .tokens = tokens};
  FP4MOE_ASSIGN_OR_RETURN(const CommTimes times,
                          time_comm_calls(all, o.repeats, [&](int r, CommBenchRank& rank) {
                            exchange.dispatch(r, rank);
                            return Status();
                          }));
  FP4MOE_ASSIGN_OR_RETURN(const Remote remote, remote_of(all, o, tokens));
  row.p50 = times.p50, row.p99 = times.p99;
  row.bytes = remote.rows * static_cast<double>(exchange.shape().row_bytes()) +
              static_cast<double>(8 * o.top_k * tokens * (all.size() - 1));
  return row;
}

Result<Row> bench_combine(const CommBenchRanks& all, const CommBenchOptions& o, int64_t tokens,
                          Results results) {
  const char* const how = results == Results::kSums       ? ", sums ready"
                          : results == Results::kReturned ? ", rows returned"
                                                          : "";
  Exchange exchange(all, o, "bf16", tokens);
  FP4MOE_RETURN_IF_ERROR(exchange.prepare_combine());
  FP4MOE_RETURN_IF_ERROR(exchange.prepare_rows());
  Row row{.op = "combine " + o.a2a + how, .tokens = tokens};
  FP4MOE_ASSIGN_OR_RETURN(const CommTimes times,
                          time_comm_calls(all, o.repeats, [&](int r, CommBenchRank& rank) {
                            exchange.combine(r, rank, results);
                            return Status();
                          }));
  FP4MOE_ASSIGN_OR_RETURN(const Remote remote, remote_of(all, o, tokens));
  row.p50 = times.p50, row.p99 = times.p99;
  if (results != Results::kReturned)
    row.bytes = (o.a2a == "deepep" ? remote.slots : remote.rows) * static_cast<double>(o.hidden_size) * 2;
  return row;
}

Status measure(const CommBenchRanks& all, const CommBenchOptions& o, std::vector<Row>& rows) {
  const auto wants = [&](const char* op) { return std::find(o.ops.begin(), o.ops.end(), op) != o.ops.end(); };
  Status status;
  const auto keep = [&](Result<Row> row) {
    if (row.ok())
      rows.push_back(std::move(row).value());
    else if (status.ok())
      status = row.status();
  };
  for (const int64_t tokens : o.tokens) {
    if (wants("all-reduce")) {
      keep(bench_all_reduce(all, o, tokens));
      if (all.ranks[0]->group->fuses_norm(tokens, o.hidden_size)) keep(bench_all_reduce_norm(all, o, tokens));
      if (all.size() > 1 && o.hidden_size <= kMaxNormedCols) keep(bench_norm_shares(all, o, tokens));
    }
    if (wants("all-gather")) keep(bench_all_gather(all, o, tokens));
    if (wants("dispatch"))
      for (const std::string& format : o.rows) keep(bench_dispatch(all, o, format, tokens));
    if (wants("combine")) keep(bench_combine(all, o, tokens, Results::kRows));
    if (wants("combine"))
      keep(bench_combine(all, o, tokens, o.a2a == "flashinfer" ? Results::kSums : Results::kReturned));
    if (wants("layer") && all.size() * tokens <= kDirectLanes)
      for (const CommLayer kind : {CommLayer::kLocal, CommLayer::kExchanged, CommLayer::kDirect})
        keep(bench_comm_layer(all, o, kind, tokens));
    FP4MOE_RETURN_IF_ERROR(status);
  }
  return {};
}

void print(const CommBenchRanks& all, const CommBenchOptions& o, const std::vector<Row>& rows) {
  fmt::print("machine: {}; {} ranks, {} per GPU\n", describe_cuda(all.gpus[0]), all.size(), ranks_per_gpu());
  fmt::print(
      "H {}, top_k {}, {} experts, {} routing; us per operation on the slowest rank, in a graph of {}; NCCL: "
      "{}\n\n",
      o.hidden_size, o.top_k, o.num_experts, o.routing, kCommCallsInGraph,
      all.nccl != nullptr ? "its kernel for the same bytes" : "not measured: " + all.no_nccl);
  fmt::print(
      "| operation | T | p50 us | p99 us | sent KB | GB/s | NCCL us |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  for (const Row& row : rows)
    fmt::print("| {} | {} | {:.2f} | {:.2f} | {:.0f} | {:.0f} | {} |\n", row.op, row.tokens, row.p50, row.p99,
               row.bytes / 1e3, row.bytes / row.p50 / 1e3,
               row.nccl > 0 ? fmt::format("{:.2f}", row.nccl) : "-");
}

json to_json(const CommBenchRanks& all, const CommBenchOptions& o, const std::vector<Row>& rows) {
  json list = json::array();
  for (const Row& row : rows) {
    json entry = {{"op", row.op},      {"tokens", row.tokens}, {"p50_us", row.p50},
                  {"p99_us", row.p99}, {"bytes", row.bytes},   {"gbps", row.bytes / row.p50 / 1e3}};
    if (row.nccl > 0) entry["nccl_us"] = row.nccl;
    list.push_back(std::move(entry));
  }
  return {{"machine", describe_cuda(all.gpus[0])},
          {"ranks", all.size()},
          {"ranks_per_gpu", ranks_per_gpu()},
          {"hidden_size", o.hidden_size},
          {"top_k", o.top_k},
          {"num_experts", o.num_experts},
          {"routing", o.routing},
          {"rows", std::move(list)}};
}

Status bench_comm(const CommBenchOptions& options) {
  if (cuda_a2a_ops() == nullptr) return unsupported("device=cuda: built without CUDA");
  if (options.hidden_size % 16 != 0)
    return unsupported("--hidden-size " + std::to_string(options.hidden_size) + " must be a multiple of 16");
  if (options.intermediate_size % 32 != 0)
    return unsupported("--intermediate-size " + std::to_string(options.intermediate_size) +
                       " must be a multiple of 32");
  if (options.top_k > options.num_experts)
    return unsupported("--top-k " + std::to_string(options.top_k) + " must be at most --num-experts " +
                       std::to_string(options.num_experts));
  FP4MOE_ASSIGN_OR_RETURN(const CommBenchRanks all, make_comm_bench_ranks(options));
  std::vector<Row> rows;
  FP4MOE_RETURN_IF_ERROR(measure(all, options, rows));
  if (options.as_json)
    fmt::print("{}\n", to_json(all, options, rows).dump(1));
  else
    print(all, options, rows);
  return {};
}

// The sizes of a layer and the experts of its tokens.
void add_layer_options(CLI::App& subcommand, CommBenchOptions& options) {
  subcommand.add_option("--hidden-size", options.hidden_size, "columns per row, a multiple of 16")
      ->check(in_range(16, 1 << 16))
      ->capture_default_str();
  subcommand
      .add_option("--intermediate-size", options.intermediate_size,
                  "of the experts of `layer`, a multiple of 32")
      ->check(in_range(32, 1 << 16))
      ->capture_default_str();
  subcommand.add_option("--top-k", options.top_k, "experts per token")
      ->check(in_range(1, 32))
      ->capture_default_str();
  subcommand
      .add_option("--num-experts", options.num_experts,
                  "number of experts, a multiple of the number of ranks")
      ->check(in_range(1, 1 << 14))
      ->capture_default_str();
  subcommand
      .add_option("--routing", options.routing,
                  "experts of the tokens that dispatch and combine exchange: uniform, or skewed (80 % of the "
                  "slots go to the experts of rank 0)")
      ->check(CLI::IsMember({"uniform", "skewed"}))
      ->capture_default_str();
}

}  // namespace

void add_bench_comm(CLI::App& bench, int& exit_code) {
  CLI::App* subcommand = bench.add_subcommand(
      "comm", "Measure sums, gathers and row exchanges between the GPUs of this host, compared with NCCL");
  auto options = std::make_shared<CommBenchOptions>();
  subcommand->add_option("--ranks,--tp", options->ranks, "number of ranks; 0: one per GPU")
      ->check(in_range(0, kMaxGroupRanks))
      ->capture_default_str();
  subcommand
      ->add_option("--ops", options->ops,
                   "operations, separated by commas: all-reduce, all-gather, dispatch, combine, layer (MXFP4 "
                   "experts of a rank alone, with dispatch and combine, and in a direct round)")
      ->delimiter(',')
      ->check(CLI::IsMember({"all-reduce", "all-gather", "dispatch", "combine", "layer"}))
      ->capture_default_str();
  subcommand->add_option("--tokens", options->tokens, "tokens per rank, separated by commas")
      ->delimiter(',')
      ->check(in_range(1, 8192))
      ->capture_default_str();
  subcommand
      ->add_option("--dispatcher-output-dtype", options->rows,
                   "row formats for dispatch, separated by commas: bf16, fp8, nvfp4 (with the layer's tensor "
                   "scale), nvfp4-row (each row has its own)")
      ->delimiter(',')
      ->check(CLI::IsMember({"bf16", "fp8", "nvfp4", "nvfp4-row"}))
      ->capture_default_str();
  subcommand
      ->add_option("--moe-a2a-backend", options->a2a,
                   "protocol whose combine is measured: deepep or flashinfer")
      ->check(CLI::IsMember({"deepep", "flashinfer"}))
      ->capture_default_str();
  subcommand
      ->add_option("--tp-reduce-dtype", options->reduce_dtype,
                   "format of the sums' operands: float32 or bfloat16")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->capture_default_str();
  add_layer_options(*subcommand, *options);
  subcommand->add_option("-r,--repeats", options->repeats, "replays of each graph")
      ->check(in_range(5, 1000))
      ->capture_default_str();
  subcommand->add_flag("--json", options->as_json, "print JSON");
  subcommand->callback([options, &exit_code] {
    const Status status = bench_comm(*options);
    exit_code = status.ok() ? kExitOk : report_error(status);
  });
}

}  // namespace fp4moe
