#include "io/write/make_tiny_tensors.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "formats/bf16.h"
#include "formats/fp8_matrix.h"
#include "io/config/quant_config.h"

namespace fp4moe {
namespace {

constexpr float kWeightLevel = 0.02f;      // the usual initializer_range
constexpr float kNormalisedAmax = 6;       // of a layer's normalised inputs
constexpr int64_t kPieceValues = 1 << 17;  // one 64-bit random number each

// SplitMix64 (Steele, Lea, Flood), evaluated at any position.
uint64_t random_at(uint64_t key, uint64_t position) {
  uint64_t x = key + (position + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Hashes the name with FNV-1a and mixes in the seed.
uint64_t key_of(const std::string& name, uint64_t seed) {
  uint64_t key = 0xCBF29CE484222325u;
  for (const char c : name) key = (key ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return random_at(key, seed);
}

// Returns the sum of four uniform 16-bit numbers, centred and scaled to variance 1.
float about_normal(uint64_t bits) {
  const int64_t sum =
      static_cast<int64_t>((bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48));
  constexpr float kDeviation = 37837.0f;  // 2^16 * sqrt(4 / 12)
  return static_cast<float>(sum - 2 * 65535) / kDeviation;
}

float number(const TinyTensor& tensor, uint64_t bits) {
  switch (tensor.content) {
    case TinyContent::kNearOne:
      return 1 + tensor.level * about_normal(bits);
    case TinyContent::kLevel:
      return tensor.level * (1 + (static_cast<float>(bits >> 40) * 0x1p-24f - 0.5f) / 4);
    default:
      return tensor.level * about_normal(bits);
  }
}

// Returns eight random bytes for a tensor of codes or scales.
uint64_t eight_bytes(TinyContent content, uint64_t bits) {
  if (content == TinyContent::kE8m0)
    return (bits & 0x0303030303030303u) + 0x7777777777777777u;  // 0x77 = 2^-8
  if (content == TinyContent::kE4m3) return (bits & 0x0707070707070707u) + 0x7070707070707070u;  // 0x70 = 128
  if (content == TinyContent::kFp8Codes)
    return (bits & 0x8787878787878787u) | 0x3838383838383838u;  // 0x38 = 1
  return bits;
}

class TensorList {
 public:
  explicit TensorList(const ModelConfig& config) : config_(config) {}

  std::vector<TinyTensor> list() {
    const int64_t hidden = config_.hidden_size;
    // Embeddings have standard deviation 1; the next layer normalises them anyway.
    add("model.embed_tokens.weight", {config_.vocab_size, hidden}, TinyContent::kNormal, 1);
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) add_layer(layer);
    for (int64_t i = 0; i < config_.num_mtp_layers; ++i) add_mtp_layer(config_.num_layers + i);
    prefix_.clear();
    add_norm("model.norm", hidden);
    if (!config_.tie_word_embeddings) add_matrix("lm_head", config_.vocab_size, hidden);
    return std::move(tensors_);
  }

 private:
  void add(const std::string& name, std::vector<int64_t> shape, TinyContent content = TinyContent::kNormal,
           float level = kWeightLevel, DType dtype = DType::kBF16) {
    tensors_.push_back({.spec = {.name = prefix_ + name, .dtype = dtype, .shape = std::move(shape)},
                        .content = content,
                        .level = level});
  }

  void add_layer(int64_t layer) {
    const int64_t hidden = config_.hidden_size;
    prefix_ = "model.layers." + std::to_string(layer) + ".";
    add_norm("input_layernorm", hidden);
    if (layer < config_.num_layers && config_.has_state(layer))
      add_gated_delta();
    else if (config_.mla.kv_lora_rank > 0)
      add_latent_attention();
    else
      add_attention();
    add_norm("post_attention_layernorm", hidden);
    add_mlp(layer);
  }

  void add_norm(const std::string& name, int64_t size) {
    add(name + ".weight", {size}, config_.centered_norms ? TinyContent::kNormal : TinyContent::kNearOne);
  }

  void add_mtp_layer(int64_t layer) {
    const int64_t hidden = config_.hidden_size;
    add_layer(layer);
    for (const char* norm : {"enorm", "hnorm", "shared_head.norm"}) add_norm(norm, hidden);
    add_matrix("eh_proj", hidden, 2 * hidden);
  }

  // Adds a matrix in bf16, or in FP4 or FP8 if the declaration names it.
  void add_matrix(const std::string& name, int64_t rows, int64_t cols) {
    constexpr float kCodeRms = 1.46f;
    const QuantMethod method = config_.quant.method;
    if (is_declared_fp4(config_.quant, prefix_ + name)) return add_fp4(name, rows, cols, kNormalisedAmax);
    if (!is_declared_fp8(config_.quant, prefix_ + name)) return add(name + ".weight", {rows, cols});
    add(name + ".weight", {rows, cols}, TinyContent::kFp8Codes, 1, DType::kF8E4M3);
    const auto blocks = [](int64_t size) { return (size + kFp8WeightBlock - 1) / kFp8WeightBlock; };
    if (method == QuantMethod::kFp8Mxfp4)
      add(name + ".scale", {blocks(rows), blocks(cols)}, TinyContent::kE8m0, 1, DType::kF8E8M0);
    else if (method == QuantMethod::kCompressedNvfp4 || method == QuantMethod::kCompressedMxfp4)
      add(name + ".weight_scale", {rows, 1}, TinyContent::kLevel, kWeightLevel / kCodeRms);
    else
      add(name + ".weight_scale", {}, TinyContent::kLevel, kWeightLevel / kCodeRms, DType::kF32);
  }

  void add_projection(const std::string& name, int64_t rows, int64_t cols, bool bias) {
    add_matrix(name, rows, cols);
    if (bias) add(name + ".bias", {rows});
  }

  void add_attention() {
    const int64_t query = config_.num_heads * config_.head_dim, key = config_.num_kv_heads * config_.head_dim;
    const int64_t query_rows = (config_.attention_gate ? 2 : 1) * query;
    add_projection("self_attn.q_proj", query_rows, config_.hidden_size, config_.attention_bias);
    add_projection("self_attn.k_proj", key, config_.hidden_size, config_.attention_bias);
    add_projection("self_attn.v_proj", key, config_.hidden_size, config_.attention_bias);
    add_projection("self_attn.o_proj", config_.hidden_size, query, config_.attention_out_bias);
    if (config_.family == ModelFamily::kGptOss)
      add("self_attn.sinks", {config_.num_heads}, TinyContent::kNormal, 0.5f);
    if (config_.qk_norm) {
      add_norm("self_attn.q_norm", config_.head_dim);
      add_norm("self_attn.k_norm", config_.head_dim);
    }
  }

  void add_latent_attention() {
    const MlaConfig& mla = config_.mla;
    const int64_t hidden = config_.hidden_size, heads = config_.num_heads, query = heads * config_.head_dim;
    if (mla.q_lora_rank == 0) {
      add_matrix("self_attn.q_proj", query, hidden);
    } else {
      add_projection("self_attn.q_a_proj", mla.q_lora_rank, hidden, config_.attention_bias);
      add("self_attn.q_a_layernorm.weight", {mla.q_lora_rank}, TinyContent::kNearOne);
      add_matrix("self_attn.q_b_proj", query, mla.q_lora_rank);
    }
    add_projection("self_attn.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden,
                   config_.attention_bias);
    add("self_attn.kv_a_layernorm.weight", {mla.kv_lora_rank}, TinyContent::kNearOne);
    add_matrix("self_attn.kv_b_proj", heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank);
    add_projection("self_attn.o_proj", hidden, heads * mla.v_head_dim, config_.attention_out_bias);
  }

  void add_gated_delta() {
    const DeltaConfig& delta = config_.delta;
    const int64_t hidden = config_.hidden_size, heads = delta.num_value_heads,
                  values = heads * delta.value_head_dim, channels = delta.conv_channels();
    if (delta.has_grouped_inputs) {
      add_matrix("linear_attn.in_proj_qkvz", channels + values, hidden);
      add_matrix("linear_attn.in_proj_ba", 2 * heads, hidden);
    } else {
      add_matrix("linear_attn.in_proj_qkv", channels, hidden);
      add_matrix("linear_attn.in_proj_z", values, hidden);
      add_matrix("linear_attn.in_proj_b", heads, hidden);
      add_matrix("linear_attn.in_proj_a", heads, hidden);
    }
    add("linear_attn.conv1d.weight", {channels, 1, delta.conv_width}, TinyContent::kNormal, 0.5f);
    add("linear_attn.A_log", {heads}, TinyContent::kNormal, 1);
    add("linear_attn.dt_bias", {heads}, TinyContent::kNearOne, 0.5f);
    add("linear_attn.norm.weight", {delta.value_head_dim}, TinyContent::kNearOne);
    add_matrix("linear_attn.out_proj", hidden, values);
  }

  void add_mlp(int64_t layer) {
    const int64_t hidden = config_.hidden_size, experts = config_.num_experts;
    if (config_.family == ModelFamily::kGptOss) {
      add("mlp.router.weight", {experts, hidden});
      add("mlp.router.bias", {experts});
      add_gpt_oss("mlp.experts.gate_up_proj", 2 * config_.intermediate_size, hidden);
      add_gpt_oss("mlp.experts.down_proj", hidden, config_.intermediate_size);
      return;
    }
    if (layer < config_.num_layers && !config_.layer_has_experts[static_cast<size_t>(layer)])
      return add_mlp_projections("mlp", config_.dense_intermediate_size);
    add("mlp.gate.weight", {experts, hidden});
    if (config_.router.has_correction_bias)
      add("mlp.gate.e_score_correction_bias", {experts}, TinyContent::kNormal, kWeightLevel, DType::kF32);
    for (int64_t e = 0; e < experts; ++e)
      add_mlp_projections("mlp.experts." + std::to_string(e), config_.intermediate_size);
    if (config_.num_shared_experts == 0) return;
    add_mlp_projections(config_.shared_expert_gate ? "mlp.shared_expert" : "mlp.shared_experts",
                        config_.shared_intermediate_size);
    if (config_.shared_expert_gate) add("mlp.shared_expert_gate.weight", {1, hidden});
  }

  // Adds one projection of all experts.
  void add_gpt_oss(const std::string& name, int64_t rows, int64_t cols) {
    const int64_t experts = config_.num_experts;
    add(name + "_bias", {experts, rows});
    if (config_.quant.method == QuantMethod::kNone) return add(name, {experts, cols, rows});
    add(name + "_blocks", {experts, rows, cols / 32, 16}, TinyContent::kCodes, 1, DType::kU8);
    add(name + "_scales", {experts, rows, cols / 32}, TinyContent::kE8m0, 1, DType::kU8);
  }

  void add_fp4(const std::string& name, int64_t rows, int64_t cols, float input_amax) {
    constexpr float kCodeRms = 2.93f, kBlockScaleMean = 184, kFp4TimesFp8Max = 6 * 448;
    const float scale = kWeightLevel / (kCodeRms * kBlockScaleMean);
    const float input_scale = input_amax / kFp4TimesFp8Max;
    const QuantMethod method = config_.quant.method;
    const bool is_modelopt = method == QuantMethod::kModelOptNvfp4, is_fp8 = method == QuantMethod::kFp8Mxfp4;
    const bool is_packed = method == QuantMethod::kCompressedNvfp4 || method == QuantMethod::kCompressedMxfp4;
    add(name + (is_packed ? ".weight_packed" : ".weight"), {rows, cols / 2}, TinyContent::kCodes, 1,
        is_fp8 ? DType::kI8 : DType::kU8);
    if (is_mxfp4(method))
      return add(name + (is_fp8 ? ".scale" : ".weight_scale"), {rows, cols / 32}, TinyContent::kE8m0, 1,
                 is_fp8 ? DType::kF8E8M0 : DType::kU8);
    add(name + ".weight_scale", {rows, cols / 16}, TinyContent::kE4m3, 1, DType::kF8E4M3);
    if (is_modelopt) {
      add(name + ".weight_scale_2", {}, TinyContent::kLevel, scale, DType::kF32);
      add(name + ".input_scale", {}, TinyContent::kLevel, input_scale, DType::kF32);
    } else {
      add(name + ".weight_global_scale", {1}, TinyContent::kLevel, 1 / scale, DType::kF32);
      add(name + ".input_global_scale", {1}, TinyContent::kLevel, 1 / input_scale, DType::kF32);
    }
  }

  // Adds the module in FP4, or in FP8 or bf16 if the declaration excludes it.
  void add_linear(const std::string& name, int64_t rows, int64_t cols, float input_amax) {
    if (is_declared_fp8(config_.quant, prefix_ + name) || is_excluded(config_.quant, prefix_ + name))
      return add_matrix(name, rows, cols);
    add_fp4(name, rows, cols, input_amax);
  }

  void add_mlp_projections(const std::string& name, int64_t intermediate) {
    constexpr float kActivatedAmax = 4;
    add_linear(name + ".gate_proj", intermediate, config_.hidden_size, kNormalisedAmax);
    add_linear(name + ".up_proj", intermediate, config_.hidden_size, kNormalisedAmax);
    add_linear(name + ".down_proj", config_.hidden_size, intermediate, kActivatedAmax);
  }

  const ModelConfig& config_;
  std::string prefix_;
  std::vector<TinyTensor> tensors_;
};

// Returns how many bytes of a tensor are generated from one 64-bit random number.
int64_t bytes_per_value(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF32 ? dtype_bits(dtype) / 8 : int64_t{8};
}

// Writes to `out` the elements generated from random numbers [begin, end) of the tensor's sequence.
void generate(const TinyTensor& tensor, uint64_t key, int64_t begin, int64_t end, uint8_t* out) {
  const auto push = [&](auto value) {
    std::memcpy(out, &value, sizeof value);
    out += sizeof value;
  };
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t bits = random_at(key, static_cast<uint64_t>(i));
    switch (tensor.spec.dtype) {
      case DType::kBF16:
        push(float_to_bf16(number(tensor, bits)));
        break;
      case DType::kF32:
        push(number(tensor, bits));
        break;
      default:
        push(eight_bytes(tensor.content, bits));
    }
  }
}

}  // namespace

std::vector<TinyTensor> list_tiny_tensors(const ModelConfig& config) { return TensorList(config).list(); }

Status fill_tiny_tensor(const TinyTensor& tensor, uint64_t seed, const ByteSink& sink) {
  FP4MOE_ASSIGN_OR_RETURN(const int64_t num_bytes, tensor_bytes(tensor.spec));
  const uint64_t key = key_of(tensor.spec.name, seed);
  const int64_t value_bytes = bytes_per_value(tensor.spec.dtype);
  const int64_t num_values = (num_bytes + value_bytes - 1) / value_bytes;
  std::vector<uint8_t> piece(static_cast<size_t>(std::min(num_values, kPieceValues) * value_bytes));
  for (int64_t begin = 0; begin < num_values; begin += kPieceValues) {
    const int64_t end = std::min(begin + kPieceValues, num_values);
    generate(tensor, key, begin, end, piece.data());
    const int64_t used = std::min(end * value_bytes, num_bytes) - begin * value_bytes;
    FP4MOE_RETURN_IF_ERROR(sink({piece.data(), static_cast<size_t>(used)}));
  }
  return {};
}

}  // namespace fp4moe
