// Gathers the facts of doctor_checks.h.
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/buffer.h"
#include "device/device.h"
#include "device/device_info.h"
#include "device/library.h"
#include "engine/startup/memory_plan.h"
#include "engine/startup/user_cache.h"
#include "inspect/doctor_checks.h"
#include "io/checkpoint/unused_tensors.h"
#include "io/jinja/chat_template.h"
#include "io/tokenizer/tokenizer.h"
#include "io/write/dummy_checkpoint.h"
#include "model/plan_model.h"

namespace fp4moe {
namespace {

namespace fs = std::filesystem;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Returns the word in brackets, such as "madvise" in "always [madvise] never".
std::string chosen_word(const std::string& line) {
  const size_t begin = line.find('['), end = line.find(']');
  return begin == line.npos || end == line.npos ? "" : line.substr(begin + 1, end - begin - 1);
}

int count_nodes() {
  std::error_code error;
  int count = 0;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    count +=
        name.starts_with("node") && name.size() > 4 && std::isdigit(static_cast<unsigned char>(name[4])) != 0;
  }
  return std::max(count, 1);
}

int64_t limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return -1;
  return static_cast<int64_t>(limit.rlim_cur);
}

std::string errno_text() { return std::strerror(errno); }

// Checks that files can be created in the cache folder; creates the folder if it is absent.
void look_at_cache(MachineFacts& facts) {
  facts.cache_folder = user_cache_folder();
  if (facts.cache_folder.empty()) return;
  std::error_code error;
  fs::create_directories(facts.cache_folder, error);
  if (error) {
    facts.cache_error = error.message();
    return;
  }
  const std::string path = facts.cache_folder + "/doctor.XXXXXX";
  std::vector<char> name(path.begin(), path.end());
  name.push_back('\0');
  const int file = mkstemp(name.data());
  if (file < 0) {
    facts.cache_error = errno_text();
    return;
  }
  close(file);
  unlink(name.data());
  facts.cache_free_bytes = static_cast<int64_t>(fs::space(facts.cache_folder, error).available);
}

std::string listen_error(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno_text();
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  std::string error;
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 || listen(fd, 1) != 0)
    error = errno_text();
  close(fd);
  return error;
}

// Accepts any number, because a container can have only some of a machine's GPUs.
bool has_gpu_file() {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("nvidia") && name.find_first_of("0123456789") == 6) return true;
  }
  return false;
}

void look_at_gpu(MachineFacts& facts) {
  facts.has_gpu_file = has_gpu_file();
  const Result<DeviceInfo> gpu = device_info(gpu_of_rank(0));
  if (gpu.ok())
    facts.gpu = fmt::format("{}, compute capability {}, {:.0f} GiB, driver for CUDA {}", gpu->name,
                            static_cast<double>(gpu->compute_capability) / 10,
                            static_cast<double>(gpu->memory_bytes) / (1 << 30),
                            cuda_version_text(gpu->driver_version));
  else
    facts.gpu_error = gpu.status().message();
  for (const auto& [name, id] : {std::pair{"cublaslt", LibraryId::kCublasLt},
                                 {"cudnn", LibraryId::kCudnn},
                                 {"nccl", LibraryId::kNccl}}) {
    const Result<Library> library = Library::open(id);
    facts.libraries.push_back(
        {name, library.ok() ? library->path() : "", library.ok() ? "" : library.status().message()});
  }
}

std::string find_in_path(const std::string& name) {
  const char* path = getenv("PATH");
  std::stringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/" + name).c_str(), X_OK) == 0) return folder + "/" + name;
  return {};
}

Check of_status(const char* name, const Status& status, std::string detail, std::string fix) {
  if (status.ok()) return {CheckLevel::kOk, name, std::move(detail), {}};
  return {CheckLevel::kFail, name, status.message(), std::move(fix)};
}

Check check_tensors(const Checkpoint& checkpoint, const ModelConfig& config) {
  const UnusedTensors unused = find_unused_tensors(checkpoint, config);
  if (!unused.in_model.empty())
    return {CheckLevel::kFail, "tensors", describe_unused_tensors(unused.in_model, config),
            "use the config.json that the weights were saved with, or --allow-unused-tensors to serve them "
            "anyway"};
  if (!unused.elsewhere.empty())
    return {CheckLevel::kWarn, "tensors", describe_unused_tensors(unused.elsewhere, config),
            "no action is needed if only the language model is used"};
  return {CheckLevel::kOk, "tensors", "all tensors are used", {}};
}

