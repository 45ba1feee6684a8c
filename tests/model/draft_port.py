"""A plain numpy port, in float32, of the demos' targets and of their draft models: row by row with a KV cache, as an
engine drafts. Weights come from the published FP4 files. Written apart from the kernels and from models/training."""
import json
import math
import os

import numpy as np

import bf16_demo


def read_json(folder, name):
    with open(os.path.join(folder, name)) as file:
        return json.load(file)


def float_weights(tensors):
    weights = {name: t.astype(np.float32) for name, t in tensors.items() if t.dtype != np.uint8}
    weights.update(bf16_demo.dequantised(tensors))
    return weights


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Cache:
    """Keys and values [rows, heads, d] of one layer."""

    def put(self, start, k, v):
        """Writes rows from `start` on and drops all later ones."""
        self.k = np.concatenate([self.k[:start], k]) if start else k
        self.v = np.concatenate([self.v[:start], v]) if start else v


def attend(q, cache, start, scale, window=None, sinks=None):
    """q [T, heads, d] of rows start..start + T - 1 -> [T, heads * d of values]."""
    group = q.shape[1] // cache.k.shape[1]
    k, v = (np.repeat(x, group, 1).transpose(1, 0, 2) for x in (cache.k, cache.v))
    scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) * scale
    behind = start + np.arange(len(q))[:, None] - np.arange(k.shape[1])[None]
    hidden = (behind < 0) | (behind >= (window or math.inf))
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], -1)
    share = softmax(scores)[..., :k.shape[1]]
    return (share @ v).transpose(1, 0, 2).reshape(len(q), -1)


def angles(start, num_rows, inv_freq):
    return ((start + np.arange(num_rows))[:, None, None] * inv_freq).astype(np.float32)


def rotate_halves(x, angle, factor=1.0):
    """x [T, heads, d]: element i pairs with i + d / 2."""
    a, b = np.split(x, 2, -1)
    c, s = np.cos(angle) * factor, np.sin(angle) * factor
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def rotate_pairs(x, angle):
    """x [T, heads, d]: element 2i pairs with 2i + 1. The result has first elements first, which no dot product of
    two such results sees."""
    a, b = x[..., 0::2], x[..., 1::2]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


class GptOss:
    """The gpt_oss target. run() returns the residuals after each layer, and the logits."""

    def __init__(self, folder):
        self.config, self.w = read_json(folder, "config.json"), float_weights(bf16_demo.load_folder(folder))
        rope, d = self.config["rope_parameters"], self.config["head_dim"]
        plain = rope["rope_theta"] ** (-np.arange(0, d, 2) / d)
        at = lambda turns: d * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (
            2 * math.log(rope["rope_theta"]))
        low, high = max(at(rope["beta_fast"]), 0), min(at(rope["beta_slow"]), d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
        self.inv_freq = plain / rope["factor"] * ramp + plain * (1 - ramp)
        self.rope_factor = 0.1 * math.log(rope["factor"]) + 1

    def attention(self, layer, x):
        c, w, name = self.config, self.w, f"model.layers.{layer}.self_attn."
        project = lambda p: (x @ w[f"{name}{p}_proj.weight"].T + w[f"{name}{p}_proj.bias"]).reshape(
            len(x), -1, c["head_dim"])
        angle, cache = angles(0, len(x), self.inv_freq), Cache()
        cache.put(0, rotate_halves(project("k"), angle, self.rope_factor), project("v"))
        window = c["sliding_window"] if c["layer_types"][layer] == "sliding_attention" else None
        q = rotate_halves(project("q"), angle, self.rope_factor)
        out = attend(q, cache, 0, c["head_dim"] ** -0.5, window, w[name + "sinks"])
        return out @ w[name + "o_proj.weight"].T + w[name + "o_proj.bias"]

    def experts(self, layer, x):
        w, name, top_k = self.w, f"model.layers.{layer}.mlp.", self.config["num_experts_per_tok"]
        scores = x @ w[name + "router.weight"].T + w[name + "router.bias"]
        chosen = np.argsort(-scores, -1, "stable")[:, :top_k]
        share, out = softmax(np.take_along_axis(scores, chosen, -1)), np.zeros_like(x)
        for e in range(scores.shape[1]):
            row, slot = np.nonzero(chosen == e)
            both = x[row] @ w[name + "experts.gate_up_proj"][e] + w[name + "experts.gate_up_proj_bias"][e]
            gate, up = np.minimum(both[:, 0::2], 7), np.clip(both[:, 1::2], -7, 7)
            act = gate * sigmoid(1.702 * gate) * (up + 1)
            down = act @ w[name + "experts.down_proj"][e] + w[name + "experts.down_proj_bias"][e]
            out[row] += down * share[row, slot][:, None]
        return out

    def run(self, ids):
        w, eps = self.w, self.config["rms_norm_eps"]
        x, residuals = w["model.embed_tokens.weight"][ids], []
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, rms_norm(x, w[name + "input_layernorm.weight"], eps))
            x = x + self.experts(layer, rms_norm(x, w[name + "post_attention_layernorm.weight"], eps))
            residuals.append(x)
        return residuals, rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


