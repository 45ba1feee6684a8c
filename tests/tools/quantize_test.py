"""fp4moe quantize on bf16 twins of the demos: the result can be served, and the report is correct."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import bf16_demo
from serve_process import Serve

BINARY, MODELS = map(os.path.abspath, sys.argv[1:3])
GPT_OSS, DSV3 = (os.path.join(MODELS, name) for name in ("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"))
EVALS = os.path.join(MODELS, "evals")


def fp4moe(*args):
    return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=300)


class Quantize(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temp = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temp.cleanup)
        cls.texts = cls.path("texts.jsonl")
        with open(os.path.join(EVALS, "gsm8k_form.jsonl")) as file, open(cls.texts, "w") as out:
            out.writelines(file.readlines()[:24])
        cls.questions = cls.path("questions.jsonl")
        with open(os.path.join(EVALS, "gsm8k_form.jsonl")) as file, open(cls.questions, "w") as out:
            out.writelines(file.readlines()[24:56])
        cls.bf16 = {demo: bf16_demo.write(demo, cls.path(os.path.basename(demo) + "-bf16"))
                    for demo in (GPT_OSS, DSV3)}

    @classmethod
    def path(cls, name):
        return os.path.join(cls.temp.name, name)

    def quantize(self, demo, name, *flags):
        report, html = self.path(name + ".json"), self.path(name + ".html")
        ended = fp4moe("quantize", self.bf16[demo], self.path(name), *flags, "--calib", self.texts,
                       "--eval", "gsm8k=" + self.questions, "--report-json", report, "--report", html)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        with open(html) as file:
            page = file.read()
        with open(report) as file:
            return json.load(file), page

    def check(self, demo, name, *flags):
        report, page = self.quantize(demo, name, *flags)
        predictions, (scores,) = report["predictions"], report["scores"]
        self.assertGreater(scores["before"], 0.9)
        self.assertGreaterEqual(scores["after"], scores["before"] - 0.035)  # one question of 32
        self.assertTrue(0 < predictions["kl_mean"] < 0.05, predictions)
        self.assertLessEqual(predictions["kl_mean"], predictions["kl_max"])
        self.assertGreater(predictions["same_top1"], 0.95)
        self.assertLess(abs(predictions["perplexity_after"] / predictions["perplexity_before"] - 1), 0.1)
        self.assertTrue(0.01 < report["relative_l2"] < 0.15, report["relative_l2"])
        for part in ("<svg", "Task scores", "KL divergence, mean"):
            self.assertIn(part, page)
        return report

    def test_a_report_can_be_put_into_the_new_folder(self):
        out = self.path("with-report")
        ended = fp4moe("quantize", self.bf16[GPT_OSS], out, "--report", os.path.join(out, "r.html"))
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        self.assertIn("r.html", os.listdir(out))

    def test_mxfp4_as_gpt_oss(self):
        report = self.check(GPT_OSS, "gptoss-mxfp4")
        self.assertEqual((report["dialect"], report["calibration"]), ("gpt-oss", ""))
        self.assertEqual({e["projection"] for e in report["layers"]}, {"experts.gate_up_proj", "experts.down_proj"})

    def test_nvfp4_as_modelopt_runs_w4a4_on_calibrated_scales(self):
        self.check(DSV3, "dsv3-nvfp4", "--format", "nvfp4")
        with Serve(BINARY, self.path("dsv3-nvfp4"), "--fp4-compute", "w4a4", "--self-test", "full") as serve:
            ended = fp4moe("eval", "--base-url", serve.url, "--eval-name", "gsm8k", "--data-path", self.questions,
                           "--num-threads", "32", "--json")
            self.assertGreater(json.loads(ended.stdout)["rounds"][0]["score"], 0.9)
        ended = fp4moe("inspect", self.path("dsv3-nvfp4"), "--numerics", "--json")
        for layer in json.loads(ended.stdout)["numerics"]:
            self.assertEqual((layer["missing_input_scales"], layer["gate_up_scale_mismatches"]), (0, 0))

    def test_a_bf16_checkpoint_is_served_and_says_so(self):
        with Serve(BINARY, self.bf16[GPT_OSS], "--device", "cpu", "--weight-cache-dir", "none") as serve:
            ended = fp4moe("eval", "--base-url", serve.url, "--eval-name", "gsm8k", "--data-path", self.questions,
                           "--num-threads", "8", "--json")
            self.assertGreater(json.loads(ended.stdout)["rounds"][0]["score"], 0.9)
        self.assertTrue(any("bf16 by cpu_bf16" in line for line in serve.lines), serve.lines)

    def test_searching_scales_lowers_the_error(self):
        errors = [self.check(DSV3, "dsv3-mxfp4-" + search, "--format", "mxfp4", "--scale-search", search)["relative_l2"]
                  for search in ("absmax", "mse")]
        self.assertLess(errors[1], 0.95 * errors[0])

    def test_fp4_tensors_that_nothing_declares_are_refused(self):
        for demo, tensor in [(GPT_OSS, "_proj_blocks'"), (DSV3, "_proj.weight_scale'")]:
            folder = self.path(os.path.basename(demo) + "-undeclared")
            shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("hf_quant_config.json", "config.json"))
            shutil.copy(os.path.join(self.bf16[demo], "config.json"), folder)
            ended = fp4moe("run", folder, "--prompt", "a")
            self.assertEqual(ended.returncode, 3, ended.stderr)
            self.assertIn("declares no FP4 quantization", ended.stderr)
            self.assertIn(tensor, ended.stderr)

    def test_refusals(self):
        out = self.path("none")
        for flags, code, text in [
                ([GPT_OSS, out], 3, "already quantised"),
                ([self.bf16[GPT_OSS], out, "--format", "nvfp4"], 3, "--format mxfp4"),
                ([self.bf16[DSV3], out, "--eval", "mmlu"], 2, "gsm8k=FILE, gpqa=FILE or mmlu=FILE"),
                ([self.bf16[DSV3], out, "--calib", self.path("absent.txt")], 2, "absent.txt"),
                ([self.bf16[DSV3], out, "--report", "/none/r.html"], 2, "--report: cannot create '/none/r.html.partial'"),
                ([self.bf16[DSV3], out, "--report-json", self.temp.name], 2, f"--report-json: cannot create '{self.temp.name}'"),
                ([self.bf16[DSV3], self.temp.name], 2, "is not empty")]:
            ended = fp4moe("quantize", *flags)
            self.assertIn(text, ended.stderr)
            self.assertEqual(ended.returncode, code, ended.stderr)
            self.assertFalse(os.path.exists(out))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
