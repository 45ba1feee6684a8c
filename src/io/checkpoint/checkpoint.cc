#include "io/checkpoint/checkpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <unordered_map>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/hash.h"
#include "base/thread_pool.h"
#include "io/checkpoint/checkpoint_index.h"
#include "io/checkpoint/safetensors.h"
#include "io/config/tensor_names.h"
#include "io/file.h"

namespace fp4moe {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;

struct Shard {
  std::string file_name;
  MappedFile file;
  std::vector<SafetensorsEntry> entries;
};

Status map_shard(const std::string& folder, Shard& shard) {
  const std::string path = folder + "/" + shard.file_name;
  FP4MOE_ASSIGN_OR_RETURN(shard.file, MappedFile::open(path));
  Result<std::vector<SafetensorsEntry>> entries = parse_safetensors(shard.file.bytes());
  if (!entries.ok()) return entries.status().with_context(path);
  shard.entries = std::move(entries).value();
  return {};
}

uint64_t shard_identity(const Shard& shard, uint64_t hash) {
  constexpr int64_t kSamples = 16, kSampleBytes = 4096;
  const std::span<const uint8_t> file = shard.file.bytes();
  const auto num_bytes = static_cast<int64_t>(file.size());
  const int64_t header_bytes = shard.entries.empty() ? num_bytes : shard.entries.front().begin;
  const int64_t numbers[] = {num_bytes, shard.file.modified_at()};
  hash = hash64(shard.file_name.data(), std::ssize(shard.file_name), hash);
  hash = hash64(numbers, sizeof numbers, hash);
  hash = hash64(file.data(), header_bytes, hash);
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t at = header_bytes + (num_bytes - header_bytes) / kSamples * i;
    hash = hash64(file.data() + at, std::min(kSampleBytes, num_bytes - at), hash);
  }
  return hash;
}

bool has_index(const std::string& folder) { return file_exists(folder + "/" + kIndexName); }
bool has_single_file(const std::string& folder) { return file_exists(folder + "/" + kSingleFile); }

// Lists the folder's shard files and, if it has an index, the file of every tensor.
Result<CheckpointIndex> read_index(const std::string& folder) {
  if (!file_exists(folder)) return not_found("checkpoint folder '" + folder + "' does not exist");
  if (has_single_file(folder)) return CheckpointIndex{.files = {kSingleFile}, .tensors = {}};
  if (!has_index(folder))
    return not_found("checkpoint folder '" + folder + "' has neither " + kSingleFile + " nor " + kIndexName);
  const std::string path = folder + "/" + kIndexName;
  FP4MOE_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxIndexBytes));
  Result<CheckpointIndex> index = parse_checkpoint_index(text);
  if (!index.ok()) return index.status().with_context(path);
  std::error_code missing;  // a link without its target is a missing shard too
  for (const auto& [tensor, file] : index->tensors)
    if (!std::filesystem::exists(folder + "/" + file, missing))
      return not_found("shard '" + file + "' is missing from '" + folder + "'; " + kIndexName +
                       " puts tensor '" + tensor + "' in it");
  return index;
}

