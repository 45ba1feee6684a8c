#include "bench/comm_bench_ranks.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "device/device.h"
#include "device/device_memory.h"
#include "device/event.h"
#include "device/graph.h"

namespace fp4moe {

namespace {

// Returns the experts [tokens, K] of random tokens. Skewed: of a token's slots, 80 % go to experts of rank 0.
std::vector<int32_t> draw_ids(const CommBenchOptions& o, int num_ranks, int64_t tokens,
                              std::mt19937_64& random) {
  std::vector<int32_t> experts(static_cast<size_t>(o.num_experts)), ids;
  std::iota(experts.begin(), experts.end(), 0);
  const auto others = experts.begin() + o.num_experts / num_ranks;
  for (int64_t t = 0; t < tokens; ++t) {
    if (o.routing == "uniform") {
      std::shuffle(experts.begin(), experts.end(), random);
      ids.insert(ids.end(), experts.begin(), experts.begin() + o.top_k);
      continue;
    }
    std::shuffle(experts.begin(), others, random);
    std::shuffle(others, experts.end(), random);
    auto first = experts.begin(), other = others;
    for (int64_t k = 0; k < o.top_k; ++k) {
      const bool from_first = other == experts.end() || (first != others && random() % 5 != 0);
      ids.push_back(from_first ? *first++ : *other++);
    }
  }
  return ids;
}

Status allocate(const CommBenchOptions& o, int r, CommBenchRank& rank, int num_ranks, int64_t most) {
  const int64_t h = o.hidden_size, k = o.top_k;
  const auto make = [](Buffer& out, int64_t num_bytes) -> Status {
    FP4MOE_ASSIGN_OR_RETURN(out, Buffer::make(num_bytes, device_memory()));
    cuda_a2a_ops()->clear(out.as<float>(), num_bytes / 4);
    return current_stream().synchronize();
  };
  FP4MOE_RETURN_IF_ERROR(make(rank.x, most * h * 4));
  FP4MOE_RETURN_IF_ERROR(make(rank.sum, most * h * 4));
  FP4MOE_RETURN_IF_ERROR(make(rank.gathered, num_ranks * most * h * 4));
  FP4MOE_RETURN_IF_ERROR(make(rank.out, most * h * 4));
  FP4MOE_RETURN_IF_ERROR(make(rank.norm_weight, h * 4));
  FP4MOE_RETURN_IF_ERROR(make(rank.y, num_ranks * most * k * h * 2));
  std::mt19937_64 random(static_cast<uint64_t>(r) + 1);
  const std::vector<int32_t> ids = draw_ids(o, num_ranks, most, random);
  std::vector<bf16> x(static_cast<size_t>(most * h));
  std::normal_distribution<float> normal;
  for (bf16& v : x) v = float_to_bf16(normal(random));
  FP4MOE_RETURN_IF_ERROR(device_memory().upload(rank.x.data(), x.data(), std::ssize(x) * 2));
  FP4MOE_ASSIGN_OR_RETURN(rank.ids, upload_to_gpu(ids));
  FP4MOE_ASSIGN_OR_RETURN(rank.nvfp4_scale, upload_to_gpu(std::vector<float>{2688.0f / 6}));  // |x| < 6
  FP4MOE_ASSIGN_OR_RETURN(rank.weights, upload_to_gpu(std::vector<float>(ids.size(), 0.125f)));
  FP4MOE_ASSIGN_OR_RETURN(rank.row_of_slot,
                          Buffer::make(num_ranks * most * k * int64_t{sizeof(int32_t)}, device_memory()));
  FP4MOE_ASSIGN_OR_RETURN(rank.scratch, Arena::make(num_ranks * most * (h * 2 + 4) + 512, device_memory()));
  return {};
}

int num_gpus() {
  int count = 0;
  while (count < kMaxGroupRanks && DeviceContext::of(count).ok()) ++count;
  return count;
}

}  // namespace

Result<CommTimes> time_comm_calls(const CommBenchRanks& all, int repeats,
                                  const std::function<Status(int, CommBenchRank&)>& call) {
  constexpr int kWarmupReplays = 3;
  std::vector<Graph> graphs;
  const Status captured = all.for_each([&](int r, CommBenchRank& rank) -> Status {
    auto graph = Graph::capture(rank.stream, [&]() -> Status {
      for (int i = 0; i < kCommCallsInGraph; ++i) FP4MOE_RETURN_IF_ERROR(call(r, rank));
      return {};
    });
    FP4MOE_RETURN_IF_ERROR(graph.status());
    graphs.push_back(std::move(graph).value());
    return {};
  });
  FP4MOE_RETURN_IF_ERROR(captured);
  std::vector<double> times;
  for (int i = -kWarmupReplays; i < repeats; ++i) {
    std::vector<Event> starts(graphs.size()), ends(graphs.size());
    FP4MOE_RETURN_IF_ERROR(all.for_each([&](int r, CommBenchRank& rank) -> Status {
      const auto at = static_cast<size_t>(r);
      FP4MOE_ASSIGN_OR_RETURN(starts[at], Event::make());
      FP4MOE_ASSIGN_OR_RETURN(ends[at], Event::make());
      rank.group->add_all_reduced({"start"}, rank.sum.as<float>(), rank.out.as<float>(), 8);
      starts[at].record(rank.stream);
      graphs[at].launch(rank.stream);
      ends[at].record(rank.stream);
      return {};
    }));
    FP4MOE_RETURN_IF_ERROR(all.synchronize());
    double slowest = 0;
    for (size_t r = 0; r < graphs.size(); ++r) {
      FP4MOE_ASSIGN_OR_RETURN(const double us, ends[r].microseconds_since(starts[r]));
      slowest = std::max(slowest, us / kCommCallsInGraph);
    }
    if (i >= 0) times.push_back(slowest);
  }
  std::sort(times.begin(), times.end());
  return CommTimes{times[times.size() / 2], times[times.size() * 99 / 100]};
}

A2aShape shape_of(const CommBenchOptions& o, int num_ranks, A2aRowFormat format) {
  return {.hidden_size = o.hidden_size,
          .top_k = o.top_k,
          .num_experts = o.num_experts,
          .experts_per_rank = o.num_experts / num_ranks,
          .row_format = format,
          .slots_return = o.a2a == "deepep"};
}

Result<CommBenchRanks> make_comm_bench_ranks(const CommBenchOptions& o) {
  CommBenchRanks all;
  const int on_all = std::clamp(num_gpus() * ranks_per_gpu(), 1, kMaxGroupRanks);
  const int num_ranks = o.ranks > 0 ? o.ranks : on_all;
  if (o.num_experts % num_ranks != 0)
    return unsupported("--num-experts " + std::to_string(o.num_experts) + " must be a multiple of the " +
                       std::to_string(num_ranks) + " ranks");
  for (int r = 0; r < num_ranks; ++r) {
    all.gpus.push_back(gpu_of_rank(r));
    all.ranks.push_back(std::make_unique<CommBenchRank>());
    FP4MOE_ASSIGN_OR_RETURN(all.ranks.back()->gpu, DeviceContext::of(all.gpus.back()));
  }
  const int64_t most = *std::max_element(o.tokens.begin(), o.tokens.end());
  A2aShape shape = shape_of(o, num_ranks, A2aRowFormat::kBf16);
  const int64_t rows = a2a_area(shape, num_ranks, most).num_bytes;
  shape.slots_return = false;
  const int64_t exchange = std::max(rows, a2a_area(shape, num_ranks, kDirectLanes).num_bytes);
  const DeviceRegion region{.offset = 0,
                            .word_bytes = sum_word_bytes(num_ranks),
                            .gather_bytes = int64_t{32} << 20,
                            .normed_bytes = most * o.hidden_size * 2,
                            .exchange_bytes = exchange};
  FP4MOE_ASSIGN_OR_RETURN(all.heap, PeerHeap::make(all.gpus, region.num_bytes(num_ranks)));
  for (int r = 0; r < num_ranks; ++r) {
    CommBenchRank& rank = *all.ranks[static_cast<size_t>(r)];
    const DeviceScope on_gpu(*rank.gpu);
    FP4MOE_ASSIGN_OR_RETURN(rank.stream, Stream::make());
    const StreamScope scope(rank.stream);
    FP4MOE_ASSIGN_OR_RETURN(
        rank.group, DeviceCommunicator::make(*all.heap, 0, num_ranks, r, region, std::chrono::seconds(20)));
    if (o.reduce_dtype == "bfloat16") rank.group->send_bf16_partials();
    FP4MOE_RETURN_IF_ERROR(allocate(o, r, rank, num_ranks, most));
  }
  auto nccl = NcclPeer::make(all.gpus);
  if (nccl.ok())
    all.nccl = std::move(nccl).value();
  else
    all.no_nccl = nccl.status().message();
  FP4MOE_RETURN_IF_ERROR(all.synchronize());
  return all;
}

}  // namespace fp4moe
