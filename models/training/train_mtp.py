"""Trains a layer for multi-token prediction for the deepseek_v3 demo, on the final hidden states of the published FP4
weights, with NVFP4 rounding of its experts in the second half. Writes the demo's folder with the layer as a second
shard: embeddings and head are the target's. Minutes on one GPU, hours on a CPU.

    python3 train_mtp.py ../demo-dsv3-nvfp4 OUTPUT_FOLDER [--steps 4000]
"""
import json
import os
import shutil

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer, DeepseekV3RMSNorm, DeepseekV3RotaryEmbedding, apply_rotary_pos_emb_interleave)

import draft_recipe
import recipe
import train_dsv3
from draft_recipe import TargetPass, chained_attention, shift
from recipe import DEVICE, HIDDEN, VOCAB
from stock_targets import load_target

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


class MtpLayer(nn.Module):
    def __init__(self, target):
        super().__init__()
        config = target.config
        eps = config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(HIDDEN, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.block.load_state_dict(target.model.layers[-1].state_dict())  # start values
        self.name, self.routed = f"model.layers.{config.num_hidden_layers}", []
        train_dsv3.patch_layer(self.block, self.name + ".mlp", self.routed)
        self.rotary = DeepseekV3RotaryEmbedding(config)
        self.embedding, self.head = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
        self.token_ids = torch.arange(VOCAB, device=DEVICE)

    def attention(self, x, positions, keys, values):
        """Multi-head latent attention of x [B, L, H]; appends this step's keys and values, each [B, heads, L, d]."""
        a = self.block.self_attn
        split = lambda y, d: y.unflatten(-1, (-1, d)).transpose(1, 2)
        q = split(a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x))), a.qk_head_dim)
        latent, k_rope = a.kv_a_proj_with_mqa(x).split([a.kv_lora_rank, a.qk_rope_head_dim], -1)
        kv = split(a.kv_b_proj(a.kv_a_layernorm(latent)), a.qk_nope_head_dim + a.v_head_dim)
        k, v = kv.split([a.qk_nope_head_dim, a.v_head_dim], -1)
        q_nope, q_rope = q.split([a.qk_nope_head_dim, a.qk_rope_head_dim], -1)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *self.rotary(x, positions))
        keys.append(torch.cat([k, k_rope.to(k.dtype).expand(-1, k.shape[1], -1, -1)], -1))
        values.append(v)
        out = chained_attention(torch.cat([q_nope, q_rope.to(q.dtype)], -1), keys, values, a.scaling)
        return a.o_proj(out.transpose(1, 2).flatten(-2))

    def run(self, ids, residuals, hidden, num_steps):
        self.routed.clear()
        keys, values, logits = [], [], []
        for k in range(num_steps):
            embedded = nn.functional.embedding(shift(ids, k + 1), self.embedding)
            x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)).float()
            positions = torch.arange(k, k + ids.shape[1], device=ids.device)[None]
            x = x + self.attention(self.block.input_layernorm(x), positions, keys, values)
            x = x + self.block.mlp(self.block.post_attention_layernorm(x))
            hidden = self.norm(x)
            logits.append(nn.functional.linear(hidden, self.head))
        return logits

    def extra_loss(self):
        return 0.01 * recipe.balance_loss(self.routed)


@torch.no_grad()
def tensors(layer, amax):
    names = {"norm.weight": "shared_head.norm.weight"}
    stored = {f"{layer.name}.{names.get(n, n.removeprefix('block.'))}": p.detach().bfloat16().cpu().contiguous()
              for n, p in layer.named_parameters()}
    train_dsv3.put_layer(stored, layer.name + ".mlp", layer.block.mlp, amax)
    return stored


def write_declarations(source, folder, name):
    """Declares the layer in config.json, and its unquantised modules in hf_quant_config.json."""
    with open(os.path.join(source, "config.json")) as f:
        config = json.load(f)
    config["num_nextn_predict_layers"] = 1
    recipe.write_json(folder, "config.json", config)
    with open(os.path.join(source, "hf_quant_config.json")) as f:
        declared = json.load(f)
    excluded = declared["quantization"]["exclude_modules"]
    excluded += [m for m in (name + ".self_attn*", name + ".mlp.gate", name + ".eh_proj") if m not in excluded]
    recipe.write_json(folder, "hf_quant_config.json", declared)


def write_folder(source, folder, layer, amax):
    """Copies the target's folder, with its weights as the first shard, and adds the layer as the second."""
    os.makedirs(folder, exist_ok=True)
    copied = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "reference_accuracy.json",
              "reference_logits.safetensors")
    for file in copied:
        shutil.copy(os.path.join(source, file), folder)
    sharded = os.path.exists(os.path.join(source, SHARDS[0]))
    shutil.copy(os.path.join(source, SHARDS[0] if sharded else "model.safetensors"), os.path.join(folder, SHARDS[0]))
    save_file(tensors(layer, amax), os.path.join(folder, SHARDS[1]), metadata={"format": "pt"})
    stored = [load_file(os.path.join(folder, file)) for file in SHARDS]
    recipe.write_json(folder, INDEX, {
        "metadata": {"total_size": sum(t.nbytes for shard in stored for t in shard.values())},
        "weight_map": {name: file for file, shard in zip(SHARDS, stored) for name in sorted(shard)}})
    write_declarations(source, folder, layer.name)


def begin_step(done):
    train_dsv3.set_mode(done > .45, done > .45, step=1e-3 * (1 - done))


def main():
    args = draft_recipe.parse_args(steps=4000)
    tokenizer = draft_recipe.load_tokenizer(args.target_folder)
    target = load_target(args.target_folder)
    examples = draft_recipe.training_examples(target, tokenizer, args)
    layer, target_pass = MtpLayer(target).to(DEVICE), TargetPass(target)
    num_steps = draft_recipe.train(layer, target_pass, examples, args, begin_step)
    ids, _ = draft_recipe.pad(examples[-64:])
    amax = train_dsv3.calibrate(lambda: layer.run(ids, None, target_pass(ids)[1], draft_recipe.NUM_DRAFTS))
    write_folder(args.target_folder, args.output_folder, layer, amax)
    reference = draft_recipe.reference_acceptance(layer, target_pass, tokenizer, num_steps, args.num_eval)
    draft_recipe.write_reference(args.output_folder, reference)


if __name__ == "__main__":
    main()
