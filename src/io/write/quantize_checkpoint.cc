#include "io/write/quantize_checkpoint.h"

#include <atomic>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/check.h"
#include "base/run_ranges.h"
#include "formats/nvfp4.h"
#include "io/checkpoint/expert_weights.h"
#include "io/checkpoint/finite_check.h"
#include "io/config/quant_config.h"
#include "io/config/tensor_names.h"
#include "io/json_document.h"
#include "io/write/new_checkpoint.h"
#include "io/write/quantize_declaration.h"

namespace fp4moe {
namespace {

constexpr int64_t kRowsAtATime = 4096;

// A projection to be quantised: that of one expert or MLP or, for gpt-oss, that of all experts.
struct Module {
  std::string name;
  const TensorEntry* source = nullptr;
  int64_t layer = 0;
  int64_t num_matrices = 1, rows = 0, cols = 0;
  const bf16* data = nullptr;
  int64_t matrix_stride = 0, row_stride = 0, col_stride = 1;  // strides in elements
  int64_t expert = -1, first_row = 0;                         // position in a `source` that holds all experts
  DecodeScale scale;                                          // NVFP4's tensor scale
  float input_amax = 0;                                       // 0: unknown

  int64_t num_rows() const { return num_matrices * rows; }
  const bf16* row(int64_t i) const { return data + i / rows * matrix_stride + i % rows * row_stride; }
};

bool ends_with_projection(std::string_view module) {
  for (const char* name : {".gate_proj", ".up_proj", ".down_proj"})
    if (module.ends_with(name)) return true;
  return false;
}

// Returns the key for summing errors: "experts.up_proj" for "model.layers.3.mlp.experts.7.up_proj".
std::string projection_of(const std::string& module) {
  constexpr std::string_view kMlp = ".mlp.";
  std::string name = module.substr(module.find(kMlp) + kMlp.size());
  const size_t experts = name.find("experts."), number = experts == name.npos ? name.npos : experts + 8;
  if (number != name.npos && name[number] >= '0' && name[number] <= '9')
    name.erase(number, name.find('.', number) + 1 - number);
  return name;
}

// Returns n for a name that begins with "model.layers.<n>.", otherwise -1.
int64_t layer_of(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return -1;
  int64_t n = 0;
  size_t i = kLayers.size();
  for (; i < name.size() && name[i] >= '0' && name[i] <= '9' && n < (1 << 20); ++i)
    n = n * 10 + name[i] - '0';
  return i > kLayers.size() && i < name.size() && name[i] == '.' ? n : -1;
}

// A tensor to be written.
struct Output {
  enum class Kind { kCopy, kCodes, kBlockScales, kTensorScale, kInputScale };
  TensorSpec spec;
  Kind kind = Kind::kCopy;
  const TensorEntry* source = nullptr;
  Module* module = nullptr;
};

class Quantizer {
 public:
  Quantizer(const Checkpoint& source, const ModelConfig& config, const QuantizeOptions& options,
            const Declaration& declaration, ThreadPool& pool)
      : source_(source), config_(config), options_(options), declaration_(declaration), pool_(pool) {}

  Status plan() {
    for (const TensorEntry& tensor : source_.tensors()) {
      if (is_fused(tensor)) {
        FP4MOE_RETURN_IF_ERROR(add_experts(tensor));
        continue;
      }
      FP4MOE_ASSIGN_OR_RETURN(Module * module, module_of(tensor));
      if (module == nullptr)
        outputs_.push_back(
            {{tensor.name, tensor.view.dtype, tensor.view.shape}, Output::Kind::kCopy, &tensor});
      else
        add_outputs(*module);
    }
    FP4MOE_RETURN_IF_ERROR(check_whole_mlps());
    if (modules_.empty())
      return invalid_argument("'" + source_.folder() + "' has no MLP projections to quantise");
    return {};
  }

  // Sets NVFP4's tensor scales; the gate and up projections of an expert or MLP share one.
  Status scale() {
    if (options_.format != Fp4Format::kNvfp4) return {};
    std::map<std::string, float> of_gate_and_up;
    std::vector<float> amax;
    for (const auto& module : modules_) {
      FP4MOE_ASSIGN_OR_RETURN(const float largest, largest_weight(*module));
      amax.push_back(largest);
      if (const std::string pair = gate_and_up(*module); !pair.empty())
        of_gate_and_up[pair] = std::max(of_gate_and_up[pair], largest);
    }
    for (size_t i = 0; i < modules_.size(); ++i) {
      const std::string pair = gate_and_up(*modules_[i]);
      const float largest = pair.empty() ? amax[i] : of_gate_and_up[pair];
      if (largest > 0) modules_[i]->scale = to_decode(nvfp4_encode_scale(largest));
    }
    return {};
  }

