#include "engine/startup/weight_cache.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "base/check.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/seconds.h"
#include "engine/startup/kernels_id.h"
#include "engine/startup/memory_plan.h"
#include "engine/startup/user_cache.h"
#include "model/plan_placements.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;

// Packing smaller checkpoints takes no noticeable time; an explicit --weight-cache-dir is used for any size.
constexpr int64_t kWorthKeeping = int64_t{256} << 20;

uint64_t hash_text(const std::string& text, uint64_t seed = 0) {
  return hash64(text.data(), std::ssize(text), seed);
}

// Hashes the files that define what the tensors mean.
uint64_t config_hash(const std::string& folder) {
  constexpr int64_t kMaxBytes = int64_t{64} << 20;
  uint64_t hash = 0;
  for (const char* name : {"/config.json", "/hf_quant_config.json"}) {
    const Result<std::string> text = read_text_file(folder + name, kMaxBytes);
    hash = hash_text(text.ok() ? *text : "", hash);
  }
  return hash;
}

// Describes which weights are packed and how; a folder can hold one file for each combination.
std::string packing_text(const ModelPlan& plan, const RankLayout& layout) {
  std::ostringstream text;
  text << "runner " << plan.moe.runner()->name << ", " << numerics_text(plan.moe.numerics()) << "\n"
       << "activations " << dtype_name(plan.act_dtype) << ", dense layers " << isa_name(plan.isa) << " "
       << (plan.dense_quant == DenseQuant::kNone ? "bf16" : plan.flags.dense_quant) << "\n"
       << "rank " << layout.rank << " of tp " << layout.tp << ", ep " << layout.ep << ", dp " << layout.dp
       << (plan.flags.enable_dp_lm_head ? ", an LM head a group" : "")
       << (plan.moe.a2a_settings().deterministic ? ", deterministic" : "") << placements_text(plan) << "\n";
  return text.str();
}

}  // namespace

WeightCachePlace weight_cache_place(const Checkpoint& checkpoint, const ModelPlan& plan,
                                    const RankLayout& layout, const std::string& draft) {
  const std::string& dir = plan.flags.weight_cache_dir;
  const int64_t num_bytes = checkpoint.total_bytes();
  const auto nowhere = [](std::string why) { return WeightCachePlace{{}, std::move(why), {}}; };
  if (dir == "none") return nowhere("--weight-cache-dir none");
  if (plan.flags.enable_eplb) return nowhere("--enable-eplb, which moves weights between ranks");
  if (plan.flags.load_format == "dummy") return nowhere("dummy weights");
  if (dir.empty() && num_bytes < kWorthKeeping)
    return nowhere("less than " + size_string(kWorthKeeping) + " (--weight-cache-dir DIR keeps them)");
  const std::string folder = dir.empty() ? user_cache_folder() : dir;
  if (folder.empty()) return nowhere("neither XDG_CACHE_HOME nor HOME is set (set --weight-cache-dir DIR)");

  namespace fs = std::filesystem;
  std::error_code error;
  fs::path model = fs::weakly_canonical(checkpoint.folder(), error);
  if (error) model = checkpoint.folder();
  const std::string packing =
      packing_text(plan, layout) + (draft.empty() ? "" : "draft model of " + draft + "\n");
  WeightCachePlace place;
  place.path = folder + "/" + model.filename().string() + "-" +
               hash_text_of(hash_text(packing, hash_text(model.string()))) + ".weights";
  place.key = "fp4moe " FP4MOE_VERSION " packing " + std::string(packing_id()) + "\ncheckpoint " +
              std::to_string(num_bytes) + " bytes " + hash_text_of(checkpoint.identity()) +
              " configuration " + hash_text_of(config_hash(checkpoint.folder())) + "\n" + packing;
  return place;
}

WeightCache::WeightCache(WeightCachePlace place, ThreadPool& pool)
    : place_(std::move(place)), pool_(pool), why_not_(place_.why_not) {
  if (place_.path.empty()) return;
  const std::string folder = std::filesystem::path(place_.path).parent_path();
  if (const Status usable = make_private_folder(folder); !usable.ok()) {
    give_up(usable);
    return;
  }
  if (file_exists(place_.path)) {
    const Status status = map();
    is_mapped_ = status.ok();
    if (is_mapped_) return;
    file_ = {};
    index_ = {};
    log_warning("weight cache '" + place_.path + "' is not used: " + status.message() +
                "; it will be rewritten");
  }
  index_.key = place_.key;
  Result<NewFile> file = NewFile::create(place_.path, NewFile::Existing::kReplaceAnything);
  Status status = file.status();
  if (file.ok()) {
    new_file_ = std::move(*file);
    const std::vector<uint8_t> room(kWeightAlign);  // space for the header, which is written last
    status = new_file_->append(room);
  }
  if (!status.ok()) give_up(status);
}

