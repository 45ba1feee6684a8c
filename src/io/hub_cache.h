// Finds a model by its Hugging Face repository id in the local hub cache, in which huggingface_hub stores
// CACHE/models--ORG--NAME/refs/REVISION, a file with a commit hash, and the checkpoint folder
// CACHE/models--ORG--NAME/snapshots/COMMIT, whose files are links to blobs. Downloads nothing.
#pragma once

#include <functional>
#include <string>

#include "fp4moe/status.h"

namespace fp4moe {

// The hub cache's folder: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub, with ~ from HOME.
// `variable` returns an environment variable's value, or null.
std::string hub_cache_folder(const std::function<const char*(const char* name)>& variable);

struct FoundModel {
  std::string path;  // folder of the checkpoint
  std::string name;  // repository id; empty for a path outside a hub cache
};

// Resolves `model`: an existing path, or else a repository id ("openai/gpt-oss-20b") in `cache`. A path can
// also be a models--ORG--NAME folder or a folder below its snapshots/. A missing path that is not a legal id
// is returned unchanged. `revision` is a branch, a tag or a commit hash; empty: main.
// kNotFound: no such model or revision; the message names the searched folders and the command that downloads
// the model. kInvalidArgument: an illegal revision, or a revision of a path that has only one.
Result<FoundModel> find_model(const std::string& model, const std::string& revision,
                              const std::string& cache);

}  // namespace fp4moe
