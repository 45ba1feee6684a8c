"""Trains an EAGLE-3 head for the gpt_oss demo, on the residuals of the published FP4 weights, and writes it as
published heads are: config.json and model.safetensors with fc, midlayer, norm, lm_head, d2t and t2d; embeddings are
the target's. Minutes on one GPU, hours on a CPU.

    python3 train_eagle3.py ../demo-gptoss-mxfp4 OUTPUT_FOLDER [--steps 4000]
"""
import collections
import os

import torch
from safetensors.torch import save_file
from torch import nn

import draft_recipe
import recipe
from draft_recipe import TargetPass, chained_attention, shift
from recipe import DEVICE, HIDDEN, VOCAB
from stock_targets import load_target

AFTER_LAYERS = [1, 2, 3]
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, DRAFT_VOCAB = 4, 2, 32, 128, 192
ROPE_THETA, NORM_EPS = 10000.0, 1e-5


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = linear(2 * HIDDEN, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, HIDDEN)
        self.k_proj, self.v_proj = (linear(2 * HIDDEN, KV_HEADS * HEAD_DIM) for _ in range(2))

    def forward(self, x, positions, keys, values):
        """x [B, L, 2H]; appends this step's keys and values, each [B, heads, L, d]."""
        split = lambda y: y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k = rotate(split(self.q_proj(x)), positions), rotate(split(self.k_proj(x)), positions)
        keys.append(k.repeat_interleave(HEADS // KV_HEADS, 1))
        values.append(split(self.v_proj(x)).repeat_interleave(HEADS // KV_HEADS, 1))
        out = chained_attention(q, keys, values, HEAD_DIM ** -0.5)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(HIDDEN, INTERMEDIATE) for _ in range(2))
        self.down_proj = linear(INTERMEDIATE, HIDDEN)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(HIDDEN, NORM_EPS) for _ in range(3))

    def forward(self, embedded, h, positions, keys, values):
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(h)], -1)
        h = h + self.self_attn(x, positions, keys, values)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Head(nn.Module):
    def __init__(self, embedding, lm_head, token_ids):
        """embedding, lm_head: the target's [V, H]; token_ids [V_d]: the draft vocabulary, ascending."""
        super().__init__()
        self.fc, self.midlayer = linear(3 * HIDDEN, HIDDEN), MidLayer()
        self.norm, self.lm_head = nn.RMSNorm(HIDDEN, NORM_EPS), linear(HIDDEN, DRAFT_VOCAB)
        self.embedding, self.token_ids = embedding, token_ids
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head[token_ids])

    def run(self, ids, residuals, hidden, num_steps):
        h, keys, values, logits = self.fc(residuals).float(), [], [], []
        for k in range(num_steps):
            embedded = nn.functional.embedding(shift(ids, k + 1), self.embedding)
            positions = torch.arange(k, k + ids.shape[1], device=ids.device)
            h = self.midlayer(embedded, h, positions, keys, values)
            logits.append(self.lm_head(self.norm(h)))
        return logits

    def extra_loss(self):
        return 0.0


def rotate(x, positions):
    """Rotary embedding of x [B, heads, L, d]: element i pairs with i + d / 2."""
    angle = positions[:, None] * ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


def draft_vocabulary(examples):
    """Returns the most frequent tokens, ascending. Tokens that the target emits come first: those after the last
    prompt of the examples are not known here, so a document's second half stands for them."""
    counts = collections.Counter(t for row in examples for t in row[len(row) // 2:])
    frequent = [t for t, _ in counts.most_common(DRAFT_VOCAB)]
    missing = [t for t in range(VOCAB) if t not in counts][:DRAFT_VOCAB - len(frequent)]
    return torch.tensor(sorted(frequent + missing), device=DEVICE)


def tensors(head):
    stored = {name: p.detach().bfloat16().cpu().contiguous() for name, p in head.named_parameters()}
    ids = head.token_ids.cpu()
    stored["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    stored["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return stored


def config():
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "rms_norm_eps": NORM_EPS, "rope_theta": ROPE_THETA, "rope_scaling": None,
            "max_position_embeddings": 4096, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
            "tie_word_embeddings": False, **recipe.TOKEN_IDS, "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": AFTER_LAYERS, "use_aux_hidden_state": True}}


def main():
    args = draft_recipe.parse_args(steps=4000)
    tokenizer = draft_recipe.load_tokenizer(args.target_folder)
    target = load_target(args.target_folder)
    examples = draft_recipe.training_examples(target, tokenizer, args)
    head = Eagle3Head(target.model.embed_tokens.weight.detach(), target.lm_head.weight, draft_vocabulary(examples))
    head.to(DEVICE)
    target_pass = TargetPass(target, AFTER_LAYERS)
    num_steps = draft_recipe.train(head, target_pass, examples, args)
    os.makedirs(args.output_folder, exist_ok=True)
    save_file(tensors(head), os.path.join(args.output_folder, "model.safetensors"), metadata={"format": "pt"})
    recipe.write_json(args.output_folder, "config.json", config())
    reference = draft_recipe.reference_acceptance(head, target_pass, tokenizer, num_steps, args.num_eval)
    draft_recipe.write_reference(args.output_folder, reference)


if __name__ == "__main__":
    main()