// Calls madvise for the pages of the view. inner: only for pages completely inside the view.
void advise(const TensorView& view, int advice, bool inner) {
  const uintptr_t page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  uintptr_t begin = reinterpret_cast<uintptr_t>(view.data);
  uintptr_t end = begin + static_cast<uintptr_t>(view.num_bytes());
  begin = (inner ? begin + page - 1 : begin) / page * page;
  if (inner) end = end / page * page;
  // madvise is a hint; failure is harmless.
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

struct Checkpoint::State {
  std::string folder;
  std::vector<Shard> shards;
  std::shared_ptr<const void> storage;  // keeps in_memory()'s data alive
  std::vector<TensorEntry> tensors;
  std::unordered_map<std::string_view, const TensorEntry*> by_name;  // points into tensors
  int64_t total_bytes = 0;
  int64_t mtp_layer = -1;  // the number of the layer below "mtp."; -1: no such layer

  Status map_shards();
  std::string name_of(const std::string& stored) const {
    const std::string name = text_model_name(stored);
    return mtp_layer >= 0 ? mtp_layer_name(name, mtp_layer) : name;
  }
  void find_mtp_layer();
  Status list_tensors();
  Status check_index(const CheckpointIndex& index) const;
};

Status Checkpoint::State::map_shards() {
  const int64_t num_shards = static_cast<int64_t>(shards.size());
  std::vector<Status> statuses(shards.size());
  ThreadPool pool(static_cast<int>(std::min<int64_t>(num_shards, available_cores())));
  pool.run(num_shards, [&](int64_t i, int) {
    statuses[static_cast<size_t>(i)] = map_shard(folder, shards[static_cast<size_t>(i)]);
  });
  for (Status& status : statuses) FP4MOE_RETURN_IF_ERROR(std::move(status));
  return {};
}

void Checkpoint::State::find_mtp_layer() {
  constexpr std::string_view kLayers = "model.layers.", kProjection = "mtp.fc.";
  int64_t num_layers = 0;
  bool has_projection = false;
  for (const Shard& shard : shards)
    for (const SafetensorsEntry& entry : shard.entries) {
      const std::string name = text_model_name(entry.spec.name);
      has_projection = has_projection || name.starts_with(kProjection);
      if (!name.starts_with(kLayers)) continue;
      int64_t layer = -1;
      std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
      num_layers = std::max(num_layers, std::min<int64_t>(layer, INT32_MAX) + 1);
    }
  if (has_projection) mtp_layer = num_layers;
}

Status Checkpoint::State::list_tensors() {
  find_mtp_layer();
  for (Shard& shard : shards)
    for (SafetensorsEntry& entry : shard.entries) {
      tensors.push_back({.name = name_of(entry.spec.name),
                         .view = {.data = shard.file.bytes().data() + entry.begin,
                                  .dtype = entry.spec.dtype,
                                  .shape = std::move(entry.spec.shape)},
                         .file = shard.file_name,
                         .file_offset = entry.begin});
      total_bytes += entry.end - entry.begin;
    }
  for (const TensorEntry& tensor : tensors) {
    const auto [at, is_new] = by_name.emplace(tensor.name, &tensor);
    if (!is_new)
      return data_loss("'" + folder + "': tensor '" + tensor.name + "' is in '" + at->second->file +
                       "' and also in '" + tensor.file + "'");
  }
  return {};
}

Status Checkpoint::State::check_index(const CheckpointIndex& index) const {
  for (const auto& [name, file] : index.tensors) {
    const auto at = by_name.find(name_of(name));
    if (at == by_name.end() || at->second->file != file)
      return data_loss("'" + folder + "': " + kIndexName + " puts tensor '" + name + "' in '" + file +
                       "', which lacks it" +
                       (at == by_name.end() ? "" : "; it is in '" + at->second->file + "'"));
  }
  return {};
}

Checkpoint::Checkpoint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

bool Checkpoint::has_weights(const std::string& folder) {
  return has_single_file(folder) || has_index(folder);
}

Result<Checkpoint> Checkpoint::open(const std::string& folder) {
  FP4MOE_ASSIGN_OR_RETURN(const CheckpointIndex index, read_index(folder));
  auto state = std::make_unique<State>();
  state->folder = folder;
  for (const std::string& file : index.files)
    state->shards.push_back({.file_name = file, .file = {}, .entries = {}});
  FP4MOE_RETURN_IF_ERROR(state->map_shards());
  FP4MOE_RETURN_IF_ERROR(state->list_tensors());
  FP4MOE_RETURN_IF_ERROR(state->check_index(index));
  return Checkpoint(std::move(state));
}

Checkpoint Checkpoint::in_memory(const std::string& folder, std::vector<TensorEntry> tensors,
                                 std::shared_ptr<const void> storage) {
  auto state = std::make_unique<State>();
  state->folder = folder;
  state->storage = std::move(storage);
  state->tensors = std::move(tensors);
  for (const TensorEntry& tensor : state->tensors) {
    state->by_name.emplace(tensor.name, &tensor);
    state->total_bytes += tensor.view.num_bytes();
  }
  return Checkpoint(std::move(state));
}

const std::string& Checkpoint::folder() const { return state_->folder; }
const std::vector<TensorEntry>& Checkpoint::tensors() const { return state_->tensors; }
int64_t Checkpoint::total_bytes() const { return state_->total_bytes; }

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto at = state_->by_name.find(name);
  return at == state_->by_name.end() ? nullptr : at->second;
}

Result<TensorView> Checkpoint::get(std::string_view name, DType dtype, std::vector<int64_t> shape) const {
  const TensorEntry* entry = find(name);
  if (entry == nullptr)
    return not_found("'" + state_->folder + "' has no tensor '" + std::string(name) + "'");
  const TensorView& view = entry->view;
  if (view.dtype != dtype || view.shape != shape)
    return invalid_argument("tensor '" + entry->name + "' in '" + entry->file + "' is " +
                            dtype_name(view.dtype) + " " + shape_string(view.shape) + "; the model needs " +
                            dtype_name(dtype) + " " + shape_string(shape));
  return view;
}

void Checkpoint::will_need(const TensorView& view) const { advise(view, MADV_WILLNEED, /*inner=*/false); }

void Checkpoint::release(const TensorView& view) const {
  if (state_->storage == nullptr) advise(view, MADV_DONTNEED, /*inner=*/true);  // the file still has the data
}

void Checkpoint::release_all(std::string_view prefix) const {
  for (const TensorEntry& tensor : state_->tensors)
    if (tensor.name.starts_with(prefix)) release(tensor.view);
}

uint64_t Checkpoint::identity() const {
  uint64_t hash = 0;
  for (const Shard& shard : state_->shards) hash = shard_identity(shard, hash);
  return hash;
}

}  // namespace fp4moe