  Status write(const std::string& folder) {
    std::vector<TensorSpec> specs;
    std::map<std::string, const Output*> by_name;
    for (const Output& output : outputs_) {
      TensorSpec& spec = specs.emplace_back(output.spec);
      spec.name = stored_name(config_.text_prefix, output.spec.name, config_.mtp_layer);
      by_name[spec.name] = &output;
    }
    FP4MOE_RETURN_IF_ERROR(check_space(folder, specs));
    return write_safetensors_shards(folder, specs, options_.num_shards,
                                    [&](const TensorSpec& spec, const ByteSink& sink) {
                                      return write_tensor(*by_name.at(spec.name), sink);
                                    });
  }

  QuantizeResult result() const {
    QuantizeResult result{.dialect = declaration_.dialect,
                          .errors = {},
                          .num_modules = std::ssize(modules_),
                          .source_bytes = source_.total_bytes()};
    for (const auto& [key, error] : errors_) result.errors.push_back({key.first, key.second, error});
    for (const Output& output : outputs_) result.written_bytes += *tensor_bytes(output.spec);
    return result;
  }

 private:
  bool is_in_layer(const TensorEntry& tensor) const {
    const int64_t layer = layer_of(tensor.name);
    return layer >= 0 && layer < config_.num_layers && tensor.name.find(".mlp.") != std::string::npos;
  }

  static bool holds_all_experts(const std::string& name) {
    return name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj");
  }

  // Whether the tensor holds a projection of all experts that the written dialect stores one by one.
  bool is_fused(const TensorEntry& tensor) const {
    return !declaration_.tensors.is_gpt_oss && is_in_layer(tensor) && holds_all_experts(tensor.name);
  }

  // Adds the modules of a tensor for which is_fused() is true, and their outputs.
  Status add_experts(const TensorEntry& tensor) {
    const int64_t layer = layer_of(tensor.name);
    FP4MOE_ASSIGN_OR_RETURN(const MoeWeightsView moe, load_expert_weights(source_, config_, layer));
    const std::string experts = tensor.name.substr(0, tensor.name.rfind('.') + 1);
    for (int64_t e = 0; e < std::ssize(moe.bf16_experts); ++e) {
      const Bf16ExpertView& view = moe.bf16_experts[static_cast<size_t>(e)];
      const auto add = [&](const char* name, const Bf16MatrixView& m, int64_t first_row) -> Status {
        FP4MOE_ASSIGN_OR_RETURN(Module * module, add_module({.name = experts + std::to_string(e) + name,
                                                             .source = &tensor,
                                                             .layer = layer,
                                                             .rows = m.rows,
                                                             .cols = m.cols,
                                                             .data = m.data,
                                                             .row_stride = m.row_stride,
                                                             .col_stride = m.col_stride,
                                                             .expert = e,
                                                             .first_row = first_row}));
        add_outputs(*module);
        return {};
      };
      if (tensor.name.ends_with(".down_proj")) {
        FP4MOE_RETURN_IF_ERROR(add(".down_proj", view.down, 0));
        continue;
      }
      FP4MOE_RETURN_IF_ERROR(add(".gate_proj", view.gate, 0));
      FP4MOE_RETURN_IF_ERROR(add(".up_proj", view.up, view.gate.rows));
    }
    return {};
  }