Status WeightCache::map() {
  FP4MOE_ASSIGN_OR_RETURN(file_, MappedFile::open_private(place_.path));
  FP4MOE_ASSIGN_OR_RETURN(index_, read_weight_index(file_.bytes(), place_.key));
  at_ = kWeightAlign;
  is_locked_ = file_.keep_in_memory();
  const Clock::time_point start = Clock::now();
  FP4MOE_RETURN_IF_ERROR(check_weights(file_.bytes(), index_, pool_));
  check_seconds_ = seconds_since(start);
  return {};
}

void WeightCache::enter_part(const std::string& name) {
  if (!is_mapped_) index_.parts.push_back(name);  // a mapped file's index has the names
}

Result<Buffer> WeightCache::next(int64_t num_bytes, const PackFn& pack) {
  if (is_mapped_) {
    if (num_taken_ == index_.weights.size() ||
        index_.weights[num_taken_].num_bytes != static_cast<uint64_t>(num_bytes))
      return wrong_weights(std::to_string(num_bytes) + " bytes as weight " + std::to_string(num_taken_));
    Buffer weights = Buffer::borrowed(const_cast<uint8_t*>(file_.bytes().data()) + at_, num_bytes);
    ++num_taken_;
    at_ += weight_room(num_bytes);
    total_bytes_ += num_bytes;
    return weights;
  }
  FP4MOE_ASSIGN_OR_RETURN(Buffer weights, Buffer::make(num_bytes));
  FP4MOE_RETURN_IF_ERROR(pack(weights.data()));
  total_bytes_ += num_bytes;
  if (!new_file_) return weights;
  const Clock::time_point start = Clock::now();
  const Status status = append(weights);
  write_seconds_ += seconds_since(start);
  if (!status.ok()) give_up(status);
  return weights;
}

Status WeightCache::append(const Buffer& weights) {
  const std::span<const uint8_t> bytes(weights.data(), static_cast<size_t>(weights.num_bytes()));
  const std::vector<uint8_t> padding(static_cast<size_t>(weight_room(std::ssize(bytes))) - bytes.size());
  FP4MOE_RETURN_IF_ERROR(new_file_->append(bytes));
  if (index_.parts.empty()) index_.parts.push_back("weights");
  index_.weights.push_back({bytes.size(), weight_checksum(bytes, pool_), index_.parts.size() - 1});
  return new_file_->append(padding);
}

Status WeightCache::finish() {
  if (is_mapped_) {
    if (num_taken_ != index_.weights.size()) return wrong_weights(std::to_string(num_taken_) + " weights");
    log_info("weights    " + size_string(total_bytes_) + " mapped from '" + place_.path + "' in " +
             seconds_text(seconds_since(started_)) + ", including " + seconds_text(check_seconds_) +
             " for checksums" +
             (is_locked_ ? "" : "; the system may drop idle pages (ulimit -l is too low to lock them)"));
    return {};
  }
  if (new_file_) {
    const Clock::time_point start = Clock::now();
    const Status status = write_index();
    write_seconds_ += seconds_since(start);
    if (!status.ok()) give_up(status);
  }
  const std::string packed = "weights    " + size_string(total_bytes_) + " packed in " +
                             seconds_text(seconds_since(started_) - write_seconds_);
  if (!new_file_) {
    log_info(packed + ", not kept: " + why_not_);
    return {};
  }
  new_file_.reset();
  log_info(packed + ", written to '" + place_.path + "' in " + seconds_text(write_seconds_));
  return {};
}

Status WeightCache::write_index() {
  const WeightFileEnds ends = make_weight_file_ends(index_, static_cast<uint64_t>(new_file_->num_bytes()));
  const auto bytes = [](const void* data, size_t n) {
    return std::span(static_cast<const uint8_t*>(data), n);
  };
  FP4MOE_RETURN_IF_ERROR(new_file_->append(bytes(ends.index.data(), ends.index.size())));
  FP4MOE_RETURN_IF_ERROR(new_file_->overwrite(0, bytes(&ends.header, sizeof ends.header)));
  return new_file_->commit(NewFile::Access::kReadOnly);
}

void WeightCache::give_up(const Status& status) {
  new_file_.reset();
  why_not_ = status.message();
  log_warning("packed weights are not kept: " + status.message());
}

Status WeightCache::wrong_weights(const std::string& what) const {
  return data_loss("'" + place_.path + "' holds " + std::to_string(index_.weights.size()) +
                   " weights, but the model needs " + what +
                   "; remove the file, or start with --weight-cache-dir none");
}

}  // namespace fp4moe
