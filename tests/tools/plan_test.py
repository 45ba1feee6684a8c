"""fp4moe plan predicts a start's allocations, and refuses the same configurations as a start."""
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from serve_process import Serve

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
NVFP4 = os.path.join(os.path.dirname(MODEL), "demo-dsv3-nvfp4")
UNITS = {"MiB": 2**20, "GiB": 2**30}
FEW = "--max-total-tokens 4096".split()


def plan(model, *flags):
    ended = subprocess.run([BINARY, "plan", model, "--json", *flags], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


class Plan(unittest.TestCase):
    def near(self, predicted, size, log):
        """Compares with a size from a log line such as "12.34 MiB", which is exact to half a unit of its last digit."""
        number, unit = size.split()
        self.assertLessEqual(abs(predicted - float(number) * UNITS[unit]), 0.01 * predicted + 0.005 * UNITS[unit], log)

    def test_predicts_what_a_start_allocates(self):
        for model, flags in [(NVFP4, "--tp 4 --moe-a2a-backend deepep --moe-runner-backend flashinfer_cutedsl"),
                             (NVFP4, "--tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend flashinfer"),
                             (NVFP4, "--tp 2 --enable-deterministic-inference"),
                             (MODEL, "--tp 2 --a2a-memory-budget 8388608")]:
            with self.subTest(flags):
                expected = plan(model, *flags.split(), *FEW)
                with Serve(BINARY, model, *flags.split(), *FEW) as server:
                    log = "".join(server.lines)
                found = re.search(r"memory per rank: weights (.*?), KV (.*?), communication heap (.*?) \(collectives .*?, a2a "
                                  r"(.*?), steps", log)
                self.assertTrue(found, log)
                rank = expected["ranks"][0]
                self.near(rank["kv_bytes"], found[2], log)
                self.near(rank["comm_heap_bytes"], found[3], log)
                self.near(rank["a2a_bytes"], found[4], log)
                self.assertIn(f" = {expected['kv_tokens']} tokens in pages of 16", log)

    def test_eight_bit_dense_layers_are_counted(self):
        for model, eight in itertools.product((MODEL, NVFP4), ("q8", "fp8")):
            with self.subTest(model=model, quant=eight):
                bf16, small = (plan(model, "--dense-quant", quant, *FEW) for quant in ("none", eight))
                self.assertLess(small["ranks"][0]["weight_bytes"], bf16["ranks"][0]["weight_bytes"])
                self.assertLess(small["weight_bytes_per_token"], bf16["weight_bytes_per_token"])
                saved = {}
                for quant in ("none", eight):
                    with Serve(BINARY, model, "--dense-quant", quant, *FEW) as server:
                        log = "".join(server.lines)
                    found = re.search(r" weights ([\d.]+) (\wiB), KV pool", log)
                    self.assertTrue(found, log)
                    saved[quant] = float(found[1]) * UNITS[found[2]]
                    words = {"none": "bfloat16", "q8": "q8: 8 bits", "fp8": "fp8: E4M3"}
                    self.assertIn("dense layers " + words[quant], log)
                planned = bf16["ranks"][0]["weight_bytes"] - small["ranks"][0]["weight_bytes"]
                self.assertLess(abs(saved["none"] - saved[eight] - planned), 0.01 * planned + 2 * 0.005 * 2**20)

    def test_what_a_token_reads(self):
        # From the shapes of demo-gptoss-mxfp4: H = I = 256, E = 16, K = 4, 4 layers, 4.25 bits per weight,
        # vocabulary 1024.
        expert = 3 * 256 * 256 * 17 // 32 + 3 * 256 * 2  # plus biases in bf16
        report = plan(MODEL, *FEW)
        self.assertGreater(report["weight_bytes_per_token"], 4 * 4 * expert)
        whole = os.path.getsize(os.path.join(MODEL, "model.safetensors"))
        self.assertLess(report["weight_bytes_per_token"], whole - 4 * 12 * expert)
        self.assertEqual(report["flags"]["ep_size"], 1)

    def test_budget_bounds_the_exchange(self):
        for budget in (1 << 20, 16 << 20):
            report = plan(NVFP4, "--tp", "4", "--moe-a2a-backend", "deepep", "--a2a-memory-budget", str(budget), *FEW)
            self.assertEqual(len(report["ranks"]), 4)
            for rank in report["ranks"]:
                self.assertTrue(0 < rank["a2a_bytes"] <= budget, rank)
            self.assertEqual(report["flags"]["ep_size"], 4)

    def test_a_draft_model_on_gpus_has_its_own_exchange(self):
        layout = "--device cuda --gpu h200 --tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend deepep".split()
        head = ["EAGLE3", "--speculative-draft-model-path", os.path.join(os.path.dirname(MODEL), "demo-gptoss-eagle3")]
        for model, drafts, exchanges in [(NVFP4, ["EAGLE"], True), (MODEL, head, False),
                                         (NVFP4, ["STANDALONE", "--speculative-draft-model-path", MODEL], True)]:
            with self.subTest(drafts):
                plain = plan(model, *layout, "--speculative-algorithm", "NGRAM")
                report = plan(model, *layout, "--speculative-algorithm", *drafts)
                self.assertEqual(report["draft"]["a2a_bytes"] > 0, exchanges, report["draft"])
                for alone, both in zip(plain["ranks"], report["ranks"], strict=True):
                    self.assertEqual(both["a2a_bytes"] - alone["a2a_bytes"], report["draft"]["a2a_bytes"])
                    added = both["comm_heap_bytes"] - alone["comm_heap_bytes"] - report["draft"]["a2a_bytes"]
                    self.assertTrue(0 < added < 2**16 if exchanges else added == 0, added)  # flags

    def test_refuses_what_a_start_refuses(self):
        for flags, code in [("--tp 4 --dp 3", 3), ("--moe-runner-backend flashinfer_mxfp4", 3), ("--tp zap", 2),
                            (f"--max-total-tokens {10**18}", 4)]:
            ended = subprocess.run([BINARY, "plan", NVFP4, *flags.split()], capture_output=True, text=True, timeout=60)
            self.assertEqual(ended.returncode, code, ended.stderr)
            self.assertRegex(ended.stderr, r"\Aerror: [^\n]*\n\Z")

    def test_gpus_that_this_machine_lacks(self):
        # DeepSeek-R1's dims with the demo's other fields, without weights.
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(NVFP4, "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            config.update(hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
                          q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                          v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
                          intermediate_size=18432, first_k_dense_replace=3, n_group=8, topk_group=4,
                          vocab_size=129280, max_position_embeddings=163840)
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file)
            shutil.copy(os.path.join(NVFP4, "hf_quant_config.json"), folder)
            report = plan(folder, *"--device cuda --gpu h200 --tp 8".split())
            self.assertEqual((report["device"], report["gpu"], report["has_weights"]), ("cuda", "h200", False))
            self.assertEqual(report["available_bytes"], 143771 * 2**20)
            experts = 58 * 256 * 3 * 7168 * 2048 * 9 // 16  # 4 bits per weight and an 8-bit scale per 16 weights
            for rank in report["ranks"]:
                self.assertGreater(rank["weight_bytes"], experts / 8)
                self.assertLess(rank["weight_bytes"], experts / 8 * 1.2)  # attention and dense layers in bf16
            by_experts = plan(folder, *"--gpu h200 --tp 8 --ep 8".split())
            self.assertEqual(by_experts["flags"]["ep_size"], 8)
            ended = subprocess.run([BINARY, "plan", folder, *"--gpu h100 --tp 4".split()], capture_output=True,
                                   text=True, timeout=60)
            self.assertEqual(ended.returncode, 4, ended.stderr)
            self.assertIn("this needs a GPU with about", ended.stderr)

    def test_refuses_unknown_gpus(self):
        for flags, code, text in [("--gpu b200", 2, "error: --gpu b200; legal: h100, "),
                                  ("--gpu h200 --device cpu", 2, "--device cpu contradicts --gpu"),
                                  ("--gpu sm_90", 2, "needs --gpu-memory"),
                                  ("--gpu h200 --tp 2 --fabric mpi", 3, "fabric=mpi"),
                                  ("--gpu-memory 80", 2, "--gpu-memory requires --gpu")]:
            ended = subprocess.run([BINARY, "plan", MODEL, *flags.split()], capture_output=True, text=True, timeout=60)
            self.assertEqual(ended.returncode, code, flags + ended.stderr)
            self.assertIn(text, ended.stderr)

    def test_backends_of_a_gpu_that_this_machine_lacks(self):
        for given in ([], ["--model", MODEL]):
            ended = subprocess.run([BINARY, "backends", "--gpu", "h200", "--json", *given], capture_output=True, text=True,
                                   timeout=60)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            for problem in json.loads(ended.stdout):
                self.assertEqual(problem["device"], "cuda")
                auto = [row for row in problem["backends"]
                        if row["runner"] == "auto" and row["a2a"] == "none" and row["tp"] == 4 and row["dp"] == 1]
                self.assertEqual([row.get("runs_as") for row in auto], ["w4a16 by sm90"] * 2, "ep 1 and ep 4")

    def test_text(self):
        ended = subprocess.run([BINARY, "plan", MODEL, "--tp", "2", *FEW], capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        for word in ("GptOssForCausalLM, mxfp4", "rank 0: weights ", "rank 1: weights ", "a decoded token reads "):
            self.assertIn(word, ended.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
