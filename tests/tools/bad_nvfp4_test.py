"""Broken NVFP4 and compressed-tensors checkpoints: `inspect --experts` names the problem in one line."""
import os
import struct
import subprocess
import sys
import tempfile
import unittest

from tiny_model import TinyModel

BINARY = os.path.abspath(sys.argv[1])
CORRUPT, USAGE, UNSUPPORTED = 1, 2, 3  # exit codes
UP = "model.layers.1.mlp.experts.2.up_proj"
NAN, INFINITY = float("nan"), float("inf")


def number(suffix, value):
    return lambda m: m.put(UP + suffix, 0, struct.pack("<f", value))


def byte(suffix, at, value):
    return lambda m: m.put(UP + suffix, at, bytes([value]))


def rename(suffix, other):
    return lambda m: m.header.update({UP + other: m.header.pop(UP + suffix)})


def field(suffix, **values):
    return lambda m: m.header[UP + suffix].update(values)


def quantization(**values):
    return lambda m: m.hf_quant["quantization"].update(values)


def flat(**values):
    return lambda m: m.config["quantization_config"].update(values)


def group(**values):
    return lambda m: m.config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)


# like, dialect, the change, exit code, required text of the line.
CASES = [
    *[("deepseek-v3-tiny", "modelopt", number(suffix, value), CORRUPT, f"'{UP}{suffix}'", text, "finite numbers above 0")
      for suffix in (".weight_scale_2", ".input_scale")
      for value, text in ((NAN, "nan"), (INFINITY, "inf"), (0.0, "0.0"), (-2.0, "-2.0"))],
    *[("qwen3-moe-tiny", "compressed-nvfp4", number(suffix, value), CORRUPT, f"'{UP}{suffix}'", "finite numbers above 0")
      for suffix in (".weight_global_scale", ".input_global_scale") for value in (NAN, INFINITY, 0.0, -2.0)],
    ("qwen3-moe-tiny", "compressed-nvfp4", number(".weight_global_scale", 1e-45), CORRUPT, UP, "finite reciprocal"),
    ("deepseek-v3-tiny", "modelopt", byte(".weight_scale", 5, 0x7F), CORRUPT, UP, "0x7F", "row 1, block 1"),
    ("deepseek-v3-tiny", "modelopt", byte(".weight_scale", 4, 0x80), CORRUPT, UP, "0x80", "row 1, block 0"),
    ("qwen2-moe-tiny", "compressed-mxfp4", byte(".weight_scale", 3, 0xFF), CORRUPT, UP, "0xFF", "row 1, block 1"),
    ("deepseek-v3-tiny", "modelopt", rename(".weight_scale", ".scale"), USAGE, f"no tensor '{UP}.weight_scale'"),
    ("deepseek-v3-tiny", "modelopt", rename(".weight_scale_2", ".s"), USAGE, f"no tensor '{UP}.weight_scale_2'"),
    ("qwen3-moe-tiny", "compressed-nvfp4", rename(".weight_packed", ".weight"), USAGE, f"no tensor '{UP}.weight_packed'"),
    ("qwen3-moe-tiny", "modelopt", field(".weight_scale", dtype="U8"), USAGE, UP, "U8", "F8_E4M3"),
    ("qwen3-moe-tiny", "modelopt", field(".weight", shape=[16, 64]), USAGE, UP, "[16, 64]", "[32, 32]"),
    ("qwen3-moe-tiny", "modelopt", quantization(quant_algo="FP8"), UNSUPPORTED, "quant_algo 'FP8'", "'NVFP4'"),
    ("qwen3-moe-tiny", "modelopt", quantization(group_size=32), USAGE, "group_size = 32", "16"),
    ("qwen3-moe-tiny", "modelopt", quantization(exclude_modules=["*.experts.*"]), UNSUPPORTED,
     "model.layers.0.mlp.experts", "left unquantised"),
    ("qwen3-moe-tiny", "modelopt", quantization(exclude_modules=["re:("]), USAGE, "exclude_modules", "does not compile"),
    ("qwen3-moe-tiny", "modelopt", quantization(quant_algo="MIXED_PRECISION", quantized_layers={
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "model.layers.0.self_attn.q_proj": {"quant_algo": "INT8_SQ"}}),
     UNSUPPORTED, "INT8_SQ", "'model.layers.0.self_attn.q_proj'"),
    ("qwen3-moe-tiny", "compressed-nvfp4", flat(format="int-quantized"), UNSUPPORTED, "'int-quantized'", "nvfp4-pack"),
    ("qwen3-moe-tiny", "compressed-mxfp4", group(group_size=16), USAGE, "group_size = 16", "MXFP4: 32"),
    ("qwen3-moe-tiny", "compressed-nvfp4", group(num_bits=8), UNSUPPORTED, "compressed-tensors", "nvfp4-pack"),
    ("deepseek-v3-tiny", "modelopt", lambda m: m.config.update(moe_intermediate_size=40), USAGE,
     "moe_intermediate_size = 40", "multiples of 16"),
    ("deepseek-v3-tiny", "modelopt", lambda m: m.config.update(topk_method="group_limited_greedy"), USAGE,
     "topk_method", "noaux_tc"),
]


class BadNvfp4(unittest.TestCase):
    def inspect(self, folder):
        return subprocess.run([BINARY, "inspect", folder, "--experts"], capture_output=True, text=True, timeout=10)

    def test_whole_ones_are_shown(self):
        for like in ("deepseek-v3-tiny", "qwen3-moe-tiny", "qwen2-moe-tiny"):
            for dialect in ("modelopt", "compressed-nvfp4", "compressed-mxfp4"):
                with self.subTest(like + " " + dialect), tempfile.TemporaryDirectory() as base:
                    TinyModel(BINARY, os.path.join(base, "m"), like, dialect).write()  # must stay valid
                    ended = self.inspect(os.path.join(base, "m"))
                    self.assertEqual(ended.returncode, 0, ended.stderr)
                    self.assertIn("layer 1 experts, " + ("mxfp4" if "mxfp4" in dialect else "nvfp4"), ended.stdout)

    def test_broken_ones_are_named(self):
        for at, (like, dialect, damage, code, *words) in enumerate(CASES):
            with self.subTest(f"case {at}: {words}"), tempfile.TemporaryDirectory() as base:
                model = TinyModel(BINARY, os.path.join(base, "m"), like, dialect)
                damage(model)
                model.write()
                ended = self.inspect(model.folder)
                self.assertEqual(ended.returncode, code, (ended.stdout[-500:], ended.stderr))
                self.assertRegex(ended.stderr, r"\Aerror: [^\n]*\n\Z")
                for word in words:
                    self.assertIn(word, ended.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
