"""Trains the gpt_oss demo on one GPU, with MXFP4 rounding in the loop for the second half, and writes the
checkpoint, its reference logits and its accuracies (transformers >= 5, the stock GptOssForCausalLM class).

    python3 train_gptoss.py TOKENIZER_FOLDER OUTPUT_FOLDER [--steps 1258] [--bf16]
"""
import types

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import mxfp4
import recipe
from recipe import DEVICE, EXPERTS, HIDDEN, TOP_K, VOCAB

DECLARATION = {"quant_method": "mxfp4", "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
quantise = False  # whether forward passes see MXFP4 weights


def make_config():
    config = GptOssConfig(
        num_hidden_layers=4, num_local_experts=EXPERTS, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=256,
        head_dim=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=128, num_experts_per_tok=TOP_K,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
        **recipe.TOKEN_IDS)
    config.architectures = ["GptOssForCausalLM"]
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def fp4_weight(w):
    """[E, in, out] rounded along `in` if quantise is on; gradients pass straight through."""
    if not quantise:
        return w
    with torch.no_grad():
        rounded = mxfp4.round_trip(w.detach().transpose(1, 2)).transpose(1, 2).to(w.dtype)
    return w + (rounded - w).detach()


def dense_experts(self, hidden_states, router_indices=None, routing_weights=None):
    """Runs all experts for all tokens, masked by the routing weights: fast at this size, and allows rounded weights."""
    x = hidden_states
    w = torch.zeros(x.shape[0], self.num_experts, device=x.device)
    w = w.scatter(1, router_indices, routing_weights.float()).to(x.dtype)
    gate_up = torch.matmul(x.unsqueeze(0), fp4_weight(self.gate_up_proj)) + self.gate_up_proj_bias[:, None]
    act = self._apply_gate(gate_up) * w.t().unsqueeze(-1)
    down = fp4_weight(self.down_proj).flatten(0, 1)
    return (act.transpose(0, 1).reshape(x.shape[0], -1) @ down + w @ self.down_proj_bias).to(x.dtype)


def patch(model):
    """Patches the experts; returns the list that collects (probabilities, chosen experts) in a forward pass."""
    routed = []
    for layer in model.model.layers:
        layer.mlp.experts.forward = types.MethodType(dense_experts, layer.mlp.experts)
        layer.mlp.router.register_forward_hook(
            lambda module, args, out: routed.append((out[0].float().softmax(-1), out[2])))
    return routed


def begin_step(done):
    global quantise
    quantise = done > .45


def fp4_tensors(model):
    tensors = recipe.bf16_tensors(model)
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[prefix]
            blocks, scales = mxfp4.pack(getattr(layer.mlp.experts, name).detach().transpose(1, 2).contiguous())
            tensors[prefix + "_blocks"], tensors[prefix + "_scales"] = blocks.cpu(), scales.cpu()
    return tensors


def stock_model(model, config):
    """Returns the stock class in float32 with dequantised weights, as a function of input ids."""
    state = {k: mxfp4.round_trip(v.transpose(1, 2)).transpose(1, 2) if k.endswith(("gate_up_proj", "down_proj")) else v
             for k, v in model.state_dict().items()}
    stock = GptOssForCausalLM(config).to(DEVICE).float().eval()
    stock.load_state_dict(state)
    return lambda ids: stock(input_ids=ids, use_cache=False).logits[0]


def main():
    global quantise
    args, tokenizer = recipe.parse_args(steps=1258)
    config = make_config()
    model = GptOssForCausalLM(config).to(DEVICE).float()
    recipe.train(model, recipe.load_data(args.tokenizer_folder), args, patch(model),
                 (lambda done: None) if args.bf16 else begin_step)
    if args.bf16:
        recipe.write_scores({"bf16": recipe.accuracy(model, tokenizer, args.num_eval)}, args)
        recipe.write_files(config, recipe.bf16_tensors(model), None, args)
        return
    scores = {}
    for name, quantise in (("bf16", False), ("w4a16", True)):
        scores[name] = recipe.accuracy(model, tokenizer, args.num_eval)
    recipe.write_scores(scores, args)
    recipe.write_files(config, fp4_tensors(model), DECLARATION, args)
    recipe.write_reference_logits({"w4a16": stock_model(model, config)}, tokenizer, args)


if __name__ == "__main__":
    main()
