"""Loads the demo checkpoints into their stock Hugging Face classes, with FP4 weights dequantised to float32."""
import json
import os

import torch
import transformers
from safetensors.torch import load_file

import mxfp4
import nvfp4
from recipe import DEVICE


def stored_tensors(folder):
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return load_file(os.path.join(folder, "model.safetensors"))
    with open(index) as f:
        files = sorted(set(json.load(f)["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(os.path.join(folder, file)).items()}


def _unpack_mxfp4(tensors):
    """Replaces X_blocks and X_scales [E, out, ...] by X [E, in, out], as the stock class holds it."""
    for name in [n[:-len("_blocks")] for n in tensors if n.endswith("_blocks")]:
        unpacked = mxfp4.unpack(tensors.pop(name + "_blocks"), tensors.pop(name + "_scales"))
        tensors[name] = unpacked.transpose(1, 2).contiguous()


def _unpack_nvfp4(tensors):
    """Dequantises X.weight, and drops its scales."""
    for name in [n[:-len("_2")] for n in tensors if n.endswith(".weight_scale_2")]:
        weight = name[:-len("_scale")]
        tensors[weight] = nvfp4.unpack(tensors[weight], tensors.pop(name), tensors.pop(name + "_2"))
        del tensors[weight[:-len("weight")] + "input_scale"]


def _stack_experts(tensors):
    """Replaces the experts' separate linears by the stock class's gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    layers = sorted({n.split(".experts.")[0] for n in tensors if ".experts.0." in n})
    for layer in layers:
        count = sum(n.startswith(layer + ".experts.") and n.endswith(".down_proj.weight") for n in tensors)
        take = lambda e, part: tensors.pop(f"{layer}.experts.{e}.{part}_proj.weight")
        tensors[layer + ".experts.gate_up_proj"] = torch.stack(
            [torch.cat([take(e, "gate"), take(e, "up")]) for e in range(count)])
        tensors[layer + ".experts.down_proj"] = torch.stack([take(e, "down") for e in range(count)])


def load_target(folder):
    """Returns the stock model in float32, in evaluation mode, without the layers for multi-token prediction."""
    config = transformers.AutoConfig.from_pretrained(folder)
    tensors = stored_tensors(folder)
    _unpack_mxfp4(tensors)
    _unpack_nvfp4(tensors)
    _stack_experts(tensors)
    number = lambda name: int(name.split(".")[2]) if name.startswith("model.layers.") else -1
    state = {n: t.float() for n, t in tensors.items() if number(n) < config.num_hidden_layers}
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, config.architectures[0])(config)
    model.load_state_dict(state)
    return model.to(DEVICE).float().eval().requires_grad_(False)
