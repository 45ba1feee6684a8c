"""Compares random configurations of the newer families with the stock classes: for each family and seed, makes a
checkpoint as make_moe_fixtures.py does, runs `fp4moe logits` on one and on two ranks (for delta nets also on four,
and with several cuts of the prompt), and prints the relative errors of the logits. Exits with 1 if the reference
runner exceeds 1e-4 anywhere, or the default runner 5e-2. A prompt of several chunks has too many routing decisions for
that: there, the default runner's median may be at most 3e-2 and that of the stock class in bf16.

    python3 random_families.py FP4MOE_BINARY [--families glm4_moe ...] [--seeds 0 1 2] [--ranks 1 2] [--device cpu|cuda]

With `--device cuda` the variable FP4MOE_RANKS_PER_GPU=2 puts two ranks on one GPU; layouts that a GPU refuses are
printed.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

import make_moe_fixtures as fixtures

REFERENCE_LIMIT, DEFAULT_LIMIT, MEDIAN_LIMIT = 1e-4, 5e-2, 3e-2
CHUNKS = [1, 63, 64, 65]  # rows of a step, for delta nets
REFUSED = 3  # exit code


def rope(pick, theta, partial=None):
    """Plain RoPE or YaRN with a short original context."""
    out = {"rope_type": "default", "rope_theta": theta}
    if pick([False, True]):
        out = {"rope_type": "yarn", "rope_theta": theta, "factor": pick([2.0, 8.0, 40.0]), "beta_fast": pick([1.0, 32.0]),
               "beta_slow": 1.0, "original_max_position_embeddings": pick([8, 16])}
    if partial is not None:
        out["partial_rotary_factor"] = partial
    return out


def deepseek_moe(pick):
    groups = pick([1, 2, 3])
    in_group = pick([3, 4, 5])
    return dict(n_routed_experts=groups * in_group, n_group=groups, topk_group=pick(range(1, groups + 1)),
                num_experts_per_tok=pick([1, 2, 3]), n_shared_experts=pick([1, 2]),
                routed_scaling_factor=pick([1.0, 1.8, 2.827]), norm_topk_prob=pick([False, True]))


def latent_attention(pick):
    heads = pick([2, 4, 6])
    return dict(num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=pick([None, 24, 40]),
                kv_lora_rank=pick([24, 40]), qk_nope_head_dim=pick([16, 32]), qk_rope_head_dim=8,
                v_head_dim=pick([16, 24]), rope_interleave=pick([False, True]), attention_bias=pick([False, True]))


def grouped_attention(pick):
    kv = pick([1, 2])
    return dict(num_attention_heads=kv * pick([2, 4, 6]), num_key_value_heads=kv, attention_bias=pick([False, True]))


DELTA_NETS = ["qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"]


def is_delta_net(family):
    return family in DELTA_NETS


LAYER_TYPES = [["linear", "full", "linear", "linear"], ["full", "linear", "linear", "full"],
               ["linear", "linear", "full", "linear"], ["linear", "full"]]


def delta_net(family, pick, seed):
    """Three seeds have each ratio of value heads to key heads, and four each list of layers."""
    key_heads = 4  # for 4 ranks
    types = [kind + "_attention" for kind in LAYER_TYPES[seed % 4]]
    kv = pick([1, 2, 4])
    head_dim, partial = pick([(16, 0.5), (24, 0.25), (32, 0.25), (48, 0.25), (16, 1.0), (80, 0.15)])
    config = dict(num_hidden_layers=len(types), layer_types=types, linear_num_key_heads=key_heads,
                  linear_num_value_heads=key_heads * [1, 2, 4][(seed + seed // 9) % 3], linear_key_head_dim=pick([8, 12, 20, 36]),
                  linear_value_head_dim=pick([6, 10, 24, 40]), linear_conv_kernel_dim=pick([4, 4, 3, 2]),
                  num_attention_heads=4 * pick([1, 2]), num_key_value_heads=kv, head_dim=head_dim,
                  num_experts=pick([5, 7, 8]), num_experts_per_tok=pick([1, 2, 3]),
                  moe_intermediate_size=pick([128, 160]), shared_expert_intermediate_size=pick([128, 160]),
                  max_position_embeddings=512,
                  rope_parameters=rope(pick, 1e7, partial))
    if family == "qwen3_next":
        return config | dict(norm_topk_prob=pick([False, True]), decoder_sparse_step=pick([1, 1, 2]),
                             mlp_only_layers=pick([[], [0]]))
    half = int(head_dim * partial) // 2
    config["rope_parameters"].update(mrope_section=[half - 2 * (half // 3), half // 3, half // 3], mrope_interleaved=True)
    return config


def delta_net_dialect(family, seed):
    """What the exports quantise beside the experts, and how they store bf16 experts. A family has each in nine seeds, and
    the families together in three."""
    by_tensor, by_row = ({"*.self_attn.*": kind, "*.linear_attn.*_proj*": kind} for kind in ("tensor", "row"))
    dialects = [
        dict(dialect="modelopt"), dict(dialect="modelopt_fused"), dict(dialect="compressed_nvfp4"),
        dict(dialect="compressed_mxfp4"), dict(dialect="bf16" if family == "qwen3_next" else "bf16_fused_rows"),
        dict(dialect="quark_mxfp4", fp8=by_tensor, kept=("in_proj_a", "in_proj_ba", "k_proj")),
        dict(dialect="modelopt_mixed", fp8=by_tensor, quantised_attention=("lm_head",)),
        dict(dialect="compressed_nvfp4_fp8", fp8={**by_row, "lm_head": "row"}),
        dict(dialect="modelopt", quantised_attention=("k_proj", "q_proj", "in_proj_qkv", "in_proj_z", "in_proj_b",
                                                      "in_proj_a", "in_proj_qkvz", "in_proj_ba"))]
    return dialects[(seed + 3 * DELTA_NETS.index(family)) % len(dialects)]


def text_config(family, pick, seed):
    layers = 3
    config = dict(num_hidden_layers=layers, vocab_size=pick([67, 101, 131]), hidden_size=pick([96, 160]),
                  intermediate_size=pick([96, 160]), moe_intermediate_size=pick([64, 96]), max_position_embeddings=128,
                  tie_word_embeddings=pick([False, True]), rms_norm_eps=pick([1e-5, 1e-6]))
    if is_delta_net(family):
        return config | delta_net(family, pick, seed)
    if family == "glm4_moe":
        head_dim, partial = pick([(16, 0.5), (32, 0.5), (48, 0.25), (64, 0.5), (16, 1.0), (80, 0.15)])
        return config | deepseek_moe(pick) | grouped_attention(pick) | dict(
            head_dim=head_dim, use_qk_norm=pick([False, True]), first_k_dense_replace=pick([0, 1, 2]),
            rope_parameters=rope(pick, pick([1e4, 1e6]), partial))
    if family == "qwen3_vl_moe":
        return config | grouped_attention(pick) | dict(
            head_dim=16, num_experts=pick([5, 7, 8]), num_experts_per_tok=pick([1, 2, 3]),
            decoder_sparse_step=pick([1, 2]), mlp_only_layers=pick([[], [0]]),
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": pick([[4, 2, 2], [2, 3, 3]]),
                             "mrope_interleaved": True})
    config |= deepseek_moe(pick) | latent_attention(pick) | dict(rope_parameters=rope(pick, 5e4))
    if family == "glm4_moe_lite":
        types = ["dense" if pick([True, False]) else "sparse" for _ in range(layers - 1)] + ["sparse"]
        return config | dict(mlp_layer_types=pick([None, types]))
    if config["rope_parameters"]["rope_type"] == "yarn" and pick([False, True]):
        config["rope_parameters"].update(mscale=1.0, mscale_all_dim=pick([0.5, 1.0]))
    return config | dict(first_k_dense_replace=pick([0, 1, 2]))


def random_spec(family, seed):
    pick = random.Random(f"{family} {seed}").choice
    dialect = pick(["modelopt", "modelopt_fused", "compressed_nvfp4", "compressed_mxfp4"])
    spec = dict(fixtures.FAMILIES[family], dialect=dialect, num_tokens=pick([23, 37]), num_shards=pick([1, 3]),
                old_rope_spelling=pick([False, True]), config=text_config(family, pick, seed))
    if is_delta_net(family):
        spec.update(delta_net_dialect(family, seed), num_tokens=pick([129, 150, 193]))
        if "lm_head" in [*spec.get("quantised_attention", ()), *spec.get("fp8", ())]:
            spec["config"]["tie_word_embeddings"] = False
        if family == "qwen3_5_moe":
            stock_reader = spec["dialect"].startswith("bf16")  # knows one prefix
            spec["text_prefix"] = pick(["model.language_model.", "language_model."][:1 if stock_reader else 2])
    if "text_prefix" in spec:
        spec["prefix_without_model"] = pick([False, True])
    return spec


def run(binary, folder, expected, flags):
    ids, out = folder / "ids.json", folder / "logits.out"
    ids.write_text(json.dumps(expected["ids"].tolist()))
    command = [binary, "logits", str(folder), "--input-ids", str(ids), "--output", str(out), "--fp4-compute", "w4a16",
               "--threads", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == REFUSED and "cuda" in flags:
        print("   refused:", done.stderr.strip())
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return errors_of(load_file(out)["logits"], expected)


def cuts_change_bits(binary, folder, expected, flags):
    """The numbers of rows in a step with which the logits differ from those of one step."""
    def logits(chunk):
        run(binary, folder, expected, flags + ["--chunked-prefill-size", str(chunk)])
        return load_file(folder / "logits.out")["logits"]
    whole = logits(len(expected["ids"]))
    return [chunk for chunk in CHUNKS if not torch.equal(logits(chunk), whole)]


def errors_of(logits, expected):
    errors = (logits - expected["logits_w4a16"]).norm(dim=1) / expected["logits_w4a16"].norm(dim=1)
    return float(errors.max()), float(errors.median())


def stock_bf16_errors(fixture, expected):
    """The errors of the stock class with the same weights, computed in bf16: what bf16 activations cost at least."""
    fixture.model.to(torch.bfloat16)
    return errors_of(fixture.forward(expected["ids"][None]), expected)


def compare(args, family, seed):
    """Prints the errors; returns whether all are within their limits."""
    spec, binary, device, good = random_spec(family, seed), args.binary, args.device, True
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        fixture = fixtures.make_fixture(f"{family}-{seed}", spec, folder, num_seeds=8)
        expected = load_file(folder / "expected.safetensors")
        stock = stock_bf16_errors(fixture, expected)
        print("   stock class in bf16: max %.1e median %.1e" % stock)
        for ranks in args.ranks + ([4] if is_delta_net(family) and 4 not in args.ranks else []):
            flags = ["--device", device, "--tp-size", str(ranks)]
            errors = run(binary, folder, expected, flags)
            if errors is None:
                continue
            line = f"   R = {ranks}: {device} max {errors[0]:.1e} median {errors[1]:.1e}"
            good = good and (errors[1] <= min(MEDIAN_LIMIT, stock[1]) if is_delta_net(family) else errors[0] <= DEFAULT_LIMIT)
            if device == "cpu":
                runner = "ref_bf16" if spec["dialect"].startswith("bf16") else "ref"
                most, _ = run(binary, folder, expected, flags + ["--dtype", "float32", "--moe-runner-backend", runner])
                line, good = line + f", ref max {most:.1e}", good and most <= REFERENCE_LIMIT
                if is_delta_net(family):
                    moved = cuts_change_bits(binary, folder, expected, flags)
                    line, good = line + f", steps that move bits {moved}", good and not moved
            print(line, flush=True)
    return good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--families", nargs="+", default=list(fixtures.FAMILIES), choices=list(fixtures.FAMILIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        good = [compare(args, family, seed) for family in args.families for seed in args.seeds]
    print(f"{sum(good)} of {len(good)} configurations are within the limits")
    return not all(good)


if __name__ == "__main__":
    sys.exit(main())
