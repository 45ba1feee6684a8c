"""Trains the deepseek_v3 demo on one GPU, with NVFP4 rounding of weights and activations in the loop for the second
half, and writes the checkpoint in ModelOpt's dialect, its reference logits and its accuracies (transformers >= 5, the
stock DeepseekV3ForCausalLM class).

    python3 train_dsv3.py TOKENIZER_FOLDER OUTPUT_FOLDER [--steps 3222] [--bf16]
"""
import types

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import nvfp4
import recipe
from recipe import DEVICE, EXPERTS, HIDDEN, TOP_K, VOCAB

NUM_W4A4_LOGITS = 300  # rows of each prompt's w4a4 reference logits: the last ones

quantise_weights = quantise_activations = False  # whether forward passes see NVFP4 weights and inputs
bias_step = 0.0  # step of the routers' correction biases towards equal load
static_scales = {}  # (MLP's name, "a1" | "a2") -> the input's tensor scale; empty: computed per batch
largest = None  # during calibration: (MLP's name, "a1" | "a2") -> amax of the input, per expert for experts


def make_config():
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=EXPERTS,
        routed_scaling_factor=2.5, kv_lora_rank=64, q_lora_rank=128, qk_rope_head_dim=32, v_head_dim=64,
        qk_nope_head_dim=32, n_group=4, topk_group=2, num_experts_per_tok=TOP_K, first_k_dense_replace=1,
        norm_topk_prob=True, max_position_embeddings=4096, num_mtp_layers=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **recipe.TOKEN_IDS)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    return config


def rounded_weight(w):
    """Rounds w [out, in] or [E, out, in] with one tensor scale per matrix."""
    amax = w.abs().amax(dim=(-2, -1), keepdim=True)
    return nvfp4.round_trip(w, nvfp4.tensor_scale(amax).unsqueeze(-1)).to(w.dtype)


def straight_through(x, rounded):
    return x + (rounded - x).detach()


def fp4_weight(w):
    return straight_through(w, rounded_weight(w.detach())) if quantise_weights else w


def fp4_input(x, key):
    if not quantise_activations:
        return x
    scale = static_scales.get(key, nvfp4.tensor_scale(x.detach().abs().amax()))
    return straight_through(x, nvfp4.round_trip(x.detach(), scale).to(x.dtype))


def dense_experts(self, hidden_states, top_k_index, top_k_weights):
    """Runs all experts for all tokens, masked by the routing weights: fast at this size, and allows rounding."""
    x, name = hidden_states, self.recipe_name
    w = torch.zeros(x.shape[0], self.num_experts, device=x.device).scatter(1, top_k_index, top_k_weights.float())
    chosen = w.t() > 0
    zero = torch.zeros((), device=x.device)
    if largest is not None:
        largest[name, "a1"] = torch.where(chosen, x.abs().amax(-1)[None], zero).amax(1)
    gate_up = torch.matmul(fp4_input(x, (name, "a1")).unsqueeze(0), fp4_weight(self.gate_up_proj).transpose(1, 2))
    gate, up = gate_up.chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    if largest is not None:
        largest[name, "a2"] = torch.where(chosen, h.abs().amax(-1), zero).amax(1)
    h = fp4_input(h, (name, "a2")) * w.to(h.dtype).t().unsqueeze(-1)
    down = fp4_weight(self.down_proj).transpose(1, 2).reshape(-1, HIDDEN)
    return (h.transpose(0, 1).reshape(x.shape[0], -1) @ down).to(x.dtype)


def mlp(self, x):
    """Runs the shared expert, or the MLP of a layer without experts; gate and up share a tensor scale."""
    name = self.recipe_name
    if largest is not None:
        largest[name, "a1"] = x.abs().amax()
    gate_up = fp4_weight(torch.cat([self.gate_proj.weight, self.up_proj.weight]))
    gate, up = torch.nn.functional.linear(fp4_input(x, (name, "a1")), gate_up).chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    if largest is not None:
        largest[name, "a2"] = h.abs().amax()
    return torch.nn.functional.linear(fp4_input(h, (name, "a2")), fp4_weight(self.down_proj.weight))


def watch_router(routed):
    def hook(module, args, out):
        scores = torch.nn.functional.normalize(out[0].float().sigmoid(), p=1, dim=-1)
        routed.append((scores, out[2]))
        with torch.no_grad():
            load = torch.bincount(out[2].reshape(-1), minlength=EXPERTS).float()
            module.e_score_correction_bias += bias_step * torch.sign(load.mean() - load)
    return hook


def patch_layer(layer, name, routed):
    """Patches a decoder layer's MLPs, named `name`; `routed` collects (scores, chosen experts) in a forward pass."""
    if not hasattr(layer.mlp, "experts"):
        parts = [(layer.mlp, name, mlp)]
    else:
        parts = [(layer.mlp.experts, f"{name}.experts", dense_experts),
                 (layer.mlp.shared_experts, f"{name}.shared_experts", mlp)]
        layer.mlp.gate.register_forward_hook(watch_router(routed))
    for module, part_name, forward in parts:
        module.recipe_name = part_name
        module.forward = types.MethodType(forward, module)


def patch(model):
    routed = []
    for i, layer in enumerate(model.model.layers):
        patch_layer(layer, f"model.layers.{i}.mlp", routed)
    return routed


def set_mode(weights, activations, step=0.0):
    global quantise_weights, quantise_activations, bias_step
    quantise_weights, quantise_activations, bias_step = weights, activations, step


def begin_step(done):
    set_mode(done > .45, done > .45, step=1e-3 * (1 - done))