class DeepSeek:
    """The deepseek_v3 target. run() returns the final hidden states after the norm, and the logits."""

    def __init__(self, folder):
        self.config, self.w = read_json(folder, "config.json"), float_weights(bf16_demo.load_folder(folder))
        d = self.config["qk_rope_head_dim"]
        self.inv_freq = self.config["rope_parameters"]["rope_theta"] ** (-np.arange(0, d, 2) / d)

    def attention(self, name, x, start, cache):
        """Multi-head latent attention of rows from `start` on, with expanded keys and values in the cache."""
        c, w, eps = self.config, self.w, 1e-6
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        heads = lambda y: y.reshape(len(x), c["num_attention_heads"], -1)
        linear = lambda y, part: y @ w[f"{name}{part}.weight"].T
        q = heads(linear(rms_norm(linear(x, "q_a_proj"), w[name + "q_a_layernorm.weight"], eps), "q_b_proj"))
        latent = linear(x, "kv_a_proj_with_mqa")
        kv = heads(linear(rms_norm(latent[:, :-rope], w[name + "kv_a_layernorm.weight"], eps), "kv_b_proj"))
        angle = angles(start, len(x), self.inv_freq)
        k_rope = np.repeat(rotate_pairs(latent[:, None, -rope:], angle), kv.shape[1], 1)
        cache.put(start, np.concatenate([kv[..., :nope], k_rope], -1), kv[..., nope:])
        q = np.concatenate([q[..., :nope], rotate_pairs(q[..., nope:], angle)], -1)
        return linear(attend(q, cache, start, (nope + rope) ** -0.5), "o_proj")

    def mlp(self, name, x):
        gate, up, down = (self.w[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, name, x):
        c, scores = self.config, sigmoid(x @ self.w[name + "gate.weight"].T)
        biased = scores + self.w[name + "gate.e_score_correction_bias"]
        groups = np.sort(biased.reshape(len(x), c["n_group"], -1), -1)[..., -2:].sum(-1)
        best = np.argsort(-groups, -1, "stable")[:, :c["topk_group"]]
        size, out = scores.shape[1] // c["n_group"], self.mlp(name + "shared_experts.", x)
        allowed = (np.arange(scores.shape[1])[None, :, None] // size == best[:, None]).any(-1)
        chosen = np.argsort(-np.where(allowed, biased, -np.inf), -1, "stable")[:, :c["num_experts_per_tok"]]
        share = np.take_along_axis(scores, chosen, -1)
        share = share / (share.sum(-1, keepdims=True) + 1e-20) * c["routed_scaling_factor"]
        for e in range(scores.shape[1]):
            row, slot = np.nonzero(chosen == e)
            if len(row):
                out[row] += self.mlp(f"{name}experts.{e}.", x[row]) * share[row, slot][:, None]
        return out

    def layer(self, number, x, start, cache):
        w, eps, name = self.w, self.config["rms_norm_eps"], f"model.layers.{number}."
        normed = rms_norm(x, w[name + "input_layernorm.weight"], eps)
        x = x + self.attention(name + "self_attn.", normed, start, cache)
        normed = rms_norm(x, w[name + "post_attention_layernorm.weight"], eps)
        is_dense = number < self.config["first_k_dense_replace"]
        return x + (self.mlp if is_dense else self.experts)(name + "mlp.", normed)

    def run(self, ids):
        x = self.w["model.embed_tokens.weight"][ids]
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(number, x, 0, Cache())
        hidden = rms_norm(x, self.w["model.norm.weight"], self.config["rms_norm_eps"])
        return hidden, hidden @ self.w["lm_head.weight"].T


class Eagle3:
    """An EAGLE-3 head on a GptOss target."""

    def __init__(self, folder, target):
        self.config, self.w = read_json(folder, "config.json"), float_weights(bf16_demo.load_folder(folder))
        self.embeddings, self.cache = target.w["model.embed_tokens.weight"], Cache()
        self.token_ids = np.arange(self.config["draft_vocab_size"]) + self.w["d2t"].astype(np.int64)
        d = self.config["head_dim"]
        self.inv_freq = self.config["rope_theta"] ** (-np.arange(0, d, 2) / d)

    def first(self, features):
        return features @ self.w["fc.weight"].T

    def run(self, tokens, h, start):
        """Rows from `start` on -> the last row's token, and all rows' outputs."""
        w, eps, d = self.w, self.config["rms_norm_eps"], self.config["head_dim"]
        x = np.concatenate([rms_norm(self.embeddings[tokens], w["midlayer.input_layernorm.weight"], eps),
                            rms_norm(h, w["midlayer.hidden_norm.weight"], eps)], -1)
        project = lambda p: (x @ w[f"midlayer.self_attn.{p}_proj.weight"].T).reshape(len(x), -1, d)
        angle = angles(start, len(x), self.inv_freq)
        self.cache.put(start, rotate_halves(project("k"), angle), project("v"))
        out = attend(rotate_halves(project("q"), angle), self.cache, start, d ** -0.5)
        h = h + out @ w["midlayer.self_attn.o_proj.weight"].T
        x = rms_norm(h, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up, down = (w[f"midlayer.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        h = h + (silu(x @ gate.T) * (x @ up.T)) @ down.T
        logits = rms_norm(h[-1], w["norm.weight"], eps) @ w["lm_head.weight"].T
        return int(self.token_ids[logits.argmax()]), h


class Mtp:
    """The layer for multi-token prediction of a DeepSeek target."""

    def __init__(self, target):
        self.target, self.cache = target, Cache()
        self.number = target.config["num_hidden_layers"]

    def first(self, features):
        return features

    def run(self, tokens, h, start):
        t, eps = self.target, self.target.config["rms_norm_eps"]
        own = lambda part: t.w[f"model.layers.{self.number}.{part}.weight"]
        both = np.concatenate([rms_norm(t.w["model.embed_tokens.weight"][tokens], own("enorm"), eps),
                               rms_norm(h, own("hnorm"), eps)], -1)
        x = t.layer(self.number, both @ own("eh_proj").T, start, self.cache)
        h = rms_norm(x, own("shared_head.norm"), eps)
        return int((h[-1] @ t.w["lm_head.weight"].T).argmax()), h


def accepted_tokens(drafter, features, ids, num_prompt, num_drafts):
    """Tokens of each verify by rule A, for a target that emits ids[num_prompt:]. features: the target's, one row per
    token. The first token needs no verify."""
    emitted, start, n = [], 0, num_prompt
    while n < len(ids) - 1:
        token, h = drafter.run(ids[start + 1:n + 1], drafter.first(features[start:n]), start)
        drafts = [token]
        while len(drafts) < num_drafts:
            token, h = drafter.run([token], h[-1:], n + len(drafts) - 1)
            drafts.append(token)
        right = 0
        while right < num_drafts and n + 1 + right < len(ids) and drafts[right] == ids[n + 1 + right]:
            right += 1
        emitted.append(min(right + 1, len(ids) - 1 - n))
        start, n = n, n + emitted[-1]
    return emitted
