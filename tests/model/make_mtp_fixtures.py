"""Makes the fixtures with an MTP layer: tiny random checkpoints as in make_moe_fixtures.py, with the layer that
transformers' MtpModel computes, and its drafts.

expected.safetensors has, computed in float32 by the stock classes on the dequantised weights:
  ids I64 [T]               the prompt; the last token is the target's greedy choice after ids[:-1]
  hidden F32 [T - 1, H]     the target's rows after its final norm
  residual F32 [T - 1, H]   the residual after layer 0
  mtp_logits F32 [T - 1, V] of the rows with the tokens ids[1:] and the target's hidden states
  chain_ids I64 [3], chain_logits F32 [3, V]  greedy drafts: the first is the choice of mtp_logits' last row, and
                            row i has the logits after chain_ids[i], with the MTP layer's own output as hidden state
  generated I64 [G], drafts I64 [D, 2]  generate(use_mtp=True): the text after ids[:-1], and each draft with its
                            position in ids[:-1] + generated

transformers has no MTP layer for models with delta nets. Theirs is composed here of stock modules: a layer with full
attention of the stock class, its norms, and a linear layer; text and drafts are computed from whole sequences.

    python3 make_mtp_fixtures.py OUTPUT_FOLDER [NAME...]
"""
import contextlib
import json
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation import candidate_generator
from transformers.modeling_layers import MtpModel

from fixture_files import save_shards
from make_moe_fixtures import FAMILIES, Fixture

NUM_SEEDS = 16
NUM_CHAINED, NUM_GENERATED = 3, 12

# One family with latent attention and bf16 experts, which the declaration excludes; one with grouped-query attention
# and FP4 experts.
FIXTURES = {
    "dsv3_h32_mtp_bf16": dict(
        classes=(DeepseekV3Config, DeepseekV3ForCausalLM), dialect="modelopt", num_tokens=11, mtp_fp4=False,
        config=dict(num_hidden_layers=2, vocab_size=31, hidden_size=32, intermediate_size=16, moe_intermediate_size=32,
                    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
                    qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1,
                    num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.5, norm_topk_prob=True,
                    first_k_dense_replace=1, max_position_embeddings=128,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                     "original_max_position_embeddings": 16})),
    "glm4_h32_mtp_fp4": dict(
        FAMILIES["glm4_moe"], has_mtp=False, dialect="compressed_nvfp4", num_tokens=18, mtp_fp4=True,
        config=dict(num_hidden_layers=2, vocab_size=47, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=16, n_routed_experts=4, n_group=2,
                    topk_group=1, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.6,
                    first_k_dense_replace=1, attention_bias=True, use_qk_norm=True, max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
    # Below "mtp.": bf16, with the experts of a projection in one tensor, and a declaration that forgets "mtp.fc".
    "qwen3_5_h32_mtp_fused": dict(
        FAMILIES["qwen3_5_moe"], extra=("model.visual.merger.norm.weight",), dialect="modelopt", num_tokens=21,
        mtp_fp4=False, is_below_mtp=True,
        config=dict(num_hidden_layers=2, vocab_size=29, hidden_size=32, moe_intermediate_size=32,
                    shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=24,
                    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
                    linear_conv_kernel_dim=4, num_experts=2, num_experts_per_tok=2, max_position_embeddings=128,
                    layer_types=["linear_attention", "full_attention"],
                    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                     "mrope_section": [1, 1, 1], "mrope_interleaved": True})),
    # The same with experts in FP4, not declared in config.json, of a model whose last layer has a state.
    "qwen3_next_h32_mtp_fp4": dict(
        FAMILIES["qwen3_next"], extra=(), dialect="compressed_nvfp4", num_tokens=25, mtp_fp4=True, is_below_mtp=True,
        config=dict(num_hidden_layers=2, vocab_size=31, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
                    shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10,
                    linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
                    max_position_embeddings=128, layer_types=["full_attention", "linear_attention"],
                    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5})),
}


