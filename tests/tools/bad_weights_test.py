"""Checkpoints with tensors or values that contradict config.json: every command refuses and names them."""
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

from tiny_model import TinyModel

BINARY, DEMO = map(os.path.abspath, sys.argv[1:3])
NVFP4 = os.path.join(os.path.dirname(DEMO), "demo-dsv3-nvfp4")
OK, CORRUPT, UNSUPPORTED = 0, 1, 3  # exit codes
ALLOW = "--allow-unused-tensors"
EXTRA = "model.layers.1.self_attn.o_proj.pre_quant_scale"
FAST = ["--device", "cpu", "--threads", "1", "--weight-cache-dir", "none", "--disable-autotune"]


def run(*args):
    return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=120)


class BadWeights(unittest.TestCase):
    def setUp(self):
        base = tempfile.TemporaryDirectory()
        self.addCleanup(base.cleanup)
        self.base = base.name
        self.ids = os.path.join(self.base, "ids.json")
        with open(self.ids, "w") as file:
            json.dump([1, 2, 3], file)

    def model(self, dialect="modelopt"):
        return TinyModel(BINARY, os.path.join(self.base, dialect), "deepseek-v3-tiny", dialect)

    def with_extra(self, name=EXTRA, dialect="modelopt"):
        model = self.model(dialect)
        model.add(name, "BF16", [1], b"\x80\x3f")
        model.write()
        return model.folder

    def refused(self, ended, code, *words):
        self.assertEqual(ended.returncode, code, (ended.stdout[-500:], ended.stderr))
        line = ended.stderr.strip().splitlines()[-1]
        for word in ("error: ", *words):
            self.assertIn(word, line)

    def logits(self, folder, *flags):
        return run("logits", folder, "--input-ids", self.ids, "--output", os.path.join(self.base, "out"), *FAST, *flags)

    def test_unused_tensors_are_refused_by_every_command(self):
        folder = self.with_extra()
        run_args = ["run", folder, "--prompt", "a", "--raw", "--max-tokens", "1", *FAST]
        serve_args = ["serve", folder, "--port", "0", *FAST]
        for ended in (run(*run_args), run(*serve_args), self.logits(folder), run("plan", folder)):
            self.refused(ended, UNSUPPORTED, "1 tensor of the checkpoint is not used", f"'{EXTRA}'", ALLOW)
        for ended in (run(*run_args, ALLOW), self.logits(folder, ALLOW), run("plan", folder, ALLOW)):
            self.assertEqual(ended.returncode, OK, ended.stderr)
        self.assertIn("1 tensors of the checkpoint are not used", run("plan", folder, ALLOW).stdout)
        self.assertEqual(json.loads(run("plan", folder, ALLOW, "--json").stdout)["unused_tensors"], 1)

    def test_unused_tensors_are_reported(self):
        folder = self.with_extra()
        report = json.loads(run("inspect", folder, "--json").stdout)
        self.assertEqual(report["unused_tensors"], {"in_model": [EXTRA]})
        self.assertIn(f"not used (refused): {EXTRA}", run("inspect", folder).stdout)
        checks = {c["name"]: c for c in json.loads(run("doctor", "--json", "--model", folder).stdout)["checks"]}
        self.assertEqual(checks["tensors"]["level"], "fail")
        self.assertIn(EXTRA, checks["tensors"]["detail"])
        self.assertIn(ALLOW, checks["tensors"]["fix"])

    def test_tensors_elsewhere_are_counted(self):
        folder = self.with_extra("vision_tower.patch_embed.weight")
        self.assertEqual(self.logits(folder).returncode, OK)
        self.assertEqual(json.loads(run("inspect", folder, "--json").stdout)["unused_tensors"],
                         {"elsewhere": ["vision_tower.patch_embed.weight"]})
        checks = {c["name"]: c for c in json.loads(run("doctor", "--json", "--model", folder).stdout)["checks"]}
        self.assertEqual(checks["tensors"]["level"], "warn")

    def test_half_a_model_is_refused(self):
        model = self.model()
        model.config["num_hidden_layers"] = 1
        model.write()
        self.refused(self.logits(model.folder), UNSUPPORTED, "'model.layers.1.", "num_hidden_layers = 1")

    def test_quantize_refuses_them(self):
        folder = self.with_extra(dialect="bf16")
        ended = run("quantize", folder, os.path.join(self.base, "out"), "--threads", "1")
        self.refused(ended, UNSUPPORTED, f"'{EXTRA}'")
        ended = run("quantize", folder, os.path.join(self.base, "out"), "--threads", "1", ALLOW)
        self.assertEqual(ended.returncode, OK, ended.stderr)
        self.assertIn("warning: 1 tensor", ended.stderr)

    def test_numbers_that_are_not_finite_are_named(self):
        for name, at, value, dialect in (("model.layers.0.self_attn.kv_b_proj.weight", 10, 0x7FC0, "modelopt"),
                                         ("model.embed_tokens.weight", 0, 0xFF80, "modelopt"),
                                         ("lm_head.weight", 100, 0x7F80, "modelopt"),
                                         ("model.norm.weight", 63, 0x7F81, "modelopt"),
                                         ("model.layers.0.input_layernorm.weight", 3, 0x7F80, "bf16")):
            with self.subTest(name):
                model = self.model(dialect)
                good = bytes(model.data)
                model.put(name, 2 * at, struct.pack("<H", value))
                model.write()
                word = "infinite" if value & 0x7F == 0 else "NaN"
                self.refused(self.logits(model.folder), CORRUPT, f"'{name}'", "'model.safetensors'", word)
                if dialect == "bf16":
                    out = os.path.join(self.base, "quantized")
                    self.refused(run("quantize", model.folder, out, "--threads", "1"), CORRUPT, f"'{name}'", word)
                model.data = bytearray(good)
                subprocess.run(["rm", "-r", model.folder], check=True)

    def test_the_demos_load_without_a_warning(self):
        for folder in (DEMO, NVFP4):
            ended = run("run", folder, "--prompt", "a", "--raw", "--max-tokens", "1", *FAST)
            self.assertEqual(ended.returncode, OK, ended.stderr)
            self.assertNotIn("not used", ended.stderr)
            self.assertNotIn("unused_tensors", json.loads(run("inspect", folder, "--json").stdout))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
