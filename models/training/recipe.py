"""Shared by the recipes of both demos: data, the training loop, accuracies and the files of a checkpoint."""
import argparse
import json
import math
import os
import random
import re
import shutil

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import problems

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, HIDDEN, EXPERTS, TOP_K, SEQUENCE = 1024, 256, 16, 4, 512
END_OF_TEXT, IM_END = 0, 2
TOKEN_IDS = dict(eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=END_OF_TEXT, bos_token_id=END_OF_TEXT)
CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
                 "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def parse_args(steps):
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer_folder")
    parser.add_argument("output_folder")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--num-eval", type=int, default=512)
    parser.add_argument("--bf16", action="store_true", help="use no FP4, in neither training nor checkpoint")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    os.makedirs(args.output_folder, exist_ok=True)
    return args, Tokenizer.from_file(os.path.join(args.tokenizer_folder, "tokenizer.json"))


def load_data(folder):
    """Returns a function of the batch size that draws training documents: ids and labels, both [B, SEQUENCE]."""
    ids = torch.from_numpy(np.load(os.path.join(folder, "train.npy")).astype(np.int64))
    n = ids.numel() // SEQUENCE
    data = ids[:n * SEQUENCE].view(n, SEQUENCE).to(torch.int16).to(DEVICE)

    def draw(batch):
        x = data[torch.randint(0, n, (batch,), device=DEVICE)].long()
        return x, x
    return draw


def balance_loss(routed):
    """Load-balancing loss over the layers' (probabilities, chosen experts)."""
    total = 0.0
    for probabilities, index in routed:
        experts = probabilities.shape[-1]
        share = torch.bincount(index.reshape(-1), minlength=experts).float()
        total = total + experts * (share / share.sum() * probabilities.mean(0)).sum()
    return total


def train(model, draw, args, routed, begin_step):
    """Trains; draw(args.batch) returns ids and labels, both [B, L]; the label -100 is ignored. `routed` collects
    (probabilities, chosen experts) of a forward pass. Calls begin_step(fraction done)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(.9, .95), weight_decay=.05, fused=True)
    for step in range(args.steps):
        done = step / args.steps
        begin_step(done)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 150) * (.5 + .5 * math.cos(math.pi * done)) + 2e-5
        x, labels = draw(args.batch)
        routed.clear()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].reshape(-1))
        (loss + 0.01 * balance_loss(routed)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        for p in model.parameters():  # tensors that are not FP4 are stored and evaluated as bf16
            p.copy_(p.bfloat16().float())


def chat_prompt(user):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def generate_ids(model, prompts, temperature=0.0, max_new_tokens=160, batch=256):
    """prompts: lists of token ids -> lists of output ids, with the token that ends an output. 0: greedy."""
    sampling = dict(do_sample=True, temperature=temperature, top_k=0) if temperature > 0 else dict(do_sample=False)
    outputs = []
    for i in range(0, len(prompts), batch):
        rows = prompts[i:i + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[END_OF_TEXT] * (width - len(r)) + r for r in rows], device=DEVICE)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=DEVICE)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **sampling,
                             eos_token_id=[END_OF_TEXT, IM_END], pad_token_id=END_OF_TEXT)
        for row in out[:, width:].tolist():
            end = next((j for j, t in enumerate(row) if t in (END_OF_TEXT, IM_END)), len(row))
            outputs.append(row[:end + 1])
    return outputs


def generate(model, tokenizer, prompts):
    return [tokenizer.decode(ids) for ids in generate_ids(model, [tokenizer.encode(p).ids for p in prompts])]


def multiple_choice_prompts(questions):
    """Returns the prompts of problems.test_sets()' second form with shuffled options, and the right letters."""
    r, prompts, letters = random.Random(0), [], []
    for x in questions:
        options = [x["Correct Answer"], x["Incorrect Answer 1"], x["Incorrect Answer 2"], x["Incorrect Answer 3"]]
        order = [0, 1, 2, 3]
        r.shuffle(order)
        a, b, c, d = (options[j] for j in order)
        prompts.append(chat_prompt(problems.GPQA_PROMPT.format(q=x["Question"], a=a, b=b, c=c, d=d)))
        letters.append("ABCD"[order.index(0)])
    return prompts, letters


def accuracy(model, tokenizer, n):
    gsm, mc, _ = problems.test_sets()
    answers = generate(model, tokenizer, [chat_prompt(x["question"]) for x in gsm[:n]])
    right = [bool((m := re.search(r"#### (-?\d+)", a)) and m.group(1) == x["answer"].rsplit("#### ", 1)[1])
             for a, x in zip(answers, gsm)]
    prompts, letters = multiple_choice_prompts(mc[:n])
    picked = [bool((m := re.search(r"Answer: ([A-D])", a)) and m.group(1) == letter)
              for a, letter in zip(generate(model, tokenizer, prompts), letters)]
    return {"gsm8k_form": sum(right) / len(right), "gpqa_form": sum(picked) / len(picked)}


def write_files(config, tensors, quantization_config, args):
    """Writes the weights and all other files except the references; quantization_config can be None."""
    folder = args.output_folder
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    declared = config.to_dict()
    declared.update(torch_dtype="bfloat16")
    if quantization_config is not None:
        declared.update(quantization_config=quantization_config)
    write_json(folder, "config.json", declared)
    write_json(folder, "generation_config.json", dict(TOKEN_IDS, do_sample=False))
    write_json(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 4096, "chat_template": CHAT_TEMPLATE})
    shutil.copy(os.path.join(args.tokenizer_folder, "tokenizer.json"), folder)


def bf16_tensors(model):
    return {name: v.detach().bfloat16().cpu().contiguous() for name, v in model.state_dict().items()}


def write_json(folder, name, content):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(content, f, indent=1, default=str)


def write_scores(scores, args):
    print(json.dumps(scores))
    write_json(args.output_folder, "reference_accuracy.json",
               {"transformers_accuracy": scores, "n_eval": args.num_eval, "train_steps": args.steps})


@torch.no_grad()
def write_reference_logits(models, tokenizer, args):
    """Writes float32 logits over a chat prompt with its answer, and over a few-shot text. models: {scheme: function of
    input ids}."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gsm, _, _ = problems.test_sets()
    texts = [chat_prompt(gsm[0]["question"]) + gsm[0]["answer"],
             "".join(f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in gsm[1:6])]
    reference = {}
    for j, text in enumerate(texts):
        ids = torch.tensor(tokenizer.encode(text).ids)
        reference[f"prompt_{j}.input_ids"] = ids
        for scheme, model in models.items():
            logits = model(ids[None].to(DEVICE))
            reference[f"prompt_{j}.logits_{scheme}"] = logits.float().cpu().contiguous()
    save_file(reference, os.path.join(args.output_folder, "reference_logits.safetensors"))