class MtpFixture(Fixture):
    """A Fixture whose MTP layer is part of its experts, linears and tensors."""

    def __init__(self, spec, seed):
        self.mtp = None
        super().__init__(spec, seed)

    def randomize(self):
        super().randomize()
        self.layer = self.config.num_hidden_layers
        self.mtp = MtpModel(self.model, 1).float().eval()
        self.block = self.mtp.layers[0].mtp_block
        self.mtp_names = {name: parameter for name, parameter in
                          list(self.mtp.layers[0].named_parameters()) + list(self.mtp.layers[0].named_buffers())}
        model, self.model = self.model, self.mtp.layers[0]
        super().randomize()
        self.model = model

    def mtp_name(self, name):
        """The published name of a parameter or module of the stock MtpLayer."""
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        return f"model.layers.{self.layer}.{name}"

    def quantise(self):
        super().quantise()
        self.mtp_linears, self.mtp_experts = {}, []
        if self.spec["mtp_fp4"]:
            for name, module in self.block.named_modules():
                if isinstance(module, torch.nn.Linear) and self.is_quantised(name):
                    self.mtp_linears[name] = self.fp4(module.weight.detach())
                    module.weight.copy_(self.mtp_linears[name].values)
        experts = self.block.mlp.experts
        inter = experts.down_proj.shape[2]
        for e in range(experts.down_proj.shape[0]):
            matrices = (experts.gate_up_proj[e, :inter], experts.gate_up_proj[e, inter:], experts.down_proj[e])
            if not self.spec["mtp_fp4"]:
                self.mtp_experts.append(matrices)
                continue
            parts = [self.fp4(w.clone()) for w in matrices]
            for matrix, part in zip(matrices, parts):
                matrix.copy_(part.values)
            self.mtp_experts.append(parts)

    # ---- running

    def run_target(self, ids):
        out = self.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        return out.logits[0], out.hidden_states[-1][0], out.hidden_states[1][0]

    def expected(self, prompt):
        logits = self.run_target(prompt)[0]
        ids = torch.cat([prompt, logits[-1].argmax()[None]])
        _, hidden, residual = self.run_target(ids[:-1])
        cache = MtpCache(config=self.whole_config.get_mtp_config())

        def run(tokens, features, first):
            positions = torch.arange(first, first + len(tokens))[None]
            out = self.mtp.forward_layer(0, features[None], positions, cache, input_ids=tokens[None])
            return self.mtp._project_to_logits(out)[0], out[0]

        with self.watch_mtp():
            mtp_logits, out = run(ids[1:], hidden, 1)
            last, chain_ids, chain_logits = mtp_logits[-1], [], []
            for i in range(NUM_CHAINED):
                chain_ids.append(last.argmax())
                step, out = run(chain_ids[-1][None], out[-1:], len(ids) + i)
                last = step[-1]
                chain_logits.append(last)
        return {"ids": ids, "hidden": hidden, "residual": residual, "mtp_logits": mtp_logits,
                "chain_ids": torch.stack(chain_ids), "chain_logits": torch.stack(chain_logits)}

    def watch_mtp(self):
        stack = contextlib.ExitStack()
        mlps = [self.block.mlp] + [mlp for _, mlp in self.moe_layers()]
        for mlp in mlps:
            stack.callback(mlp.register_forward_pre_hook(lambda m, a: self.watch_routing(m, a[0])).remove)
        return stack

    def generate(self, prompt):
        """Runs generate(use_mtp=True) of the stock class on a saved copy of the dequantised weights."""
        drafts = []
        take = candidate_generator.MTPCandidateGenerator.get_candidates

        def watched(generator, input_ids, *args, **kwargs):
            ids, logits = take(generator, input_ids, *args, **kwargs)
            if ids.shape[1] > input_ids.shape[1]:
                drafts.append((input_ids.shape[1], int(ids[0, input_ids.shape[1]])))
            return ids, logits

        model_class = self.spec["classes"][1]
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            tensors = {self.mtp_name(n): p.detach().float().contiguous().clone()
                       for n, p in self.mtp_names.items() if ".mlp.experts." not in n}
            for e, parts in enumerate(self.mtp_experts):
                for name, part in zip(("gate", "up", "down"), parts):
                    values = part.values if self.spec["mtp_fp4"] else part
                    tensors[f"model.layers.{self.layer}.mlp.experts.{e}.{name}_proj.weight"] = values.contiguous().clone()
            path = pathlib.Path(folder) / "model.safetensors"
            save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
            patterns = model_class._keys_to_ignore_on_load_unexpected
            model_class._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{self.layer}.*"]
            candidate_generator.MTPCandidateGenerator.get_candidates = watched
            try:
                model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
                text = dict(max_new_tokens=NUM_GENERATED, do_sample=False, eos_token_id=None)
                plain = model.generate(prompt[None], **text)[0]
                generated = model.generate(prompt[None], use_mtp=True, **text)[0]
            finally:
                candidate_generator.MTPCandidateGenerator.get_candidates = take
                model_class._keys_to_ignore_on_load_unexpected = patterns
        assert torch.equal(plain, generated), "drafts changed the stock class's text"
        return {"generated": generated[len(prompt):], "drafts": torch.tensor(drafts)}

    # ---- writing

    def tensors(self):
        result = super().tensors()
        scale = torch.tensor(0.01)
        for name, value in self.mtp_names.items():
            module = name.rsplit(".", 1)[0].removeprefix("mtp_block.")
            if ".mlp.experts." in name or (module in self.mtp_linears and name.endswith("weight")):
                continue
            keep = "e_score_correction_bias" in name
            result[self.mtp_name(name)] = (value.float() if keep else value.bfloat16()).detach().contiguous().clone()
        for name, fp4 in self.mtp_linears.items():
            result.update(self.fp4_tensors(self.mtp_name(name), fp4, scale))
        for e, parts in enumerate(self.mtp_experts):
            for name, part in zip(("gate", "up", "down"), parts):
                module = self.mtp_name(f"mtp_block.mlp.experts.{e}.{name}_proj")
                if self.spec["mtp_fp4"]:
                    result.update(self.fp4_tensors(module, part, scale))
                else:
                    result[module + ".weight"] = part.bfloat16().contiguous().clone()
        result.update(self.other_tensors())
        return result

    def other_tensors(self):
        """Stand for the copies of the shared tensors, which a reader must skip."""
        return {f"model.layers.{self.layer}.{name}": torch.full((1, 2), 0.5, dtype=torch.bfloat16)
                for name in ("embed_tokens.weight", "shared_head.head.weight")}

    def excluded(self):
        return f"model.layers.{self.layer}*"

    def declaration(self):
        declared, hf_quant = super().declaration()
        if hf_quant is not None:
            hf_quant["quantization"]["exclude_modules"].append(self.excluded())
        return declared, hf_quant


