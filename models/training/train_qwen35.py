"""Trains the qwen3_5_moe demo on one GPU, with NVFP4 rounding of experts, their inputs and the head, and FP8 rounding
of the other projections, in the loop for the second half, and writes the checkpoint in the form of ModelOpt's
MIXED_PRECISION exports, its reference logits and its accuracies (transformers >= 5.2, the stock Qwen3_5MoeForCausalLM
class).

    python3 train_qwen35.py TOKENIZER_FOLDER OUTPUT_FOLDER [--steps 1451]
"""
import types

import torch
from torch import nn
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

import nvfp4
import recipe
import train_dsv3
from recipe import DEVICE, HIDDEN, VOCAB
from train_dsv3 import expert_linears, put_mlp, rounded_weight, straight_through

EXPERTS, TOP_K, CHUNK = 8, 2, 64
NUM_LOGITS = 60  # rows of each prompt's reference logits: the last ones, so that they depend on several chunks


def make_config():
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, linear_conv_kernel_dim=4, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=4, linear_num_value_heads=8, moe_intermediate_size=128,
        shared_expert_intermediate_size=64, num_experts_per_tok=TOP_K, num_experts=EXPERTS,
        layer_types=["linear_attention"] * 3 + ["full_attention"], max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **recipe.TOKEN_IDS)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    return config


@torch.autocast(DEVICE, enabled=False)
def chunked_rule(query, key, value, g, beta, **_):
    """The gated delta rule from a zero state, by a triangular solve for each chunk: the stock class's function of this
    signature, faster in training. q, k [B, L, Hk, dk], v [B, L, Hv, dv], g, beta [B, L, Hv], L a multiple of CHUNK."""
    groups = value.shape[2] // key.shape[2]
    unit = lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    split = lambda x: x.float().unflatten(1, (-1, CHUNK)).movedim(3, 1)  # [B, heads, chunks, CHUNK, ...]
    q = split(unit(query.float()).repeat_interleave(groups, 2)) * query.shape[-1] ** -0.5
    k, v = split(unit(key.float()).repeat_interleave(groups, 2)), split(value)
    beta, total = split(beta)[..., None], split(g).cumsum(-1)[..., None]
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total - total.transpose(-1, -2)).masked_fill(~causal, -torch.inf).exp()
    mixing = torch.eye(CHUNK, device=q.device) + (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    solved = torch.linalg.solve_triangular(mixing, beta * torch.cat([v, k * total.exp()], -1), upper=False,
                                           unitriangular=True)
    updates, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.transpose(-1, -2)) * decay
    state, outputs = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1], device=q.device), []
    for n in range(v.shape[2]):
        new = updates[:, :, n] - carried[:, :, n] @ state
        outputs.append((q[:, :, n] * total[:, :, n].exp()) @ state + scores[:, :, n] @ new)
        last = total[:, :, n, -1:]
        state = last.exp() * state + (k[:, :, n] * (last - total[:, :, n]).exp()).transpose(-1, -2) @ new
    return torch.stack(outputs, 2).movedim(1, 3).flatten(1, 2).to(value.dtype), None


def fp8_scale(w):
    return w.abs().amax().float() / 448


def rounded_fp8(w):
    scale = fp8_scale(w)
    return ((w / scale).to(torch.float8_e4m3fn).float() * scale).to(w.dtype)


def rounded_forward(rounded):
    def forward(self, x):
        w = straight_through(self.weight, rounded(self.weight.detach())) if train_dsv3.quantise_weights else self.weight
        return nn.functional.linear(x, w)
    return forward


def fp8_linears(model):
    """Yields the names and modules of the projections that are stored in FP8."""
    for name, module in model.named_modules():
        if name.endswith(("_proj", "in_proj_qkv", "in_proj_z")) and ("self_attn" in name or "linear_attn" in name):
            yield name, module


