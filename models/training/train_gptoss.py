"""Trains the gpt_oss demo on one GPU, with MXFP4 rounding in the loop for the second half, and writes the
checkpoint, its reference logits and its accuracies (transformers >= 5, the stock GptOssForCausalLM class).

    python3 train_gptoss.py TOKENIZER_FOLDER OUTPUT_FOLDER [--steps 1258]
"""
import argparse
import json
import math
import os
import random
import re
import shutil
import types

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import GptOssConfig, GptOssForCausalLM

import mxfp4
import problems

DEVICE, VOCAB, HIDDEN, EXPERTS, TOP_K, SEQUENCE = "cuda", 1024, 256, 16, 4, 512
END_OF_TEXT, IM_END = 0, 2
CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
                 "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
quantise = False  # whether forward passes see MXFP4 weights


def make_config():
    config = GptOssConfig(
        num_hidden_layers=4, num_local_experts=EXPERTS, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=256,
        head_dim=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=128, num_experts_per_tok=TOP_K,
        eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=END_OF_TEXT, bos_token_id=END_OF_TEXT,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096})
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
    """All experts for all tokens, masked by the routing weights: quick at this size, and rounded weights fit in."""
    x = hidden_states
    w = torch.zeros(x.shape[0], EXPERTS, device=x.device).scatter(1, router_indices, routing_weights.float()).to(x.dtype)
    gate_up = torch.matmul(x.unsqueeze(0), fp4_weight(self.gate_up_proj)) + self.gate_up_proj_bias[:, None]
    act = self._apply_gate(gate_up) * w.t().unsqueeze(-1)
    down = fp4_weight(self.down_proj).reshape(-1, HIDDEN)
    return (act.transpose(0, 1).reshape(x.shape[0], -1) @ down + w @ self.down_proj_bias).to(x.dtype)


def load_data(folder):
    ids = torch.from_numpy(np.load(os.path.join(folder, "train.npy")).astype(np.int64))
    n = ids.numel() // SEQUENCE
    return ids[:n * SEQUENCE].view(n, SEQUENCE).to(torch.int16).to(DEVICE)


def balance_loss(routed):
    """Load-balancing loss over the layers' (logits, indices)."""
    total = 0.0
    for logits, index in routed:
        share = torch.bincount(index.reshape(-1), minlength=EXPERTS).float()
        total = total + EXPERTS * (share / share.sum() * logits.float().softmax(-1).mean(0)).sum()
    return total


def train(model, data, num_steps, batch):
    global quantise
    routed = []
    for layer in model.model.layers:
        layer.mlp.experts.forward = types.MethodType(dense_experts, layer.mlp.experts)
        layer.mlp.router.register_forward_hook(lambda module, args, out: routed.append((out[0], out[2])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(.9, .95), weight_decay=.05, fused=True)
    for step in range(num_steps):
        done = step / num_steps
        quantise = done > .45
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 150) * (.5 + .5 * math.cos(math.pi * done)) + 2e-5
        x = data[torch.randint(0, data.shape[0], (batch,), device=DEVICE)].long()
        routed.clear()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, VOCAB), x[:, 1:].reshape(-1))
        (loss + 0.01 * balance_loss(routed)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} {'mxfp4' if quantise else 'bf16'}", flush=True)
    model.eval()
    with torch.no_grad():
        for p in model.parameters():  # what is not FP4 is stored, and evaluated, as bf16
            p.copy_(p.bfloat16().float())


def chat_prompt(user):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def generate(model, tokenizer, prompts, max_new_tokens=160):
    answers = []
    for i in range(0, len(prompts), 256):
        rows = [tokenizer.encode(p).ids for p in prompts[i:i + 256]]
        width = max(map(len, rows))
        ids = torch.tensor([[END_OF_TEXT] * (width - len(r)) + r for r in rows], device=DEVICE)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=DEVICE)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
                             eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=END_OF_TEXT)
        for row in out[:, width:].tolist():
            end = next((j for j, t in enumerate(row) if t in (END_OF_TEXT, IM_END)), len(row))
            answers.append(tokenizer.decode(row[:end]))
    return answers


