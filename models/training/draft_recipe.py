"""Shared by the recipes of the draft models: documents, the target's own outputs, the training loop over chained
steps ("training-time test" of EAGLE-3), and acceptance lengths on held-out questions.

Rows: row p of step k stands for the draft pass at position p + k of a chain whose last true features are the target's
at p. It takes token x[p + 1 + k] and predicts x[p + 2 + k]. Step 0 takes the target's features, step k > 0 the draft
model's output of step k - 1.
"""
import argparse
import json
import math
import random
import time

import torch
from tokenizers import Tokenizer

import problems
import recipe
from recipe import DEVICE, END_OF_TEXT

NUM_DRAFTS = 3  # of the acceptance lengths
CHAT_TURN = "<|im_start|>assistant\n"


def parse_args(steps):
    parser = argparse.ArgumentParser()
    parser.add_argument("target_folder")
    parser.add_argument("output_folder")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="end the training earlier, after this time")
    parser.add_argument("--batch-tokens", type=int, default=24576)
    parser.add_argument("--num-documents", type=int, default=60000)
    parser.add_argument("--num-outputs", type=int, default=4096, help="greedy outputs of the target, and sampled ones")
    parser.add_argument("--num-eval", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    return args


def load_tokenizer(folder):
    return Tokenizer.from_file(f"{folder}/tokenizer.json")


def autocast():
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


def training_examples(target, tokenizer, args):
    """Returns lists of token ids: documents, and questions with the target's greedy and sampled outputs."""
    _, _, banned = problems.test_sets()
    r = random.Random(11)
    texts = [problems.document(r, banned) for _ in range(args.num_documents)]
    examples = [e.ids[:recipe.SEQUENCE] for e in tokenizer.encode_batch(texts)]
    asked = []
    while len(asked) < 2 * args.num_outputs:
        text = problems.document(r, banned)
        if CHAT_TURN in text:
            asked.append(text[:text.rindex(CHAT_TURN) + len(CHAT_TURN)])
    prompts = [e.ids for e in tokenizer.encode_batch(asked)]
    for temperature, part in ((0.0, prompts[:args.num_outputs]), (1.0, prompts[args.num_outputs:])):
        part.sort(key=len)
        examples += [p + o for p, o in zip(part, recipe.generate_ids(target, part, temperature, batch=1024))]
    print(f"{len(examples)} examples, {sum(map(len, examples))} tokens", flush=True)
    return examples


def pad(rows):
    """Lists of token ids -> ids [B, L] and lengths [B]; L is a multiple of 32."""
    width = -(-max(map(len, rows)) // 32) * 32
    ids = torch.tensor([row + [END_OF_TEXT] * (width - len(row)) for row in rows], device=DEVICE)
    return ids, torch.tensor([len(row) for row in rows], device=DEVICE)


def batches(examples, batch_tokens):
    """Yields padded batches of examples of similar lengths, for ever, in a seeded random order."""
    r = random.Random(12)
    by_length = sorted(examples, key=len)
    groups, group = [], []
    for row in by_length:
        if group and (len(group) + 1) * len(row) > batch_tokens:
            groups.append(group)
            group = []
        group.append(row)
    groups.append(group)
    while True:
        r.shuffle(groups)
        for rows in groups:
            yield pad(rows)


class TargetPass:
    """Runs the target and keeps its residuals after some layers, its final normed hidden states, and its logits."""

    def __init__(self, target, after_layers=()):
        self.target, self.residuals = target, {}
        for i in after_layers:
            target.model.layers[i].register_forward_hook(
                lambda module, args, out, i=i: self.residuals.__setitem__(i, out.detach().float()))
        self.after_layers = after_layers

    @torch.no_grad()
    def __call__(self, ids):
        """ids [B, L] -> residuals [B, L, n H], final hidden [B, L, H], logits [B, L, V]."""
        with autocast():
            hidden = self.target.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.target.lm_head(hidden)
        kept = [self.residuals[i] for i in self.after_layers]
        return torch.cat(kept, -1) if kept else None, hidden.float(), logits.float()


def shift(x, n):
    """Moves x [B, L, ...] n rows up: row p becomes x[p + n]; the last n rows are not meaningful."""
    return torch.roll(x, -n, 1)


def chained_attention(q, keys, values, scale):
    """Attention of the last step's rows. q [B, h, L, d]; keys and values have one [B, h, L, d] per step: row p sees
    step 0's rows up to p, and of the later steps the row with its own number."""
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ keys[0].transpose(2, 3)).float().masked_fill(~causal, -math.inf)
    own = [(q * k).sum(-1, keepdim=True).float() for k in keys[1:]]
    share = torch.softmax(torch.cat([scores, *own], -1) * scale, -1).to(q.dtype)
    out = share[..., :q.shape[2]] @ values[0]
    for i, v in enumerate(values[1:]):
        out = out + share[..., q.shape[2] + i, None] * v
    return out


def chained_loss(step_logits, target_logits, lengths, token_ids):
    """Cross-entropy with the target's distributions, over all steps; a row counts by the target's certainty.
    step_logits: per step [B, L, V_d]; target_logits [B, L, V]; token_ids [V_d]: the draft vocabulary."""
    teacher = torch.softmax(target_logits, -1)
    certainty, teacher = teacher.amax(-1), teacher[..., token_ids]
    row, total = torch.arange(target_logits.shape[1], device=DEVICE), 0.0
    for k, logits in enumerate(step_logits):
        weight = shift(certainty, k + 1) * (row[None] + k + 2 < lengths[:, None])
        loss = -(shift(teacher, k + 1) * torch.log_softmax(logits.float(), -1)).sum(-1)
        total = total + 0.8 ** k * (loss * weight).sum() / weight.sum()
    return total


def train(draft, target_pass, examples, args, begin_step=lambda done: 0.0):
    """Trains `draft`, a module with run(ids, residuals, hidden, num_steps) -> logits per step and token_ids.
    begin_step(fraction done) prepares a step; draft.extra_loss() is added to the loss."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.learning_rate, betas=(.9, .95), weight_decay=.01)
    stream, start, done, step = batches(examples, args.batch_tokens), time.time(), 0.0, 0
    while done < 1:
        done = max(step / args.steps, (time.time() - start) / args.max_seconds)
        begin_step(min(done, 1.0))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1, (step + 1) / 50) * (.5 + .5 * math.cos(math.pi * min(done, 1))) + 1e-5
        ids, lengths = next(stream)
        residuals, hidden, target_logits = target_pass(ids)
        with autocast():
            logits = draft.run(ids, residuals, hidden, NUM_DRAFTS + 1)
        loss = chained_loss(logits, target_logits, lengths, draft.token_ids)
        (loss + draft.extra_loss()).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} after {time.time() - start:.0f} s", flush=True)
        step += 1
    draft.eval()
    with torch.no_grad():
        for p in draft.parameters():  # stored and evaluated as bf16
            p.copy_(p.bfloat16().float())
    return step


def held_out_prompts(tokenizer, n):
    gsm, mc, _ = problems.test_sets()
    texts = {"gsm8k_form": [recipe.chat_prompt(x["question"]) for x in gsm[:n]],
             "gpqa_form": recipe.multiple_choice_prompts(mc[:n])[0]}
    return {form: [e.ids for e in tokenizer.encode_batch(prompts)] for form, prompts in texts.items()}


@torch.no_grad()
def right_drafts(draft, target_pass, rows, num_drafts=NUM_DRAFTS):
    """rows: lists of token ids -> per row a list: how many drafts are right if the last true features are at p."""
    result = []
    for i in range(0, len(rows), 64):
        ids, lengths = pad(rows[i:i + 64])
        residuals, hidden, _ = target_pass(ids)
        right = torch.ones_like(ids, dtype=torch.bool)
        count = torch.zeros_like(ids)
        for k, logits in enumerate(draft.run(ids, residuals, hidden, num_drafts)):
            inside = torch.arange(ids.shape[1], device=DEVICE)[None] + k + 2 < lengths[:, None]
            right = right & inside & (draft.token_ids[logits.argmax(-1)] == shift(ids, k + 2))
            count += right
        result += [c[:n].tolist() for c, n in zip(count, lengths.tolist())]
    return result


def verifies(right, num_prompt):
    """Accepted drafts of each verify of one output by rule A. right: per position, of prompt and output. The prompt's
    last row gives the first token without a draft; the drafts after token n come from the features at n - 1."""
    accepted, n = [], num_prompt
    while n < len(right) - 1:
        accepted.append(min(right[n - 1], len(right) - 2 - n))
        n += accepted[-1] + 1
    return accepted


def acceptance(draft, target_pass, prompts, outputs):
    """Returns the acceptance length (tokens per verify), the share of right drafts by position (if the ones before
    were right), and each output's number of verifies."""
    right = right_drafts(draft, target_pass, [p + o for p, o in zip(prompts, outputs)])
    runs = [verifies(r, len(p)) for r, p in zip(right, prompts)]
    accepted = [a for run in runs for a in run]
    by_position = [round(sum(a > k for a in accepted) / max(1, sum(a >= k for a in accepted)), 4)
                   for k in range(NUM_DRAFTS)]
    return {"acceptance_length": round(1 + sum(accepted) / len(accepted), 4), "by_position": by_position}, \
        [len(run) for run in runs]


def reference_acceptance(draft, target_pass, tokenizer, num_steps, num_eval):
    """Returns the content of reference_acceptance.json: acceptance on held-out questions, four examples per form."""
    scores, examples = {}, []
    for form, prompts in held_out_prompts(tokenizer, num_eval).items():
        for name, temperature in (("greedy", 0.0), ("temperature_0.7", 0.7)):
            outputs = recipe.generate_ids(target_pass.target, prompts, temperature, batch=1024)
            scores.setdefault(name, {})[form], counts = acceptance(draft, target_pass, prompts, outputs)
            if temperature == 0:
                examples += [{"form": form, "prompt_ids": p, "output_ids": o, "num_verifies": c}
                             for p, o, c in list(zip(prompts, outputs, counts))[:4]]
    print(scores, flush=True)
    return {"num_drafts": NUM_DRAFTS, "n_eval": num_eval, "train_steps": num_steps, "acceptance": scores,
            "examples": examples}


def write_reference(folder, reference):
    """Writes reference_acceptance.json with one line per example."""
    lines = [f' "{key}": {json.dumps(value)}' for key, value in reference.items() if key != "examples"]
    examples = ",\n".join("  " + json.dumps(example) for example in reference["examples"])
    with open(f"{folder}/reference_acceptance.json", "w") as f:
        f.write("{\n" + ",\n".join(lines) + ',\n "examples": [\n' + examples + "\n ]\n}\n")