def patch(model):
    """Returns the list that collects (probabilities, chosen experts) in a forward pass."""
    routed = []
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        experts.recipe_name = f"model.layers.{i}.mlp.experts"
        experts.forward = types.MethodType(train_dsv3.dense_experts, experts)
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out: routed.append((out[0].float().softmax(-1), out[2])))
    for _, module in fp8_linears(model):
        module.forward = types.MethodType(rounded_forward(rounded_fp8), module)
    model.lm_head.forward = types.MethodType(rounded_forward(rounded_weight), model.lm_head)
    return routed


def begin_step(done):
    train_dsv3.set_mode(done > .45, done > .45)


@torch.no_grad()
def checkpoint_tensors(model, amax):
    tensors = recipe.bf16_tensors(model)
    for name, module in fp8_linears(model):
        scale = fp8_scale(module.weight)
        tensors[name + ".weight"] = (module.weight / scale).to(torch.float8_e4m3fn).cpu()
        tensors[name + ".weight_scale"] = scale.cpu()
    scale = nvfp4.tensor_scale(model.lm_head.weight.abs().amax())
    codes, block = nvfp4.pack(model.lm_head.weight, scale)
    tensors.update({"lm_head.weight": codes.cpu(), "lm_head.weight_scale": block.cpu(),
                    "lm_head.weight_scale_2": scale.reshape(()).cpu()})
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}.mlp.experts"
        del tensors[name + ".gate_up_proj"], tensors[name + ".down_proj"]
        for e in range(EXPERTS):
            used = [amax[name, a][e].clamp_min(1e-3) for a in ("a1", "a2")]
            put_mlp(tensors, f"{name}.{e}", expert_linears(layer.mlp.experts, e), used)
    return {published(name): value for name, value in tensors.items()}


def published(name):
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def published_config(config):
    """The nested form in which multimodal checkpoints of this family declare their language model."""
    return types.SimpleNamespace(to_dict=lambda: {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": config.to_dict(), "tie_word_embeddings": False})


def declaration(model):
    layers = {f"model.layers.{i}.mlp.experts.{e}.{part}_proj": {"quant_algo": "NVFP4", "group_size": 16}
              for i in range(len(model.model.layers)) for e in range(EXPERTS) for part in ("gate", "up", "down")}
    layers |= {name: {"quant_algo": "FP8"} for name, _ in fp8_linears(model)}
    layers = {published(name): algorithm for name, algorithm in layers.items()}
    layers["lm_head"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    return {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": {
        "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}}


@torch.no_grad()
def stock_model(model, config):
    """Returns the stock class in float32 with dequantised weights, as a function of input ids."""
    state = dict(model.state_dict())
    for name, module in fp8_linears(model):
        state[name + ".weight"] = rounded_fp8(module.weight)
    for name in state:
        if name == "lm_head.weight" or name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = rounded_weight(state[name])
    reference = stock.Qwen3_5MoeForCausalLM(config).to(DEVICE).float().eval()
    reference.load_state_dict(state)
    return lambda ids: reference(input_ids=ids, use_cache=False, logits_to_keep=NUM_LOGITS).logits[0]


def main():
    args, tokenizer = recipe.parse_args(steps=1451)
    config = make_config()
    model = stock.Qwen3_5MoeForCausalLM(config).to(DEVICE).float()
    data = recipe.load_data(args.tokenizer_folder)
    stock_rule, stock.torch_chunk_gated_delta_rule = stock.torch_chunk_gated_delta_rule, chunked_rule
    recipe.train(model, data, args, patch(model), begin_step)
    stock.torch_chunk_gated_delta_rule = stock_rule
    amax = train_dsv3.calibrate(lambda: model.model(input_ids=data(64)[0], use_cache=False))
    scores = {}
    for name, weights, activations in (("bf16", False, False), ("w4a16", True, False), ("w4a4", True, True)):
        train_dsv3.set_mode(weights, activations)
        scores[name] = recipe.accuracy(model, tokenizer, args.num_eval)
    recipe.write_scores(scores, args)
    recipe.write_files(published_config(config), checkpoint_tensors(model, amax), None, args)
    recipe.write_json(args.output_folder, "hf_quant_config.json", declaration(model))
    recipe.write_reference_logits({"w4a16": stock_model(model, config)}, tokenizer, args)


if __name__ == "__main__":
    main()
