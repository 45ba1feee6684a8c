"""Commands run with stacks of 64 KiB (`ulimit -s 64`), of which attention needs more.

  thread_stacks_test.py BINARY MODEL [flags of unittest]
"""
import json
import os
import resource
import subprocess
import sys
import tempfile
import unittest
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
sys.dont_write_bytecode = True
from serve_process import Serve  # noqa: E402

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
BYTES = 64 << 10


class ThreadStacks(unittest.TestCase):
    def run_limited(self, hard, *command):
        def limit():
            resource.setrlimit(resource.RLIMIT_STACK, (BYTES, hard))

        done = subprocess.run([BINARY, *command], preexec_fn=limit, env={"PATH": os.environ["PATH"]}, text=True, timeout=120,
                              capture_output=True)
        self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")
        return done.stdout

    def test_main_thread_and_others(self):
        for hard in (BYTES, 16 << 20):
            with self.subTest(hard_limit=hard), tempfile.TemporaryDirectory() as folder:
                ids, logits = os.path.join(folder, "ids.json"), os.path.join(folder, "logits.safetensors")
                with open(ids, "w") as file:
                    json.dump(list(range(1, 200)), file)
                self.run_limited(hard, "logits", MODEL, "--device", "cpu", "--input-ids", ids, "--output", logits)
                self.assertGreater(os.path.getsize(logits), 199 * 1024 * 4)
                table = self.run_limited(hard, "bench", "latency", MODEL, "--device", "cpu", "-p", "64", "-n", "4", "-r", "1", "-t", "2")
                self.assertIn("pp64", table)

    def test_a_server_ends_at_a_signal(self):
        with Serve(BINARY, MODEL, "--device", "cpu", launcher=("bash", "-c", 'ulimit -s 64; exec "$@"', "_")) as serve:
            body = json.dumps({"prompt": "1 + 1 =", "max_tokens": 4}).encode()
            request = urllib.request.Request(serve.url + "/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                self.assertEqual(json.load(response)["usage"]["completion_tokens"], 4)
        self.assertEqual(serve.exit_code, 0)

    def test_a_usage_error_has_its_exit_code(self):
        done = subprocess.run([BINARY, "logits", "--no-such-flag"], capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (BYTES, BYTES)), env={})
        self.assertEqual(done.returncode, 2, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
