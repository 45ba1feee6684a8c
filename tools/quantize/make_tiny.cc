// fp4moe make-tiny: writes a random checkpoint with a published model's dims or smaller ones.
#include "io/write/make_tiny.h"

#include <cstdio>
#include <memory>

#include "io/write/make_tiny_eagle3.h"
#include "subcommand.h"

namespace fp4moe {
namespace {

// The options of a draft model, which exclude those of a whole model except the seed.
void add_head_options(CLI::App& subcommand, MakeTinyEagle3Options& head) {
  std::vector<CLI::Option*> others = subcommand.get_options([](const CLI::Option* option) {
    const std::string name = option->get_name();
    return name != "out" && name != "--seed" && !name.starts_with("--help");
  });
  constexpr const char* kGroup = "EAGLE-3 head";
  CLI::Option* const target =
      subcommand
          .add_option("--eagle3-head", head.target,
                      "write a random EAGLE-3 head for the model in this folder instead of a model")
          ->type_name("FOLDER")
          ->group(kGroup);
  for (CLI::Option* other : others) target->excludes(other);
  subcommand
      .add_option("--eagle3-config", head.changes,
                  "JSON object with keys that replace those of the head's config.json")
      ->capture_default_str()
      ->needs(target)
      ->group(kGroup);
}

void add_size_options(CLI::App& subcommand, MakeTinyOptions& o) {
  const auto size = [&subcommand](const char* name, std::optional<int64_t>& value, const char* help) {
    subcommand.add_option(name, value, help)->group("Sizes (default: those of --like)");
  };
  size("--num-hidden-layers", o.num_hidden_layers, "number of layers");
  size("--hidden-size", o.hidden_size, "hidden size (H)");
  size("--intermediate-size", o.intermediate_size, "intermediate size (I) of one expert");
  size("--num-experts", o.num_experts, "number of experts");
  size("--top-k", o.top_k, "experts per token");
  size("--num-heads", o.num_heads, "number of query heads");
  size("--num-kv-heads", o.num_kv_heads, "number of key and value heads");
  size("--head-dim", o.head_dim, "size of a head");
  size("--vocab-size", o.vocab_size, "vocabulary size");
  size("--sliding-window", o.sliding_window, "sliding window in tokens (gpt-oss)");
  size("--max-position-embeddings", o.max_position_embeddings, "maximum context in tokens");
  size("--dense-intermediate-size", o.dense_intermediate_size,
       "intermediate size (I) of layers without experts (deepseek, glm, kimi, qwen3)");
  size("--num-dense-layers", o.num_dense_layers, "number of layers without experts (deepseek, glm, kimi)");
  size("--num-groups", o.num_groups, "number of expert groups (deepseek, glm, kimi)");
  size("--top-k-groups", o.top_k_groups, "expert groups per token (deepseek, glm, kimi)");
  size("--num-nextn-predict-layers", o.num_mtp_layers,
       "number of layers for multi-token prediction (deepseek, glm, kimi)");
}

}  // namespace

void add_make_tiny(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string folder;
    MakeTinyOptions options;
    MakeTinyEagle3Options head;
  };
  CLI::App& subcommand =
      *app.add_subcommand("make-tiny", "Write a random checkpoint with the dims of a published model");
  const auto flags = std::make_shared<Flags>();
  MakeTinyOptions& o = flags->options;
  subcommand.add_option("out", flags->folder, "output folder; must be absent or empty")
      ->required()
      ->type_name("FOLDER");
  subcommand.add_option("--like", o.like, "published model that sets the default dims")
      ->check(CLI::IsMember(make_tiny_shapes()))
      ->capture_default_str();
  subcommand
      .add_option("--dialect", o.dialect,
                  "checkpoint format: auto, gpt-oss (MXFP4), modelopt (NVFP4), compressed-nvfp4, "
                  "compressed-mxfp4 or bf16")
      ->type_name("TEXT:{auto,gpt-oss,modelopt,compressed-nvfp4,compressed-mxfp4,bf16}")
      ->capture_default_str();
  subcommand
      .add_option("--rope-style", o.rope_style,
                  "RoPE field in config.json: new (rope_parameters) or old (rope_scaling)")
      ->type_name("TEXT:{new,old}")
      ->capture_default_str();
  subcommand
      .add_option("--tokenizer", o.tokenizer,
                  "tokenizer file: json (tokenizer.json) or tiktoken (tiktoken.model)")
      ->type_name("TEXT:{json,tiktoken}")
      ->capture_default_str();
  subcommand.add_option("--seed", o.seed, "seed for the random weights")->capture_default_str();
  subcommand.add_option("--shards", o.num_shards, "number of safetensors files")->capture_default_str();

  add_size_options(subcommand, o);
  add_head_options(subcommand, flags->head);
  subcommand.callback([flags, &exit_code] {
    flags->head.seed = flags->options.seed;
    const Status status = flags->head.target.empty() ? make_tiny(flags->folder, flags->options)
                                                     : make_tiny_eagle3(flags->folder, flags->head);
    if (!status.ok()) {
      exit_code = report_error(status);
      return;
    }
    std::printf("wrote %s\n", flags->folder.c_str());
  });
}

}  // namespace fp4moe
