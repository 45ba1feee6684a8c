#include "io/hub_cache.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/check.h"
#include "io/file.h"

namespace fp4moe {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFolderPrefix = "models--";
constexpr size_t kMaxIdBytes = 96;  // the hub's limit for a repository id
constexpr size_t kMaxRevisionBytes = 256;
constexpr int64_t kMaxRefBytes = 4096;  // of a file in refs/, which holds 40 digits

// One component of a repository id or of a revision.
bool is_word(std::string_view word) {
  const bool is_plain = std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return c < 128 && (std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.');
  });
  return is_plain && !word.empty() && word.find("..") == word.npos && word != "." && word.front() != '-';
}

// Whether all components between slashes are words, and their number is at most `most`.
bool is_words(std::string_view text, size_t most) {
  for (size_t count = 1; count <= most; ++count) {
    const size_t slash = text.find('/');
    if (!is_word(text.substr(0, slash))) return false;
    if (slash == text.npos) return true;
    text.remove_prefix(slash + 1);
  }
  return false;
}

bool is_repository_id(std::string_view text) {
  return text.size() <= kMaxIdBytes && text.find("--") == text.npos && is_words(text, 2);
}

// "openai/gpt-oss-20b" -> "models--openai--gpt-oss-20b".
std::string folder_of(std::string id) {
  if (const size_t slash = id.find('/'); slash != id.npos) id.replace(slash, 1, "--");
  return std::string(kFolderPrefix) + id;
}

// The repository id of a models--ORG--NAME folder; empty for any other folder.
std::string id_of(const fs::path& folder) {
  std::string id = folder.filename().string();
  if (!id.starts_with(kFolderPrefix)) return "";
  id.erase(0, kFolderPrefix.size());
  if (const size_t dashes = id.find("--"); dashes != id.npos) id.replace(dashes, 2, "/");
  return is_repository_id(id) ? id : "";
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

std::string download_command(const std::string& id, const std::string& revision) {
  return "`hf download " + id + (revision.empty() ? "" : " --revision " + revision) + "`";
}

// The snapshot of `revision` in a models--ORG--NAME folder.
Result<std::string> find_snapshot(const std::string& folder, const std::string& id,
                                  const std::string& revision) {
  const std::string name = revision.empty() ? "main" : revision;
  if (name.size() > kMaxRevisionBytes || !is_words(name, 8))
    return invalid_argument("--revision '" + name.substr(0, 80) +
                            "' must be a branch, a tag or a commit hash: words of letters, digits, '-', '_' "
                            "and '.', separated by '/'");
  const std::string ref = folder + "/refs/" + name;
  std::string commit = name;
  if (file_exists(ref) && !is_folder(ref)) {
    FP4MOE_ASSIGN_OR_RETURN(commit, read_text_file(ref, kMaxRefBytes));
    commit.erase(commit.find_last_not_of(" \r\n\t") + 1);
    if (!is_word(commit)) return data_loss("'" + ref + "' does not contain a commit hash");
  }
  const std::string snapshot = folder + "/snapshots/" + commit;
  if (is_word(commit) && is_folder(snapshot)) return snapshot;
  return not_found("revision '" + name + "' of " + id + " is not in the hub cache: searched '" + ref +
                   "' and '" + snapshot + "'; " + download_command(id, revision) + " downloads it");
}

// A path that exists. The folders of a hub cache give the model its repository id.
Result<FoundModel> find_path(const std::string& path, const std::string& revision) {
  std::error_code error;
  fs::path whole = fs::absolute(path, error).lexically_normal();
  if (!whole.has_filename()) whole = whole.parent_path();  // of a trailing '/'
  if (const std::string id = id_of(whole); !id.empty() && is_folder(whole / "snapshots")) {
    FP4MOE_ASSIGN_OR_RETURN(const std::string snapshot, find_snapshot(whole.string(), id, revision));
    return FoundModel{snapshot, id};
  }
  if (!revision.empty())
    return invalid_argument("--revision " + revision + ": '" + path +
                            "' is a path with only one revision; legal: a repository id such as "
                            "openai/gpt-oss-20b, or a models--ORG--NAME folder");
  const fs::path parent = whole.parent_path();
  return FoundModel{path, parent.filename() == "snapshots" ? id_of(parent.parent_path()) : ""};
}

}  // namespace

std::string hub_cache_folder(const std::function<const char*(const char* name)>& variable) {
  const auto value = [&variable](const char* name) {
    const char* const text = variable(name);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string folder = value("HF_HUB_CACHE"); !folder.empty()) return folder;
  if (const std::string home = value("HF_HOME"); !home.empty()) return home + "/hub";
  return value("HOME") + "/.cache/huggingface/hub";
}

Result<FoundModel> find_model(const std::string& model, const std::string& revision,
                              const std::string& cache) {
  if (file_exists(model)) return find_path(model, revision);
  if (!is_repository_id(model)) return FoundModel{model, ""};
  const std::string folder = cache + "/" + folder_of(model);
  if (!is_folder(folder))
    return not_found("model '" + model + "': searched the path '" + model + "' and the hub cache's folder '" +
                     folder + "', and neither exists; " + download_command(model, revision) +
                     " downloads it (HF_HUB_CACHE or HF_HOME select another cache)");
  FP4MOE_ASSIGN_OR_RETURN(const std::string snapshot, find_snapshot(folder, model, revision));
  return FoundModel{snapshot, model};
}

}  // namespace fp4moe
