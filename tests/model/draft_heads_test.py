"""Tests the draft models shipped with the demos: names, types and shapes of their tensors, and their acceptance
lengths on held-out questions, in a numpy port. argv: the folder models."""
import os
import sys
import unittest

import ml_dtypes
import numpy as np

import bf16_demo
import draft_port

MODELS = sys.argv.pop(1)
GPT_OSS, DEEPSEEK, EAGLE3 = (os.path.join(MODELS, name) for name in (
    "demo-gptoss-mxfp4", "demo-dsv3-nvfp4", "demo-gptoss-eagle3"))
BF16 = ml_dtypes.bfloat16
GOAL = 2.5  # tokens per verify with three drafts


def shapes(tensors):
    return {name: (t.dtype, t.shape) for name, t in tensors.items()}


class DraftHeads(unittest.TestCase):
    def test_tensors_of_the_eagle3_head(self):
        c, target = (draft_port.read_json(folder, "config.json") for folder in (EAGLE3, GPT_OSS))
        h, i, v = c["hidden_size"], c["intermediate_size"], c["draft_vocab_size"]
        heads, kv_heads = (c[n] * c["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
        layers = c["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.assertEqual(c["architectures"], ["LlamaForCausalLMEagle3"])
        self.assertEqual((h, c["vocab_size"]), (target["hidden_size"], target["vocab_size"]))
        self.assertLess(max(layers), target["num_hidden_layers"])
        expected = {"fc": (h, len(layers) * h), "norm": (h,), "lm_head": (v, h)}
        for name, shape in {"input_layernorm": (h,), "hidden_norm": (h,), "post_attention_layernorm": (h,),
                            "self_attn.q_proj": (heads, 2 * h), "self_attn.k_proj": (kv_heads, 2 * h),
                            "self_attn.v_proj": (kv_heads, 2 * h), "self_attn.o_proj": (h, heads),
                            "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}.items():
            expected["midlayer." + name] = shape
        expected = {name + ".weight": (BF16, shape) for name, shape in expected.items()}
        expected.update(d2t=(np.int64, (v,)), t2d=(np.bool_, (c["vocab_size"],)))
        tensors = bf16_demo.load_folder(EAGLE3)
        self.assertEqual(shapes(tensors), expected)
        token_ids = np.arange(v) + tensors["d2t"]
        np.testing.assert_array_equal(token_ids, np.flatnonzero(tensors["t2d"]))
        self.assertLess(os.path.getsize(os.path.join(EAGLE3, "model.safetensors")), 1 << 20)

    def test_tensors_of_the_mtp_layer(self):
        config = draft_port.read_json(DEEPSEEK, "config.json")
        self.assertEqual(config["num_nextn_predict_layers"], 1)
        index = draft_port.read_json(DEEPSEEK, bf16_demo.INDEX)
        last, mtp = (f"model.layers.{config['num_hidden_layers'] + i}." for i in (-1, 0))
        files = bf16_demo.weight_files(DEEPSEEK)
        shards = [bf16_demo.load(os.path.join(DEEPSEEK, file)) for file in files]
        self.assertEqual(index["weight_map"], {name: file for file, shard in zip(files, shards) for name in shard})
        expected = {mtp + name[len(last):]: shape for name, shape in shapes(shards[0]).items() if name.startswith(last)}
        h = config["hidden_size"]
        expected[mtp + "eh_proj.weight"] = (BF16, (h, 2 * h))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            expected[f"{mtp}{name}.weight"] = (BF16, (h,))
        self.assertEqual(shapes(shards[1]), expected)

    def test_the_port_of_the_targets_equals_the_reference_logits(self):
        for folder, port, limit in ((GPT_OSS, draft_port.GptOss, 1e-3), (DEEPSEEK, draft_port.DeepSeek, 0.1)):
            reference = bf16_demo.load(os.path.join(folder, "reference_logits.safetensors"))
            logits = port(folder).run(reference["prompt_0.input_ids"])[1]
            self.assertLess(np.abs(logits - reference["prompt_0.logits_w4a16"]).max(), limit, folder)

    def check_acceptance(self, folder, target, features, drafter):
        """Runs the examples of reference_acceptance.json: outputs that the target itself emits."""
        reference = draft_port.read_json(folder, "reference_acceptance.json")
        for form, scores in reference["acceptance"]["greedy"].items():
            self.assertGreaterEqual(scores["acceptance_length"], GOAL, form)
        num_tokens, emitted = 0, []
        for example in reference["examples"]:
            prompt, output = example["prompt_ids"], example["output_ids"]
            ids = prompt + output
            kept, logits = target.run(np.array(ids))
            self.assertEqual(logits[len(prompt) - 1:-1].argmax(-1).tolist(), output)
            drafter.cache = draft_port.Cache()
            run = draft_port.accepted_tokens(drafter, features(kept), ids, len(prompt), reference["num_drafts"])
            self.assertEqual(sum(run), len(output) - 1)
            self.assertLessEqual(abs(len(run) - example["num_verifies"]), 1, example["form"])
            num_tokens, emitted = num_tokens + len(output) - 1, emitted + run
        self.assertGreaterEqual(num_tokens / len(emitted), GOAL)

    def test_acceptance_of_the_eagle3_head(self):
        target = draft_port.GptOss(GPT_OSS)
        head = draft_port.Eagle3(EAGLE3, target)
        layers = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.check_acceptance(EAGLE3, target, lambda residuals: np.concatenate([residuals[i] for i in layers], -1), head)

    def test_acceptance_of_the_mtp_layer(self):
        target = draft_port.DeepSeek(DEEPSEEK)
        self.check_acceptance(DEEPSEEK, target, lambda hidden: hidden, draft_port.Mtp(target))


if __name__ == "__main__":
    unittest.main()