def accuracy(model, tokenizer, n):
    gsm, mc, _ = problems.test_sets()
    answers = generate(model, tokenizer, [chat_prompt(x["question"]) for x in gsm[:n]])
    right = [bool((m := re.search(r"#### (-?\d+)", a)) and m.group(1) == x["answer"].rsplit("#### ", 1)[1])
             for a, x in zip(answers, gsm)]
    r, prompts, letters = random.Random(0), [], []
    for x in mc[:n]:
        options = [x["Correct Answer"], x["Incorrect Answer 1"], x["Incorrect Answer 2"], x["Incorrect Answer 3"]]
        order = [0, 1, 2, 3]
        r.shuffle(order)
        a, b, c, d = (options[j] for j in order)
        prompts.append(chat_prompt(problems.GPQA_PROMPT.format(q=x["Question"], a=a, b=b, c=c, d=d)))
        letters.append("ABCD"[order.index(0)])
    picked = [bool((m := re.search(r"Answer: ([A-D])", a)) and m.group(1) == letter)
              for a, letter in zip(generate(model, tokenizer, prompts), letters)]
    return {"gsm8k_form": sum(right) / len(right), "gpqa_form": sum(picked) / len(picked)}


def write_checkpoint(model, config, tokenizer_folder, folder):
    tensors = {k: v.detach().bfloat16().cpu().contiguous() for k, v in model.state_dict().items()}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[prefix]
            blocks, scales = mxfp4.pack(getattr(layer.mlp.experts, name).detach().transpose(1, 2).contiguous())
            tensors[prefix + "_blocks"], tensors[prefix + "_scales"] = blocks.cpu(), scales.cpu()
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    declared = config.to_dict()
    declared.update(torch_dtype="bfloat16", architectures=["GptOssForCausalLM"], quantization_config={
        "quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]})
    files = {
        "config.json": declared,
        "generation_config.json": {"eos_token_id": [END_OF_TEXT, IM_END], "pad_token_id": END_OF_TEXT,
                                   "bos_token_id": END_OF_TEXT, "do_sample": False},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                                  "pad_token": "<|endoftext|>", "model_max_length": 4096,
                                  "chat_template": CHAT_TEMPLATE}}
    for name, content in files.items():
        with open(os.path.join(folder, name), "w") as f:
            json.dump(content, f, indent=1, default=str)
    shutil.copy(os.path.join(tokenizer_folder, "tokenizer.json"), folder)


@torch.no_grad()
def write_reference_logits(model, config, tokenizer, folder):
    """Stock class, float32, dequantised weights, over a chat prompt with its answer and a few-shot text."""
    torch.backends.cuda.matmul.allow_tf32 = False
    state = {k: mxfp4.round_trip(v.transpose(1, 2)).transpose(1, 2) if k.endswith(("gate_up_proj", "down_proj")) else v
             for k, v in model.state_dict().items()}
    stock = GptOssForCausalLM(config).to(DEVICE).float().eval()
    stock.load_state_dict(state)
    gsm, _, _ = problems.test_sets()
    texts = [chat_prompt(gsm[0]["question"]) + gsm[0]["answer"],
             "".join(f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in gsm[1:6])]
    reference = {}
    for j, text in enumerate(texts):
        ids = torch.tensor(tokenizer.encode(text).ids)
        logits = stock(input_ids=ids[None].to(DEVICE), use_cache=False).logits[0]
        reference[f"prompt_{j}.input_ids"] = ids
        reference[f"prompt_{j}.logits_w4a16"] = logits.float().cpu().contiguous()
    save_file(reference, os.path.join(folder, "reference_logits.safetensors"))


def main():
    global quantise
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer_folder")
    parser.add_argument("output_folder")
    parser.add_argument("--steps", type=int, default=1258)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--num-eval", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.output_folder, exist_ok=True)
    tokenizer = Tokenizer.from_file(os.path.join(args.tokenizer_folder, "tokenizer.json"))
    config = make_config()
    model = GptOssForCausalLM(config).to(DEVICE).float()
    train(model, load_data(args.tokenizer_folder), args.steps, args.batch)
    scores = {}
    for name, quantise in (("bf16", False), ("w4a16", True)):
        scores[name] = accuracy(model, tokenizer, args.num_eval)
    print(json.dumps(scores))
    write_checkpoint(model, config, args.tokenizer_folder, args.output_folder)
    write_reference_logits(model, config, tokenizer, args.output_folder)
    with open(os.path.join(args.output_folder, "reference_accuracy.json"), "w") as f:
        json.dump({"transformers_accuracy": scores, "n_eval": args.num_eval, "train_steps": args.steps}, f, indent=1)


if __name__ == "__main__":
    main()