  // Returns the module to which `tensor` belongs; null: the tensor is copied unchanged.
  Result<Module*> module_of(const TensorEntry& tensor) {
    if (!is_in_layer(tensor)) return nullptr;
    Module module{.name = tensor.name,
                  .source = &tensor,
                  .layer = layer_of(tensor.name),
                  .data = tensor.view.as<bf16>()};
    const std::vector<int64_t>& shape = tensor.view.shape;
    if (config_.family == ModelFamily::kGptOss) {
      if (!holds_all_experts(tensor.name)) return nullptr;
      if (shape.size() == 3) {  // [E, K, N]
        module.num_matrices = shape[0], module.rows = shape[2], module.cols = shape[1];
        module.matrix_stride = shape[1] * shape[2], module.row_stride = 1, module.col_stride = shape[2];
      }
    } else {
      constexpr std::string_view kWeight = ".weight";
      if (!tensor.name.ends_with(kWeight)) return nullptr;
      module.name.resize(module.name.size() - kWeight.size());
      if (!ends_with_projection(module.name) || declaration_.leaves(module.name)) return nullptr;
      if (shape.size() == 2) module.rows = shape[0], module.cols = module.row_stride = shape[1];
    }
    if (tensor.view.dtype != DType::kBF16 || module.rows == 0)
      return unsupported("tensor '" + tensor.name + "' is " + dtype_name(tensor.view.dtype) + " " +
                         shape_string(shape) + "; fp4moe quantize reads bf16 matrices");
    return add_module(std::move(module));
  }

  Result<Module*> add_module(Module module) {
    const int block = fp4_block(options_.format);
    if (module.cols % block != 0)
      return unsupported("module '" + module.name + "' has " + std::to_string(module.cols) +
                         " input features; legal for " + fp4_format_name(options_.format) +
                         ": multiples of " + std::to_string(block));
    if (options_.format == Fp4Format::kNvfp4 && options_.input_amax != nullptr)
      module.input_amax = options_.input_amax(module.name);
    return modules_.emplace_back(std::make_unique<Module>(std::move(module))).get();
  }

  // Checks that --exclude covers all or none of an MLP's three projections.
  Status check_whole_mlps() const {
    if (config_.family == ModelFamily::kGptOss) return {};
    std::map<std::string, int> projections;
    for (const auto& module : modules_) ++projections[module->name.substr(0, module->name.rfind('.'))];
    for (const auto& [mlp, count] : projections)
      if (count != 3)
        return unsupported("--exclude leaves " + std::to_string(3 - count) + " of the 3 projections of '" +
                           mlp + "' in bf16; legal: all three or none");
    return {};
  }

  void add_outputs(Module& m) {
    const auto add = [&](Output::Kind kind, const std::string& name, DType dtype,
                         std::vector<int64_t> shape) {
      if (!name.empty()) outputs_.push_back({{name, dtype, std::move(shape)}, kind, m.source, &m});
    };
    const DialectTensors& names = declaration_.tensors;
    const int block = fp4_block(options_.format);
    const bool nvfp4 = options_.format == Fp4Format::kNvfp4;
    std::vector<int64_t> codes = {m.rows, m.cols / 2}, scales = {m.rows, m.cols / block}, single;
    if (names.is_gpt_oss) codes = {m.num_matrices, m.rows, m.cols / block, block / 2};
    if (names.is_gpt_oss) scales = {m.num_matrices, m.rows, m.cols / block};
    if (names.scales_are_divisors) single = {1};
    add(Output::Kind::kCodes, m.name + names.codes, DType::kU8, codes);
    add(Output::Kind::kBlockScales, m.name + names.block_scales, nvfp4 ? DType::kF8E4M3 : DType::kU8, scales);
    if (!nvfp4) return;
    add(Output::Kind::kTensorScale, m.name + names.tensor_scale, DType::kF32, single);
    if (m.input_amax > 0) add(Output::Kind::kInputScale, m.name + names.input_scale, DType::kF32, single);
  }

  static std::string gate_and_up(const Module& m) {
    for (const char* name : {".gate_proj", ".up_proj"})
      if (m.name.ends_with(name)) return m.name.substr(0, m.name.rfind('.'));
    return {};
  }

  // Converts row i to floats; returns false, with the column, at a value that is not finite.
  static bool read_row(const Module& m, int64_t i, float* out, int64_t& bad_column) {
    const bf16* row = m.row(i);
    for (int64_t c = 0; c < m.cols; ++c) {
      out[c] = bf16_to_float(row[c * m.col_stride]);
      if (std::isfinite(out[c])) continue;
      bad_column = c;
      return false;
    }
    return true;
  }

  static Status not_finite(const Module& m, int64_t row, int64_t column) {
    const bool is_one = m.num_matrices == 1 && m.expert < 0;
    const int64_t expert = std::max(m.expert, row / m.rows);
    return data_loss("tensor '" + m.source->name + "' is not finite: " +
                     (is_one ? "" : "expert " + std::to_string(expert) + ", ") + "output " +
                     std::to_string(m.first_row + row % m.rows) + ", input " + std::to_string(column));
  }

