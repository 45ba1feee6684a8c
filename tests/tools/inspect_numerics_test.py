"""fp4moe inspect --numerics: the schemes have the errors of FP4 and INT8, and unusual scales are reported."""
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

import bf16_demo

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
NVFP4 = os.path.join(os.path.dirname(MODEL), "demo-dsv3-nvfp4")


def layers(folder, *flags):
    ended = subprocess.run([BINARY, "inspect", folder, "--numerics", "--json", *flags], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["numerics"]


class Numerics(unittest.TestCase):
    def test_errors_of_the_schemes(self):
        # The bounds assume uniform noise of half a step: most E2M1 codes have two significant bits, INT8 blocks
        # have seven and a half.
        for model, schemes in [(NVFP4, {"w4a4": (0.05, 0.25), "w4a4_per_token": (0.05, 0.25), "w4a8": (0.002, 0.02)}),
                               (MODEL, {"w4a8": (0.002, 0.02)})]:
            for layer in layers(model):
                self.assertEqual(set(layer["errors"]), set(schemes))
                for scheme, (least, most) in schemes.items():
                    self.assertTrue(least < layer["errors"][scheme] < most, (scheme, layer["errors"]))
                    for expert in layer["experts"]:
                        self.assertTrue(least / 2 < expert["errors"][scheme] < 2 * most, (scheme, expert["errors"]))

    def test_one_layer(self):
        self.assertEqual([layer["layer"] for layer in layers(NVFP4)], [1, 2, 3])  # layer 0 has no experts
        self.assertEqual(layers(NVFP4, "--layer", "2"), [layers(NVFP4)[1]])
        for flags, error in ((("--numerics", "--layer", "4"), "error: --layer 4 must be between 0 and 3\n"),
                             (("--numerics", "--layer", "0"), "error: --layer 0: this layer has no experts\n"),
                             (("--layer", "2"), "error: --layer requires --numerics; see `fp4moe inspect --help`\n")):
            ended = subprocess.run([BINARY, "inspect", NVFP4, *flags], capture_output=True, text=True)
            self.assertEqual((ended.returncode, ended.stderr), (2, error))

    def test_bf16_experts_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            bf16 = os.path.join(folder, "bf16")
            subprocess.run([BINARY, "make-tiny", bf16, "--dialect", "bf16"], check=True, timeout=120)
            for flag in ("--numerics", "--experts"):
                ended = subprocess.run([BINARY, "inspect", bf16, flag], capture_output=True, text=True, timeout=120)
                self.assertEqual((ended.returncode, ended.stdout), (3, ""))
                self.assertIn(f"error: {flag}: the experts of '{bf16}' are bf16", ended.stderr)

    def test_a_sound_checkpoint_has_nothing_odd(self):
        for layer in layers(NVFP4):
            self.assertEqual((layer["missing_input_scales"], layer["gate_up_scale_mismatches"]), (0, 0))
            for expert in layer["experts"]:
                self.assertEqual(expert["odd"], [])
                for part in ("gate", "up", "down"):
                    self.assertTrue(0 <= expert[part]["saturated_codes"] < 0.3)
                    self.assertTrue(0 <= expert[part]["saturated_scales"] < 0.05)
                # The block with a tensor scale's maximum has scale 448; gate and up share a tensor scale.
                self.assertGreater(expert["gate"]["saturated_scales"] + expert["up"]["saturated_scales"], 0)
                self.assertGreater(expert["down"]["saturated_scales"], 0)

    def test_odd_scales_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in os.listdir(NVFP4):
                os.symlink(os.path.join(NVFP4, name), os.path.join(folder, name))
            weights = os.path.join(folder, bf16_demo.weight_files(NVFP4)[0])
            with open(weights, "rb") as file:
                data = bytearray(file.read())
            size = struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8:8 + size])

            def scale(expert, name, factor):
                at = 8 + size + header[f"model.layers.2.mlp.experts.{expert}.{name}"]["data_offsets"][0]
                data[at:at + 4] = struct.pack("<f", struct.unpack("<f", data[at:at + 4])[0] * factor)

            scale(2, "gate_proj.weight_scale_2", 2)
            scale(5, "gate_proj.input_scale", 3)
            scale(7, "gate_proj.input_scale", 1e6)
            scale(7, "up_proj.input_scale", 1e6)
            os.remove(weights)
            with open(weights, "wb") as file:
                file.write(data)
            (layer,) = layers(folder, "--layer", "2")
            (sound,) = layers(NVFP4, "--layer", "2")
        odd = {expert["expert"]: [text.split(":")[0] for text in expert["odd"]] for expert in layer["experts"] if expert["odd"]}
        self.assertEqual(odd, {2: ["gate and up tensor scales differ"], 5: ["gate and up input scales differ"],
                               7: ["input scale far from the layer's median"]})
        self.assertEqual(layer["gate_up_scale_mismatches"], 1)
        # One activation scale for the layer that is a million times too large moves block scales out of the
        # range of E4M3.
        self.assertGreater(layer["errors"]["w4a4"], 2 * sound["errors"]["w4a4"])
        self.assertLess(layer["errors"]["w4a4_per_token"], 1.2 * sound["errors"]["w4a4_per_token"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
