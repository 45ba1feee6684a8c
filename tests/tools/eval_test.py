"""serve + eval on the demo checkpoint: the scores, and equal responses with 1 and 32 threads."""
import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest

from serve_process import Serve

BINARY, MODEL, EVALS = sys.argv[1:4]
LEAST_SCORE = 0.9  # the stock implementation scores 0.996 and 1.000 on all 512 questions


def evaluate(url, name, data, *flags):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        out = subprocess.run([BINARY, "eval", "--base-url", url, "--eval-name", name, "--data-path", os.path.join(EVALS, data),
                              "--num-examples", "32", "--max-tokens", "256", "--output-json", report, *flags],
                             check=True, capture_output=True, text=True).stdout
        with open(report) as file:
            return out, json.load(file)


class Eval(unittest.TestCase):
    def check(self, url, *arguments):
        reports = []
        for threads in ("1", "32"):
            out, report = evaluate(url, *arguments, "--num-threads", threads)
            score = report["rounds"][0]["score"]
            self.assertIn(f"\nScore: {score:.3f}\n", out)
            self.assertIn("Total latency: ", out)
            self.assertIn("Output throughput: ", out)
            self.assertGreaterEqual(score, LEAST_SCORE, arguments)
            reports.append([(a["question"], a["answer"]) for a in report["rounds"][0]["answers"]])
        self.assertEqual(len(reports[0]), 32)
        self.assertEqual(reports[0], reports[1])

    def test_all(self):
        with Serve(BINARY, MODEL) as serve:
            self.check(serve.url, "gsm8k", "gsm8k_form.jsonl")
            self.check(serve.url, "gpqa", "gpqa_form.csv")
            self.check(serve.url, "gsm8k", "gsm8k_form.jsonl", "--num-shots", "2")
            self.check(serve.url, "gsm8k", "gsm8k_form.jsonl", "--api", "generate", "--num-shots", "2")
            out, report = evaluate(serve.url, "gsm8k", "gsm8k_form.jsonl", "--repeat", "2")
            self.assertEqual(len(report["rounds"]), 2)
            self.assertIn("Repeat: 2, mean: ", out)
            self.assertIn("Scores: [", out)
            out, report = evaluate(serve.url, "gsm8k", "gsm8k_form.jsonl", "--json")
            self.assertEqual(json.loads(out), report)
        log = "".join(serve.lines)
        self.assertRegex(log, r"Prefill batch, #new-seq: \d+, #new-token: \d+, #cached-token: \d+, token usage: \d\.\d\d, #run")
        self.assertRegex(log, r"Decode batch, #running-req: \d+, #token: \d+, token usage: \d\.\d\d, gen throughput")

    def test_unwritable_reports_are_refused_before_any_request(self):
        for flag in ("--output-json", "--output-html"):
            for path in ("/none/x", tempfile.gettempdir()):
                ended = subprocess.run([BINARY, "eval", "--base-url", "http://127.0.0.1:1", "--eval-name", "gsm8k", "--data-path",
                                        os.path.join(EVALS, "gsm8k_form.jsonl"), flag, path], capture_output=True, text=True)
                self.assertEqual(ended.returncode, 2, ended.stderr)
                self.assertIn(f"{flag}: cannot create '{path}", ended.stderr)

    def test_ipv6_addresses(self):
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError as error:
            self.skipTest(f"no IPv6: {error}")
        for host in ("::1", "[::1]"):
            with self.subTest(host), Serve(BINARY, MODEL, "--host", host) as serve:
                self.assertRegex(serve.url, r"\Ahttp://\[::1\]:\d+\Z")
                port = serve.url.rpartition(":")[2]
                for command in (["eval", "--eval-name", "gsm8k", "--data-path", os.path.join(EVALS, "gsm8k_form.jsonl"),
                                 "--num-examples", "1", "--max-tokens", "4"],
                                ["bench", "serving", "--num-prompts", "1", "--random-input-len", "4", "--random-output-len", "2"]):
                    ended = subprocess.run([BINARY, *command, "--host", host, "--port", port], capture_output=True, text=True, timeout=60)
                    self.assertEqual((ended.returncode, ended.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