  // Runs body(i, row) for rows [first, last) of the module in parallel; returns the first failure in row
  // order.
  template <class Body>
  static Status for_rows(const Module& m, int64_t first, int64_t last, ThreadPool& pool, const Body& body) {
    constexpr int64_t kStep = 16;
    std::vector<Status> failures(static_cast<size_t>((last - first + kStep - 1) / kStep));
    run_ranges(pool, last - first, kStep, [&](int64_t from, int64_t to) {
      std::vector<float> x(static_cast<size_t>(m.cols));
      for (int64_t i = first + from; i < first + to; ++i) {
        int64_t column = 0;
        if (!read_row(m, i, x.data(), column)) {
          failures[static_cast<size_t>(from / kStep)] = not_finite(m, i, column);
          return;
        }
        body(i, x.data());
      }
    });
    for (Status& status : failures) FP4MOE_RETURN_IF_ERROR(status);
    return {};
  }

  Result<float> largest_weight(const Module& m) const {
    std::vector<float> largest(static_cast<size_t>(m.num_rows()));
    FP4MOE_RETURN_IF_ERROR(for_rows(m, 0, m.num_rows(), pool_, [&](int64_t i, const float* x) {
      float& most = largest[static_cast<size_t>(i)];
      for (int64_t c = 0; c < m.cols; ++c) most = std::max(most, std::fabs(x[c]));
    }));
    return *std::max_element(largest.begin(), largest.end());
  }

  Status write_tensor(const Output& output, const ByteSink& sink) {
    const auto push = [&](float value) { return sink({reinterpret_cast<const uint8_t*>(&value), 4}); };
    switch (output.kind) {
      case Output::Kind::kCopy:
        FP4MOE_RETURN_IF_ERROR(check_finite({output.source}, pool_));
        FP4MOE_RETURN_IF_ERROR(
            sink({output.source->view.data, static_cast<size_t>(output.source->view.num_bytes())}));
        count(*output.source, output.source->view.num_bytes());
        return {};
      case Output::Kind::kCodes:
        return write_codes(*output.module, sink);
      case Output::Kind::kBlockScales:
        return write_scales(*output.module, sink);
      case Output::Kind::kTensorScale:
        return push(stored(output.module->scale));
      case Output::Kind::kInputScale:
        return push(stored(to_decode(nvfp4_encode_scale(output.module->input_amax))));
    }
    return {};
  }

  float stored(DecodeScale scale) const {
    return declaration_.tensors.scales_are_divisors ? to_encode(scale).value : scale.value;
  }

  // The scales are computed with the codes and kept until write_scales().
  Status write_codes(const Module& m, const ByteSink& sink) {
    const int64_t block = fp4_block(options_.format), row_codes = m.cols / 2, row_scales = m.cols / block;
    std::vector<uint8_t>& scales = scales_[&m];
    scales.resize(static_cast<size_t>(m.num_rows() * row_scales));
    std::vector<uint8_t> codes;
    for (int64_t first = 0; first < m.num_rows(); first += kRowsAtATime) {
      const int64_t last = std::min(m.num_rows(), first + kRowsAtATime);
      codes.resize(static_cast<size_t>((last - first) * row_codes));
      std::vector<WeightError> errors(static_cast<size_t>(last - first));
      FP4MOE_RETURN_IF_ERROR(for_rows(m, first, last, pool_, [&](int64_t i, const float* x) {
        uint8_t* row = codes.data() + (i - first) * row_codes;
        quantize_weight_row(options_.format, {x, static_cast<size_t>(m.cols)}, m.scale, options_.search, row,
                            scales.data() + i * row_scales);
        errors[static_cast<size_t>(i - first)] = error_of(m, x, row, scales.data() + i * row_scales);
      }));
      WeightError& total = errors_[{m.layer, projection_of(m.name)}];
      for (const WeightError& e : errors) total.error += e.error, total.energy += e.energy;
      FP4MOE_RETURN_IF_ERROR(sink(codes));
    }
    count(*m.source, m.num_rows() * m.cols * int64_t{sizeof(bf16)});
    return {};
  }

