// fp4moe make-tiny: writes a random checkpoint of a published shape or a smaller one.
#include "io/write/make_tiny.h"

#include <cstdio>
#include <memory>

#include "subcommand.h"

namespace fp4moe {

void add_make_tiny(CLI::App& app, int& exit_code) {
  struct Flags {
    std::string folder;
    MakeTinyOptions options;
  };
  CLI::App& subcommand = *app.add_subcommand("make-tiny", "write a random checkpoint of a model's shape");
  const auto flags = std::make_shared<Flags>();
  MakeTinyOptions& o = flags->options;
  subcommand.add_option("out", flags->folder, "folder to write; must be absent or empty")->required();
  subcommand.add_option("--like", o.like, "shape to start from")
      ->check(CLI::IsMember(make_tiny_shapes()))
      ->capture_default_str();
  subcommand
      .add_option("--dialect", o.dialect,
                  "auto, gpt-oss (MXFP4), modelopt (NVFP4), compressed-nvfp4, compressed-mxfp4 or bf16")
      ->capture_default_str();
  subcommand.add_option("--rope-style", o.rope_style, "new (rope_parameters) or old (rope_scaling)")
      ->capture_default_str();
  subcommand.add_option("--seed", o.seed, "seed of the random weights")->capture_default_str();
  subcommand.add_option("--shards", o.num_shards, "number of safetensors files")->capture_default_str();

  const auto size = [&subcommand](const char* name, std::optional<int64_t>& value, const char* help) {
    subcommand.add_option(name, value, help)->group("Sizes (default: as --like)");
  };
  size("--num-hidden-layers", o.num_hidden_layers, "layers");
  size("--hidden-size", o.hidden_size, "H");
  size("--intermediate-size", o.intermediate_size, "I of one expert");
  size("--num-experts", o.num_experts, "experts");
  size("--top-k", o.top_k, "experts per token");
  size("--num-heads", o.num_heads, "query heads");
  size("--num-kv-heads", o.num_kv_heads, "key and value heads");
  size("--head-dim", o.head_dim, "size of a head");
  size("--vocab-size", o.vocab_size, "rows of the embedding");
  size("--sliding-window", o.sliding_window, "tokens (gpt-oss)");
  size("--max-position-embeddings", o.max_position_embeddings, "tokens of context");
  size("--dense-intermediate-size", o.dense_intermediate_size,
       "I of layers without experts (deepseek, qwen3)");
  size("--num-dense-layers", o.num_dense_layers, "layers without experts (deepseek)");
  size("--num-groups", o.num_groups, "groups of experts (deepseek)");
  size("--top-k-groups", o.top_k_groups, "groups per token (deepseek)");
  subcommand.callback([flags, &exit_code] {
    const Status status = make_tiny(flags->folder, flags->options);
    if (!status.ok()) {
      exit_code = report_error(status);
      return;
    }
    std::printf("wrote %s\n", flags->folder.c_str());
  });
}

}  // namespace fp4moe
