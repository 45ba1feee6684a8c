#include "engine/weight_cache.h"

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "base/check.h"
#include "base/hash.h"
#include "base/log.h"
#include "engine/kernels_id.h"
#include "engine/memory_plan.h"
#include "engine/user_cache.h"
#include "moe/table.h"

namespace fp4moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kAlign = 4096;
// Below, packing takes less time than anybody notices; a folder that was named is used for any size.
constexpr int64_t kWorthKeeping = int64_t{256} << 20;
constexpr char kMagic[8] = {'f', 'p', '4', 'm', 'o', 'e', 'W', 'C'};

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t num_weights;
  uint64_t file_bytes, index_offset, key_bytes;
  uint64_t index_hash;
  uint64_t header_hash;  // of all before it
};
static_assert(sizeof(Header) == 56);

uint64_t header_hash(const Header& header) { return hash64(&header, offsetof(Header, header_hash)); }

constexpr int64_t aligned(int64_t num_bytes) { return (num_bytes + kAlign - 1) / kAlign * kAlign; }

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", seconds);
  return text;
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t hash_text(const std::string& text, uint64_t seed = 0) {
  return hash64(text.data(), std::ssize(text), seed);
}

// Of the files that say what the tensors mean.
uint64_t config_hash(const std::string& folder) {
  constexpr int64_t kMaxBytes = int64_t{64} << 20;
  uint64_t hash = 0;
  for (const char* name : {"/config.json", "/hf_quant_config.json"}) {
    const Result<std::string> text = read_text_file(folder + name, kMaxBytes);
    hash = hash_text(text.ok() ? *text : "", hash);
  }
  return hash;
}

