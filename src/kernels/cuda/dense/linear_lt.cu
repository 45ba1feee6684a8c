// Dense linear layers with cuBLASLt.
//
// Computes:  out [T, N] f32 (+)= x [T, K] W^T + bias; x and W [N, K] bf16 row-major.
// Shapes:    any. The algorithm is the heuristic's choice for (T, N, K, bias, accumulate), queried once.
//            On a stream with peers, it is the choice for T rounded up to a power of two, so that a rehearsal
//            with few sizes makes the library load all kernels that it will use.
//            kOneForAll: the first choice without split K, for the smallest T among kInvariantTokens, twice
//            that, ... with which the product fills a quarter of the SMs.
// Bytes:     2 N K + T (2 K + 4 N).
// Flops:     2 T N K.
// Bound:     HBM or the tensor cores, whichever takes longer.
// Numerics:  f32 sums; split-K partial sums are f32 and added in a fixed order. kOneForAll: a token's bits
//            are the same for every T (a test verifies this for the cuBLASLt version with which it runs).
#include "kernels/cuda/dense/linear_lt.h"

#include <cuda_runtime.h>

#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/device_context.h"
#include "device/stream.h"
#include "kernels/cuda/dense/cublas_lt.h"

namespace fp4moe {

namespace {

constexpr size_t kMaxAlgorithms = 4096;       // remembered; a new query gives the same result
constexpr size_t kWorkspaceBytes = 32 << 20;  // the size that cuBLAS itself uses on Hopper
constexpr int64_t kInvariantTokens = 64, kMostInvariantTokens = 1024;
constexpr float kEnoughWaves = 0.25f;

// One matrix product as cuBLASLt sees it: column-major, D [N, T] = W^T [N, K] x [K, T].
class Problem {
 public:
  Problem(const CublasLt& lt, const LinearArgs& a, int64_t num_tokens) : lt_(lt) {
    const auto t = static_cast<uint64_t>(num_tokens), n = static_cast<uint64_t>(a.n),
               k = static_cast<uint64_t>(a.x.cols);
    const auto check = [&](cublasStatus_t status) {
      if (status_ == CUBLAS_STATUS_SUCCESS) status_ = status;
    };
    check(lt.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(lt.layout_create(&w, CUDA_R_16BF, k, n, a.x.cols));
    check(lt.layout_create(&x, CUDA_R_16BF, k, t, a.x.cols));
    check(lt.layout_create(&out, CUDA_R_32F, n, t, a.n));
    if (status_ != CUBLAS_STATUS_SUCCESS) return;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(lt.desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    if (a.bias == nullptr) return;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = CUDA_R_32F;
    check(lt.desc_set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    check(lt.desc_set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
    check(lt.desc_set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a.bias, sizeof a.bias));
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    for (cublasLtMatrixLayout_t layout : {w, x, out})
      if (layout != nullptr) lt_.layout_destroy(layout);
    if (desc != nullptr) lt_.desc_destroy(desc);
  }
  cublasStatus_t status() const { return status_; }

  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, out = nullptr;

 private:
  const CublasLt& lt_;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

// cuBLASLt on one GPU.
class LinearLt {
 public:
  static Result<LinearLt*> instance() {
    return current_device().open_library<LinearLt>(DeviceLibrary::kLinear);
  }

  Status open() {
    FP4MOE_ASSIGN_OR_RETURN(lt_, CublasLt::load());
    if (const cublasStatus_t status = lt_.create(&handle_); status != CUBLAS_STATUS_SUCCESS)
      return unsupported("cuBLASLt cannot start: status " + std::to_string(status));
    if (const cudaError_t error = cudaMalloc(&spare_, kWorkspaceBytes); error != cudaSuccess)
      return does_not_fit("cannot allocate cuBLASLt's workspace of " + std::to_string(kWorkspaceBytes) +
                          " bytes: " + cudaGetErrorString(error));
    return {};
  }

  cublasStatus_t run(const LinearArgs& a, LtAlgorithm which, const Stream& stream) {
    const std::lock_guard lock(mutex_);
    const Problem problem(lt_, a, a.x.rows);
    if (problem.status() != CUBLAS_STATUS_SUCCESS) return problem.status();
    void* const workspace = workspace_of(stream.handle());
    if (workspace == nullptr) return CUBLAS_STATUS_ALLOC_FAILED;
    const auto rows = static_cast<uint64_t>(a.x.rows);
    const auto chosen_for = static_cast<int64_t>(stream.has_peers() ? std::bit_ceil(rows) : rows);
    const int64_t tokens = which == LtAlgorithm::kOneForAll ? 0 : chosen_for;
    const Key key = {tokens, a.n, a.x.cols, a.bias != nullptr, a.accumulate};
    auto found = algorithms_.find(key);
    if (found == algorithms_.end()) {
      if (algorithms_.size() == kMaxAlgorithms) algorithms_.clear();
      cublasLtMatmulAlgo_t algorithm{};
      const cublasStatus_t status = which == LtAlgorithm::kOneForAll
                                        ? choose_one_for_all(a, algorithm)
                                        : choose(Problem(lt_, a, tokens), kOrderedSplitK, algorithm);
      if (status != CUBLAS_STATUS_SUCCESS) return status;
      found = algorithms_.emplace(key, algorithm).first;
    }
    const float one = 1, beta = a.accumulate ? 1 : 0;
    return lt_.matmul(handle_, problem.desc, &one, a.weight, problem.w, a.x.data, problem.x, &beta, a.out,
                      problem.out, a.out, problem.out, &found->second, workspace, kWorkspaceBytes,
                      stream.handle());
  }

 private:
  using Key = std::array<int64_t, 5>;
  static constexpr uint32_t kOrderedSplitK = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // f32

  // Returns the stream's workspace, or null without enough memory. Each stream has a separate workspace,
  // because products on several streams may run at once; the first stream gets spare_. Workspaces are never
  // freed.
  void* workspace_of(cudaStream_t stream) {
    if (const auto found = workspaces_.find(stream); found != workspaces_.end()) return found->second;
    void* workspace = std::exchange(spare_, nullptr);
    if (workspace == nullptr && cudaMalloc(&workspace, kWorkspaceBytes) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return workspaces_.emplace(stream, workspace).first->second;
  }

  // Tries several token counts: without split K, the heuristic's choice for few tokens can leave most SMs
  // idle.
  cublasStatus_t choose_one_for_all(const LinearArgs& a, cublasLtMatmulAlgo_t& algorithm) {
    for (int64_t tokens = kInvariantTokens;; tokens *= 2) {
      float waves = 0;
      const cublasStatus_t status =
          choose(Problem(lt_, a, tokens), CUBLASLT_REDUCTION_SCHEME_NONE, algorithm, &waves);
      if (status != CUBLAS_STATUS_SUCCESS || waves >= kEnoughWaves || tokens == kMostInvariantTokens)
        return status;
    }
  }

  // `reductions`: reduction schemes that split K may use; `waves`: waves of blocks on the SMs.
  cublasStatus_t choose(const Problem& problem, uint32_t reductions, cublasLtMatmulAlgo_t& algorithm,
                        float* waves = nullptr) {
    if (problem.status() != CUBLAS_STATUS_SUCCESS) return problem.status();
    cublasLtMatmulPreference_t preference = nullptr;
    if (const cublasStatus_t status = lt_.preference_create(&preference); status != CUBLAS_STATUS_SUCCESS)
      return status;
    const uint64_t workspace_bytes = kWorkspaceBytes;
    lt_.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                       sizeof reductions);
    lt_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                       sizeof workspace_bytes);
    const uint32_t alignment = 16;
    for (const auto operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      lt_.preference_set(preference, operand, &alignment, sizeof alignment);
    cublasLtMatmulHeuristicResult_t best{};
    int num_found = 0;
    const cublasStatus_t status = lt_.get_heuristic(handle_, problem.desc, problem.w, problem.x, problem.out,
                                                    problem.out, preference, 1, &best, &num_found);
    lt_.preference_destroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (num_found == 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    algorithm = best.algo;
    if (waves != nullptr) *waves = best.wavesCount;
    return CUBLAS_STATUS_SUCCESS;
  }

  std::mutex mutex_;
  CublasLt lt_{};
  cublasLtHandle_t handle_ = nullptr;
  std::map<cudaStream_t, void*> workspaces_;
  void* spare_ = nullptr;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
};

}  // namespace

Status prepare_linear_lt() {
  const Result<LinearLt*> lt = LinearLt::instance();
  return lt.ok() ? Status() : lt.status();
}

void linear_lt(const LinearArgs& args, LtAlgorithm which) {
  if (args.x.rows == 0 || args.n == 0) return;
  Stream& stream = current_stream();
  const Result<LinearLt*> lt = LinearLt::instance();
  if (!lt.ok()) return stream.keep(lt.status());
  const cublasStatus_t status = (*lt)->run(args, which, stream);
  if (status != CUBLAS_STATUS_SUCCESS)
    stream.keep(internal_error("cuBLASLt: status " + std::to_string(status) +
                               " for T=" + std::to_string(args.x.rows) + " N=" + std::to_string(args.n) +
                               " K=" + std::to_string(args.x.cols)));
  stream.check_launch("linear_lt");
}

}  // namespace fp4moe