// Measures how fast the start of the file can be read, after dropping it from the page cache.
Check check_disk(const std::string& path, int64_t checkpoint_bytes) {
  constexpr int64_t kMost = int64_t{256} << 20, kPiece = int64_t{8} << 20;
  constexpr double kSlow = 500e6;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return {CheckLevel::kFail, "disk", path + ": " + errno_text(),
            "give this user read access to the folder"};
  posix_fadvise(file, 0, kMost, POSIX_FADV_DONTNEED);
  std::vector<char> piece(static_cast<size_t>(kPiece));
  const auto start = std::chrono::steady_clock::now();
  int64_t done = 0;
  while (done < kMost) {
    const ssize_t n = read(file, piece.data(), piece.size());
    if (n <= 0) break;
    done += n;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  close(file);
  const double rate = static_cast<double>(done) / std::max(seconds, 1e-9);
  const std::string detail = fmt::format("{:.2f} GB/s: {:.1f} s for all weights", rate / 1e9,
                                         static_cast<double>(checkpoint_bytes) / rate);
  if (rate<kSlow&& static_cast<double>(checkpoint_bytes) / rate> 10)
    return {CheckLevel::kWarn, "disk", detail, "use a local NVMe disk, which reads several GB/s"};
  return {CheckLevel::kOk, "disk", detail, {}};
}

}  // namespace

MachineFacts gather_facts(int port) {
  MachineFacts facts;
  facts.cpu = cpu_model_name();
  facts.isa = best_isa();
  facts.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  facts.usable_cores = available_cores();
  facts.numa_nodes = count_nodes();
  facts.balances_numa = first_line("/proc/sys/kernel/numa_balancing") == "1";
  facts.governor = first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  facts.huge_pages = chosen_word(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  struct sysinfo system {};
  if (sysinfo(&system) == 0)
    facts.memory_bytes = static_cast<int64_t>(system.totalram) * static_cast<int64_t>(system.mem_unit);
  facts.available_bytes = available_memory_bytes();
  facts.memlock_bytes = limit_of(RLIMIT_MEMLOCK);
  facts.open_files = limit_of(RLIMIT_NOFILE);
  look_at_cache(facts);
  look_at_gpu(facts);
  facts.mpirun = find_in_path("mpirun");
  facts.port = port;
  facts.port_error = listen_error(port);
  return facts;
}

std::vector<Check> check_model(const std::string& model_path) {
  std::vector<Check> checks;
  EngineConfig flags;
  flags.model_path = model_path;
  const Result<ModelConfig> config = load_model_config(model_path);
  checks.push_back(of_status("config", config.status(), config.ok() ? config->architecture : "",
                             "use a folder with the published config.json"));
  if (!config.ok()) return checks;
  const Result<ModelPlan> plan = plan_model(*config, flags);
  checks.push_back(of_status("plan", plan.status(), plan.ok() ? summary(plan->moe) : "",
                             "fp4moe backends --model MODEL shows the supported combinations"));
  const Result<Tokenizer> tokenizer = Tokenizer::load(model_path);
  checks.push_back(of_status(
      "tokenizer", tokenizer.status(), tokenizer.ok() ? fmt::format("{} ids", tokenizer->vocab_size()) : "",
      "put tokenizer.json, or tiktoken.model and tokenizer_config.json, next to config.json"));
  const Result<ChatTemplate> chat = ChatTemplate::load(model_path, "");
  const Result<std::string> rendered =
      chat.ok() ? chat->render(R"([{"role": "user", "content": "Hello"}])", {}) : chat.status();
  checks.push_back(of_status("chat_template", rendered.status(), "renders a message",
                             "set --chat-template FILE, or use /v1/completions, which needs no template"));
  const Result<Checkpoint> checkpoint = open_weights(model_path, flags.load_format, *config);
  checks.push_back(of_status("weights", checkpoint.status(),
                             checkpoint.ok()
                                 ? fmt::format("{} tensors, {:.2f} GB", checkpoint->tensors().size(),
                                               static_cast<double>(checkpoint->total_bytes()) / 1e9)
                                 : "",
                             "download the folder again"));
  if (checkpoint.ok()) checks.push_back(check_tensors(*checkpoint, *config));
  if (!checkpoint.ok() || !plan.ok()) return checks;
  const Result<MemoryProblem> problem = memory_problem(*checkpoint, *config, *plan, plan->flags);
  const Result<MemoryPlan> memory = problem.ok() ? plan_memory(*problem, plan->flags) : problem.status();
  checks.push_back(of_status(
      "fits", memory.status(),
      memory.ok() ? fmt::format("with a KV pool of {} tokens", memory->num_kv_pages * plan->flags.page_size)
                  : "",
      "fp4moe plan MODEL shows how the memory is used"));
  const TensorEntry* largest = &checkpoint->tensors().front();
  for (const TensorEntry& tensor : checkpoint->tensors())
    if (tensor.view.num_bytes() > largest->view.num_bytes()) largest = &tensor;
  checks.push_back(check_disk(model_path + "/" + largest->file, checkpoint->total_bytes()));
  return checks;
}

}  // namespace fp4moe