// How weights are packed and which of them: what a folder may have several files for.
std::string packing_text(const ModelPlan& plan, const RankLayout& layout) {
  std::ostringstream text;
  text << "runner " << plan.moe.runner()->name << ", " << numerics_text(plan.moe.numerics()) << "\n"
       << "activations " << dtype_name(plan.act_dtype) << ", dense layers " << isa_name(plan.isa) << " "
       << (plan.dense_quant == DenseQuant::kQ8 ? "q8" : "bf16") << "\n"
       << "rank " << layout.rank << " of tp " << layout.tp << ", ep " << layout.ep << ", dp " << layout.dp
       << (plan.flags.enable_dp_lm_head ? ", an LM head a group" : "") << "\n";
  return text.str();
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

// The first lines that differ.
Status other_key(std::string_view kept, std::string_view wanted) {
  while (!kept.empty() && !wanted.empty() && first_line(kept) == first_line(wanted)) {
    kept.remove_prefix(std::min(kept.size(), first_line(kept).size() + 1));
    wanted.remove_prefix(std::min(wanted.size(), first_line(wanted).size() + 1));
  }
  return data_loss("it was made for '" + first_line(kept) + "', this start is '" + first_line(wanted) + "'");
}

// The header of a whole file.
Result<Header> read_header(std::span<const uint8_t> file) {
  Header header;
  const auto count = [](uint64_t n) { return std::to_string(n); };
  if (file.size() < sizeof header) return data_loss("it ends after " + count(file.size()) + " bytes");
  std::memcpy(&header, file.data(), sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
    return data_loss("it is no file of packed weights, or was not finished");
  if (header.version != WeightCache::kVersion)
    return data_loss("its format has version " + count(header.version) + ", this binary writes " +
                     count(WeightCache::kVersion));
  if (header.header_hash != header_hash(header)) return data_loss("its header is damaged");
  if (header.file_bytes != file.size())
    return data_loss("it has " + count(file.size()) + " bytes, " + count(header.file_bytes) +
                     " were written");
  return header;
}

}  // namespace

WeightCachePlace weight_cache_place(const Checkpoint& checkpoint, const ModelPlan& plan,
                                    const RankLayout& layout) {
  const std::string& dir = plan.flags.weight_cache_dir;
  const int64_t num_bytes = checkpoint.total_bytes();
  const auto nowhere = [](std::string why) { return WeightCachePlace{{}, std::move(why), {}}; };
  if (dir == "none") return nowhere("--weight-cache-dir none");
  if (plan.flags.load_format == "dummy") return nowhere("dummy weights");
  if (dir.empty() && num_bytes < kWorthKeeping)
    return nowhere("less than " + size_string(kWorthKeeping) + " (--weight-cache-dir DIR keeps them)");
  const std::string folder = dir.empty() ? user_cache_folder() : dir;
  if (folder.empty()) return nowhere("neither XDG_CACHE_HOME nor HOME is set (--weight-cache-dir DIR)");

  namespace fs = std::filesystem;
  std::error_code error;
  fs::path model = fs::weakly_canonical(checkpoint.folder(), error);
  if (error) model = checkpoint.folder();
  const std::string packing = packing_text(plan, layout);
  WeightCachePlace place;
  place.path = folder + "/" + model.filename().string() + "-" +
               hex(hash_text(packing, hash_text(model.string()))) + ".weights";
  place.key = "fp4moe " FP4MOE_VERSION " packing " + std::string(packing_id()) + "\ncheckpoint " +
              std::to_string(num_bytes) + " bytes " + hex(checkpoint.identity()) + " configuration " +
              hex(config_hash(checkpoint.folder())) + "\n" + packing;
  return place;
}

WeightCache::WeightCache(WeightCachePlace place) : place_(std::move(place)), why_not_(place_.why_not) {
  if (place_.path.empty()) return;
  if (file_exists(place_.path)) {
    const Status status = map();
    is_mapped_ = status.ok();
    if (is_mapped_) return;
    file_ = {};
    sizes_.clear();
    log_warning("weight cache '" + place_.path + "' is not used: " + status.message() +
                "; it is written anew");
  }
  std::error_code ignored;  // what cannot be created cannot be written to
  std::filesystem::create_directories(std::filesystem::path(place_.path).parent_path(), ignored);
  Result<NewFile> file = NewFile::create(place_.path);
  Status status = file.status();
  if (file.ok()) {
    new_file_ = std::move(*file);
    const std::vector<uint8_t> room(kAlign);  // of the header, which is written last
    status = new_file_->append(room);
  }
  if (!status.ok()) give_up(status);
}

Status WeightCache::map() {
  FP4MOE_ASSIGN_OR_RETURN(file_, MappedFile::open(place_.path));
  const std::span<const uint8_t> file = file_.bytes();
  FP4MOE_ASSIGN_OR_RETURN(const Header header, read_header(file));
  const uint64_t sizes_bytes = uint64_t{header.num_weights} * sizeof(uint64_t);
  if (header.index_offset > file.size() || header.key_bytes > file.size() - header.index_offset ||
      sizes_bytes != file.size() - header.index_offset - header.key_bytes)
    return data_loss("its index does not end where the file does");
  const uint8_t* index = file.data() + header.index_offset;
  if (hash64(index, static_cast<int64_t>(header.key_bytes + sizes_bytes)) != header.index_hash)
    return data_loss("its index is damaged");
  const std::string_view key(reinterpret_cast<const char*>(index), header.key_bytes);
  if (key != place_.key) return other_key(key, place_.key);
  sizes_.resize(header.num_weights);
  std::memcpy(sizes_.data(), index + header.key_bytes, sizes_bytes);
  uint64_t end = kAlign;
  for (const uint64_t size : sizes_) {
    if (end > header.index_offset || size > header.index_offset - end)
      return data_loss("its weights do not end where its index begins");
    end += static_cast<uint64_t>(aligned(static_cast<int64_t>(size)));
  }
  at_ = kAlign;
  is_locked_ = file_.keep_in_memory();
  return {};
}

Result<Buffer> WeightCache::next(int64_t num_bytes, const PackFn& pack) {
  if (is_mapped_) {
    if (num_taken_ == sizes_.size() || sizes_[num_taken_] != static_cast<uint64_t>(num_bytes))
      return wrong_weights(std::to_string(num_bytes) + " bytes as weight " + std::to_string(num_taken_));
    Buffer weights = Buffer::borrowed(const_cast<uint8_t*>(file_.bytes().data()) + at_, num_bytes);
    ++num_taken_;
    at_ += aligned(num_bytes);
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
  const int64_t num_bytes = weights.num_bytes();
  const std::vector<uint8_t> padding(static_cast<size_t>(aligned(num_bytes) - num_bytes));
  FP4MOE_RETURN_IF_ERROR(new_file_->append({weights.data(), static_cast<size_t>(num_bytes)}));
  sizes_.push_back(static_cast<uint64_t>(num_bytes));
  return new_file_->append(padding);
}

Status WeightCache::finish() {
  if (is_mapped_) {
    if (num_taken_ != sizes_.size()) return wrong_weights(std::to_string(num_taken_) + " weights");
    log_info("weights    " + size_string(total_bytes_) + " mapped from '" + place_.path + "' in " +
             seconds_text(seconds_since(started_)) +
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
  log_info(packed + ", kept in '" + place_.path + "' in " + seconds_text(write_seconds_));
  return {};
}

Status WeightCache::write_index() {
  std::string index = place_.key;
  index.append(reinterpret_cast<const char*>(sizes_.data()), sizes_.size() * sizeof(uint64_t));
  Header header{.version = kVersion,
                .num_weights = static_cast<uint32_t>(sizes_.size()),
                .file_bytes = static_cast<uint64_t>(new_file_->num_bytes()) + index.size(),
                .index_offset = static_cast<uint64_t>(new_file_->num_bytes()),
                .key_bytes = place_.key.size(),
                .index_hash = hash_text(index)};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.header_hash = header_hash(header);
  const auto bytes = [](const void* data, size_t n) {
    return std::span(static_cast<const uint8_t*>(data), n);
  };
  FP4MOE_RETURN_IF_ERROR(new_file_->append(bytes(index.data(), index.size())));
  FP4MOE_RETURN_IF_ERROR(new_file_->overwrite(0, bytes(&header, sizeof header)));
  return new_file_->commit();
}

void WeightCache::give_up(const Status& status) {
  new_file_.reset();
  why_not_ = status.message();
  log_warning("packed weights are not kept: " + status.message());
}

Status WeightCache::wrong_weights(const std::string& what) const {
  return data_loss("'" + place_.path + "' holds " + std::to_string(sizes_.size()) +
                   " weights, but the model asks for " + what +
                   "; remove the file, or start with --weight-cache-dir none");
}

}  // namespace fp4moe