  Status write_scales(const Module& m, const ByteSink& sink) {
    const auto held = scales_.find(&m);
    FP4MOE_CHECK(held != scales_.end(), "a module's codes come before its scales");
    const Status status = sink(held->second);
    scales_.erase(held);
    return status;
  }

  WeightError error_of(const Module& m, const float* x, const uint8_t* codes, const uint8_t* scales) const {
    const Fp4MatrixView row{.format = options_.format,
                            .rows = 1,
                            .cols = m.cols,
                            .codes = codes,
                            .scales = scales,
                            .tensor_scale = m.scale.value};
    std::vector<float> y(static_cast<size_t>(m.cols));
    fp4_dequantize_row(row, 0, y.data());
    WeightError sum;
    for (int64_t c = 0; c < m.cols; ++c) {
      const double d = double{x[c]} - double{y[static_cast<size_t>(c)]};
      sum.error += d * d;
      sum.energy += double{x[c]} * double{x[c]};
    }
    return sum;
  }

  // Reports that `num_bytes` of the tensor are done.
  void count(const TensorEntry& tensor, int64_t num_bytes) {
    done_bytes_ += num_bytes;
    source_.release(tensor.view);
    if (options_.progress != nullptr) options_.progress(done_bytes_, source_.total_bytes());
  }

  const Checkpoint& source_;
  const ModelConfig& config_;
  const QuantizeOptions& options_;
  const Declaration& declaration_;
  ThreadPool& pool_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::vector<Output> outputs_;
  std::map<const Module*, std::vector<uint8_t>> scales_;
  std::map<std::pair<int64_t, std::string>, WeightError> errors_;
  int64_t done_bytes_ = 0;
};

bool is_weights_file(const std::filesystem::path& path) {
  for (const char* extension : {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
    if (path.extension() == extension) return true;
  return path.filename().string().ends_with(".index.json");
}

// Copies the tokenizer, templates and licence: all files that are neither weights nor rewritten.
Status copy_other_files(const std::string& from, const std::string& to) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(from, error)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file(error) || is_weights_file(entry.path()) || name.starts_with(".") ||
        name == "config.json" || name == "hf_quant_config.json")
      continue;
    std::filesystem::copy_file(entry.path(), std::filesystem::path(to) / name, error);
    if (error) return not_found("cannot copy '" + entry.path().string() + "': " + error.message());
  }
  if (error) return not_found("cannot read folder '" + from + "': " + error.message());
  return {};
}

}  // namespace

double WeightError::relative_l2() const { return energy > 0 ? std::sqrt(error / energy) : 0; }

Result<std::string> check_quantize(const ModelConfig& config, const QuantizeOptions& options) {
  FP4MOE_ASSIGN_OR_RETURN(const Declaration declaration, declare(config, options));
  return declaration.dialect;
}

Result<QuantizeResult> quantize_checkpoint(const Checkpoint& source, const ModelConfig& config,
                                           const std::string& folder, const QuantizeOptions& options,
                                           ThreadPool& pool) {
  constexpr int64_t kMaxConfigBytes = 64 << 20;
  FP4MOE_ASSIGN_OR_RETURN(const Declaration declaration, declare(config, options));
  FP4MOE_ASSIGN_OR_RETURN(const std::string text,
                          read_text_file(source.folder() + "/config.json", kMaxConfigBytes));
  FP4MOE_ASSIGN_OR_RETURN(Json json, parse_json(text, "config.json"));
  Quantizer quantizer(source, config, options, declaration, pool);
  FP4MOE_RETURN_IF_ERROR(quantizer.plan());
  FP4MOE_RETURN_IF_ERROR(prepare_folder(folder));
  FP4MOE_RETURN_IF_ERROR(quantizer.scale());
  FP4MOE_RETURN_IF_ERROR(quantizer.write(folder));
  FP4MOE_RETURN_IF_ERROR(copy_other_files(source.folder(), folder));
  json["quantization_config"] = declaration.config;
  if (!declaration.hf_quant.is_null())
    FP4MOE_RETURN_IF_ERROR(
        write_text_file(folder + "/hf_quant_config.json", declaration.hf_quant.dump(1) + "\n"));
  FP4MOE_RETURN_IF_ERROR(write_text_file(folder + "/config.json", json.dump(1) + "\n"));
  return quantizer.result();
}

}  // namespace fp4moe
