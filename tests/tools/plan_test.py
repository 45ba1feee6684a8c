"""fp4moe plan predicts a start's allocations, and refuses the same configurations as a start."""
import json
import os
import re
import subprocess
import sys
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
        """size: "12.34 MiB" from a log line, exact to half a unit of its last digit."""
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
                found = re.search(r"memory of a rank: weights (.*?), KV (.*?), communication heap (.*?) \(collectives .*?, a2a "
                                  r"(.*?), steps", log)
                self.assertTrue(found, log)
                rank = expected["ranks"][0]
                self.near(rank["kv_bytes"], found[2], log)
                self.near(rank["comm_heap_bytes"], found[3], log)
                self.near(rank["a2a_bytes"], found[4], log)
                self.assertIn(f" = {expected['kv_tokens']} tokens in pages of 16", log)

    def test_eight_bit_dense_layers_are_counted(self):
        for model in (MODEL, NVFP4):
            with self.subTest(model):
                bf16, q8 = (plan(model, "--dense-quant", quant, *FEW) for quant in ("none", "q8"))
                self.assertLess(q8["ranks"][0]["weight_bytes"], bf16["ranks"][0]["weight_bytes"])
                self.assertLess(q8["weight_bytes_per_token"], bf16["weight_bytes_per_token"])
                saved = {}
                for quant, expected in (("none", bf16), ("q8", q8)):
                    with Serve(BINARY, model, "--dense-quant", quant, *FEW) as server:
                        log = "".join(server.lines)
                    found = re.search(r" weights ([\d.]+) (\wiB), KV pool", log)
                    self.assertTrue(found, log)
                    saved[quant] = float(found[1]) * UNITS[found[2]]
                    self.assertIn("dense layers q8: 8 bits" if quant == "q8" else "dense layers bfloat16", log)
                planned = bf16["ranks"][0]["weight_bytes"] - q8["ranks"][0]["weight_bytes"]
                self.assertLess(abs(saved["none"] - saved["q8"] - planned), 0.01 * planned + 2 * 0.005 * 2**20)

    def test_what_a_token_reads(self):
        # From demo-gptoss-mxfp4's shapes: H = I = 256, E = 16, K = 4, 4 layers, 4.25 bits a weight,
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

    def test_refuses_what_a_start_refuses(self):
        for flags, code in [("--tp 4 --dp 3", 3), ("--moe-runner-backend flashinfer_mxfp4", 3), ("--tp zap", 2),
                            (f"--max-total-tokens {10**18}", 4)]:
            ended = subprocess.run([BINARY, "plan", NVFP4, *flags.split()], capture_output=True, text=True, timeout=60)
            self.assertEqual(ended.returncode, code, ended.stderr)
            self.assertRegex(ended.stderr, r"\Aerror: [^\n]*\n\Z")

    def test_text(self):
        ended = subprocess.run([BINARY, "plan", MODEL, "--tp", "2", *FEW], capture_output=True, text=True, timeout=60)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        for word in ("GptOssForCausalLM, mxfp4", "rank 0: weights ", "rank 1: weights ", "a decoded token reads "):
            self.assertIn(word, ended.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