class LayerBelowMtp(torch.nn.Module):
    """Names are those of the checkpoint, but the layer is `mtp_block`."""

    def __init__(self, text):
        super().__init__()
        config, norm = text.config, type(text.norm)
        full = config.layer_types.index("full_attention")
        self.mtp_block = type(text.layers[full])(config, full)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, norm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, text, tokens, features):
        """The normed outputs of all rows of a sequence."""
        embedding = self.pre_fc_norm_embedding(text.embed_tokens(tokens))
        x = self.fc(torch.cat([embedding, self.pre_fc_norm_hidden(features)], -1))[None]
        n = len(tokens)
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        turns = text.rotary_emb(x, torch.arange(n)[None])
        return self.norm(self.mtp_block(x, position_embeddings=turns, attention_mask=mask))[0]


class MtpBelowFixture(MtpFixture):
    """With an MTP layer below "mtp."."""

    def randomize(self):
        Fixture.randomize(self)
        self.mtp = LayerBelowMtp(self.text).float().eval()
        self.block = self.mtp.mtp_block
        self.mtp_names = dict(self.mtp.named_parameters())
        model, self.model = self.model, self.mtp
        Fixture.randomize(self)
        self.model = model

    def mtp_name(self, name):
        is_beside_layer = name.split(".")[0] in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        return "mtp." + ("" if is_beside_layer else "layers.0.") + name.removeprefix("mtp_block.")

    def run_target(self, ids):
        kept = {}
        hooks = [self.text.norm.register_forward_hook(lambda m, a, out: kept.update(hidden=out[0])),
                 self.text.layers[0].register_forward_hook(lambda m, a, out: kept.update(residual=out[0]))]
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, kept["hidden"], kept["residual"]

    def run_mtp(self, tokens, features):
        out = self.mtp(self.text, tokens, features)
        return self.model.lm_head(out), out

    def expected(self, prompt):
        with self.watch_mtp():
            logits = self.run_target(prompt)[0]
            ids = torch.cat([prompt, logits[-1].argmax()[None]])
            _, hidden, residual = self.run_target(ids[:-1])
            tokens, features = ids[1:], hidden
            mtp_logits, out = self.run_mtp(tokens, features)
            last, chain_ids, chain_logits = mtp_logits[-1], [], []
            for _ in range(NUM_CHAINED):
                chain_ids.append(last.argmax())
                tokens = torch.cat([tokens, chain_ids[-1][None]])
                features = torch.cat([features, out[-1:]])
                step, out = self.run_mtp(tokens, features)
                last = step[-1]
                chain_logits.append(last)
        return {"ids": ids, "hidden": hidden, "residual": residual, "mtp_logits": mtp_logits,
                "chain_ids": torch.stack(chain_ids), "chain_logits": torch.stack(chain_logits)}

    def generate(self, prompt):
        text = prompt
        for _ in range(NUM_GENERATED):
            text = torch.cat([text, self.run_target(text)[0][-1].argmax()[None]])
        logits, _ = self.run_mtp(text[1:], self.run_target(text[:-1])[1])
        drafts = [(n, int(logits[n - 2].argmax())) for n in range(len(prompt) + 1, len(text) + 1)]
        return {"generated": text[len(prompt):], "drafts": torch.tensor(drafts)}

    def tensors(self):
        result = super().tensors()
        if self.spec["mtp_fp4"]:
            return result
        result = {name: value for name, value in result.items() if not name.startswith("mtp.layers.0.mlp.experts.")}
        experts = self.block.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            result["mtp.layers.0.mlp.experts." + name] = getattr(experts, name).detach().bfloat16().contiguous().clone()
        return result

    def other_tensors(self):
        return {}

    def excluded(self):
        return "mtp.layers.0*"


