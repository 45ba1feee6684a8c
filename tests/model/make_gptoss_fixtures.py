"""Makes the gpt_oss fixtures of tests/model/fixtures: tiny random checkpoints with the stock class's logits.

Each fixture is a folder with config.json, safetensors in the gpt-oss MXFP4 dialect and reference.safetensors
(input_ids I64 [T], logits F32 [T, V]), computed in float32 by transformers' GptOssForCausalLM on the
dequantised weights. Needs torch, transformers >= 5 and safetensors; a CPU is enough.

    python3 make_gptoss_fixtures.py OUTPUT_FOLDER
"""
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from fixture_files import save_shards

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64}

# H and I are multiples of the scale block of 32 but, like 2880, not of 64 or 128; windows are shorter than
# the prompt.
FIXTURES = {
    "h192_i96_yarn": dict(
        config=dict(num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=160, hidden_size=192,
                    intermediate_size=96, head_dim=32, num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
                    rope_parameters=YARN),
        num_tokens=40, num_shards=1, old_rope_spelling=False),
    "h160_i224_sharded_old_rope": dict(
        config=dict(num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=3, vocab_size=131, hidden_size=160,
                    intermediate_size=224, head_dim=16, num_attention_heads=6, num_key_value_heads=1, sliding_window=5,
                    rope_parameters=dict(YARN, truncate=True, factor=8.0, beta_fast=16.0)),
        num_tokens=33, num_shards=3, old_rope_spelling=True),
    "h96_i32_plain_rope_top1": dict(
        config=dict(num_hidden_layers=3, num_local_experts=3, num_experts_per_tok=1, vocab_size=101, hidden_size=96,
                    intermediate_size=32, head_dim=64, num_attention_heads=2, num_key_value_heads=2, sliding_window=1,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        num_tokens=21, num_shards=1, old_rope_spelling=False),
}


def to_mxfp4(weight):
    """[..., K] float -> codes packed [..., K/32, 16] u8, scales [..., K/32] u8, and the dequantised values."""
    blocks = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-60))) - 2
    scaled = blocks / torch.exp2(exponent)
    code = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = torch.sign(scaled) * E2M1[code] * torch.exp2(exponent)
    code = (code | (torch.signbit(scaled).long() << 3)).to(torch.uint8)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).contiguous()
    return packed, (exponent.squeeze(-1) + 127).to(torch.uint8), values.flatten(-2)


def randomize(model, generator):
    """Random weights, large enough that logits are of order one and some activations reach the SwiGLU limit."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("sinks"):
            p.copy_(noise)
        elif "layernorm" in name or name.endswith("norm.weight"):
            p.copy_(1 + 0.2 * noise)
        elif "bias" in name:
            p.copy_(0.3 * noise)
        elif name.endswith("gate_up_proj"):
            p.copy_(noise * 3.0 / p.shape[-2] ** 0.5)
        elif name.endswith("down_proj"):
            p.copy_(noise / p.shape[-2] ** 0.5)
        elif "embed_tokens" in name:
            p.copy_(noise)
        else:
            p.copy_(noise / p.shape[-1] ** 0.5)
        p.copy_(p.bfloat16().float())


def export_tensors(model):
    """The state dict in the gpt-oss dialect; sets the model's experts to the dequantised values."""
    tensors = {k: v.detach().bfloat16().contiguous() for k, v in model.state_dict().items()}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)  # [E, in, out]
            packed, scales, values = to_mxfp4(parameter.detach().transpose(1, 2))
            parameter.copy_(values.transpose(1, 2))
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[prefix]
            tensors[prefix + "_blocks"], tensors[prefix + "_scales"] = packed, scales
    return tensors


def config_json(config, old_rope_spelling):
    d = config.to_dict()
    d["architectures"] = ["GptOssForCausalLM"]
    d["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    if old_rope_spelling:
        rope = dict(d.pop("rope_parameters"))
        d["rope_theta"] = rope.pop("rope_theta")
        d["rope_scaling"] = rope
    return json.dumps(d, indent=1, default=str)


def make_fixture(name, spec, folder, seed):
    generator = torch.Generator().manual_seed(seed)
    config = GptOssConfig(eos_token_id=0, pad_token_id=0, **spec["config"])
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = GptOssForCausalLM(config).float().eval()
    with torch.no_grad():
        randomize(model, generator)
        tensors = export_tensors(model)
        ids = torch.randint(0, config.vocab_size, (1, spec["num_tokens"]), generator=generator)
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(tensors, folder, spec["num_shards"])
    save_file({"input_ids": ids[0], "logits": logits.contiguous()}, folder / "reference.safetensors")
    (folder / "config.json").write_text(config_json(config, spec["old_rope_spelling"]))
    print(name, "logits max", float(logits.abs().max()), "transformers", transformers.__version__)


if __name__ == "__main__":
    for seed, (name, spec) in enumerate(FIXTURES.items()):
        make_fixture(name, spec, pathlib.Path(sys.argv[1]) / name, seed)