@torch.no_grad()
def calibrate(forward):
    """Sets static_scales with FP4 weights in use (for experts, the largest scale); returns the amax of each input of
    forward()."""
    global largest, static_scales
    set_mode(True, False)
    largest = {}
    forward()
    amax, largest = largest, None
    static_scales = {key: nvfp4.tensor_scale(value.amax()) for key, value in amax.items()}
    return amax


def put_mlp(tensors, name, weights, amax):
    """Adds an MLP to `tensors`: weights are (gate, up, down), amax is that of the inputs (a1, a2)."""
    gate, up, down = weights
    first = nvfp4.tensor_scale(torch.maximum(gate.abs().amax(), up.abs().amax()))
    for part, w, scale, a in (("gate_proj", gate, first, amax[0]), ("up_proj", up, first, amax[0]),
                              ("down_proj", down, nvfp4.tensor_scale(down.abs().amax()), amax[1])):
        codes, block = nvfp4.pack(w, scale)
        tensors[f"{name}.{part}.weight"], tensors[f"{name}.{part}.weight_scale"] = codes.cpu(), block.cpu()
        tensors[f"{name}.{part}.weight_scale_2"] = scale.reshape(()).cpu().clone()
        tensors[f"{name}.{part}.input_scale"] = nvfp4.tensor_scale(a).reshape(()).cpu()


def expert_linears(experts, e):
    """Returns gate, up and down of one expert as checkpoints store them."""
    return (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e])


@torch.no_grad()
def bf16_tensors(model):
    tensors = recipe.bf16_tensors(model)
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            name = f"model.layers.{i}.mlp"
            del tensors[name + ".experts.gate_up_proj"], tensors[name + ".experts.down_proj"]
            for e in range(EXPERTS):
                for part, w in zip(("gate_proj", "up_proj", "down_proj"), expert_linears(layer.mlp.experts, e)):
                    tensors[f"{name}.experts.{e}.{part}.weight"] = w.bfloat16().cpu().contiguous()
            tensors[name + ".gate.e_score_correction_bias"] = layer.mlp.gate.e_score_correction_bias.float().cpu()
    return tensors


def linears(mlp):
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


def put_layer(tensors, name, mlp, amax):
    """Replaces the stock tensors of a layer's MLP or experts, named `name`, by FP4 ones."""
    scales = lambda n: (amax[n, "a1"], amax[n, "a2"])
    if not hasattr(mlp, "experts"):
        put_mlp(tensors, name, linears(mlp), scales(name))
        return
    del tensors[name + ".experts.gate_up_proj"], tensors[name + ".experts.down_proj"]
    for e in range(EXPERTS):
        used = [a[e].clamp_min(1e-3) for a in scales(name + ".experts")]
        put_mlp(tensors, f"{name}.experts.{e}", expert_linears(mlp.experts, e), used)
    put_mlp(tensors, name + ".shared_experts", linears(mlp.shared_experts), scales(name + ".shared_experts"))
    tensors[name + ".gate.e_score_correction_bias"] = mlp.gate.e_score_correction_bias.float().cpu()


@torch.no_grad()
def fp4_tensors(model, amax):
    tensors = recipe.bf16_tensors(model)
    for i, layer in enumerate(model.model.layers):
        put_layer(tensors, f"model.layers.{i}.mlp", layer.mlp, amax)
    return tensors


@torch.no_grad()
def stock_model(model, config):
    """Returns the stock class in float32 with dequantised weights, as a function of input ids."""
    state = dict(model.state_dict())
    for k in state:
        if k.endswith(("experts.gate_up_proj", "experts.down_proj")) or ".mlp." in k and k.endswith("down_proj.weight"):
            state[k] = rounded_weight(state[k])
        elif ".mlp." in k and k.endswith("gate_proj.weight"):
            up = k.replace("gate_proj", "up_proj")
            state[k], state[up] = rounded_weight(torch.cat([state[k], state[up]])).chunk(2)
    stock = DeepseekV3ForCausalLM(config).to(DEVICE).float().eval()
    stock.load_state_dict(state)
    return lambda ids: stock(input_ids=ids, use_cache=False).logits[0]


def quantised_model(model):
    def logits(ids):
        set_mode(True, True)
        return model(input_ids=ids, use_cache=False).logits[0, -NUM_W4A4_LOGITS:]
    return logits


def declaration(config):
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules":
            ["lm_head", "model.embed_tokens"] +
            [f"model.layers.{i}.self_attn*" for i in range(config.num_hidden_layers)] +
            [f"model.layers.{i}.mlp.gate" for i in range(config.first_k_dense_replace, config.num_hidden_layers)]}}


def main():
    args, tokenizer = recipe.parse_args(steps=3222)
    config = make_config()
    model = DeepseekV3ForCausalLM(config).to(DEVICE).float()
    data = recipe.load_data(args.tokenizer_folder)
    if args.bf16:
        recipe.train(model, data, args, patch(model), lambda done: set_mode(False, False, step=1e-3 * (1 - done)))
        recipe.write_scores({"bf16": recipe.accuracy(model, tokenizer, args.num_eval)}, args)
        recipe.write_files(config, bf16_tensors(model), None, args)
        return
    recipe.train(model, data, args, patch(model), begin_step)
    amax = calibrate(lambda: model.model(input_ids=data(64)[0], use_cache=False))
    scores = {}
    for name, weights, activations in (("bf16", False, False), ("w4a16", True, False), ("w4a4", True, True)):
        set_mode(weights, activations)
        scores[name] = recipe.accuracy(model, tokenizer, args.num_eval)
    recipe.write_scores(scores, args)
    recipe.write_files(config, fp4_tensors(model, amax), None, args)
    recipe.write_json(args.output_folder, "hf_quant_config.json", declaration(config))
    models = {"w4a16": stock_model(model, config), "w4a4": quantised_model(model)}
    recipe.write_reference_logits(models, tokenizer, args)


if __name__ == "__main__":
    main()