def compute(spec, seed):
    fixture = (MtpBelowFixture if spec.get("is_below_mtp") else MtpFixture)(spec, seed)
    prompt = torch.randint(0, fixture.config.vocab_size, (spec["num_tokens"] - 1,), generator=fixture.generator)
    expected = fixture.expected(prompt)
    fixture.calibrate(prompt[None])
    return fixture, expected, prompt


def make_fixture(name, spec, folder):
    fixture, expected, prompt = max((compute(spec, seed) for seed in range(NUM_SEEDS)),
                                    key=lambda made: made[0].margin)
    expected.update(fixture.generate(prompt))
    assert torch.equal(expected["generated"][0], expected["ids"][-1])
    assert expected["drafts"][0].tolist() == [len(expected["ids"]), int(expected["chain_ids"][0])]
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(fixture.tensors(), folder, 1)
    save_file({k: v.contiguous().clone() for k, v in expected.items()}, folder / "expected.safetensors")
    declaration, hf_quant = fixture.declaration()
    (folder / "config.json").write_text(fixture.config_json(declaration))
    if hf_quant is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant, indent=1))
    print("OK", name, "seed", fixture.seed, f"margin {fixture.margin:.1e}", "drafts", expected["drafts"].tolist(),
          "bytes", sum(f.stat().st_size for f in folder.iterdir()), flush=True)


if __name__ == "__main__":
    print("torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for fixture_name in sys.argv[2:] or FIXTURES:
            make_fixture(fixture_name, FIXTURES[fixture_name], pathlib.Path(sys.argv[1]) / fixture_name)
