"""The server's log as text and JSON and with an unusable stdout, and the notifications to a service manager."""
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

from serve_process import Serve, eventually, metric

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
SECONDS = 20  # far more than any step takes


def generate(url, tokens=8):
    body = {"text": "Tom has", "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read())


class Logs(unittest.TestCase):
    def test_json(self):
        with Serve(BINARY, MODEL, "--log-format", "json", "--log-requests", "--log-requests-level", "3",
                   "--decode-log-interval", "4") as serve:
            answer = generate(serve.url, 1600)
        lines = [json.loads(line) for line in serve.lines]
        for line in lines:
            self.assertRegex(line["timestamp"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            self.assertIn(line["level"], ("info", "warning"))
            self.assertEqual("message" in line, "event" not in line, line)
        events = {line["event"]: line for line in lines if "event" in line}
        self.assertEqual(events["request.received"]["rid"], [answer["meta_info"]["id"]])
        self.assertEqual(json.loads(events["request.received"]["body"])["text"], "Tom has")
        self.assertEqual(events["request.finished"]["choices"][0]["completion_tokens"], 1600)
        self.assertEqual(events["request.finished"]["choices"][0]["text"], answer["text"])
        self.assertEqual(events["batch.prefill"]["num_new_seq"], 1)
        self.assertGreater(events["batch.decode"]["token_usage"], 0)

    def test_text_has_sglangs_words(self):
        with Serve(BINARY, MODEL, "--decode-log-interval", "4") as serve:
            generate(serve.url, 1600)
        log = "".join(serve.lines)
        self.assertRegex(log, r"Prefill batch, #new-seq: 1, #new-token: \d+, #cached-token: 0, token usage: 0.\d\d, ")
        self.assertRegex(log, r"Decode batch, #running-req: 1, #token: \d+, token usage: 0.\d\d, "
                              r"gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0")

    def test_drafts(self):
        tokens = 4000  # take longer than the interval between two lines
        with Serve(BINARY, MODEL, "--device", "cpu") as serve:
            plain = generate(serve.url, tokens)
        self.assertNotIn("spec_verify_ct", plain["meta_info"])
        with Serve(BINARY, MODEL, "--device", "cpu", "--decode-log-interval", "4", "--speculative-algorithm", "NGRAM") as serve:
            answer = generate(serve.url, tokens)
            # The statistics of a step follow its tokens.
            self.assertTrue(eventually(lambda: metric(serve.url, "num_running_reqs") == 0))
            with urllib.request.urlopen(serve.url + "/metrics", timeout=SECONDS) as response:
                metrics = response.read().decode()
            with urllib.request.urlopen(serve.url + "/server_info", timeout=SECONDS) as response:
                info = json.load(response)
        meta = answer["meta_info"]
        self.assertEqual(info["speculative_algorithm"], "NGRAM")
        self.assertAlmostEqual(info["avg_spec_accept_length"], (tokens - 1) / meta["spec_verify_ct"])
        verified, proposed, correct = (meta[f"spec_{name}"] for name in ("verify_ct", "num_proposed_drafts", "num_correct_drafts"))
        self.assertEqual(verified + correct, tokens - 1)  # the prompt's step gives the first token
        self.assertGreater(correct, 0)
        self.assertAlmostEqual(meta["spec_accept_length"], tokens / verified)
        self.assertAlmostEqual(meta["spec_accept_rate"], correct / proposed)
        histogram = meta["spec_correct_drafts_histogram"]
        self.assertEqual(histogram, meta["spec_accept_histogram"])
        self.assertEqual(sum(histogram), verified)
        by_position = [sum(histogram[i + 1:]) for i in range(3)]  # a step that keeps n drafts keeps positions 0 to n - 1
        self.assertEqual(info["spec_correct_by_position"], by_position)
        self.assertEqual(sum(by_position), correct)
        self.assertEqual(sum(info["spec_proposed_by_position"]), proposed)
        for i, count in enumerate(by_position):
            self.assertIn(f"spec_correct_drafts_by_position_total{{model_name=\"{os.path.basename(MODEL)}\",position=\"{i}\"}} {count}\n",
                          metrics)
        for line in (f"spec_verify_calls_total{{model_name=\"{os.path.basename(MODEL)}\"}} {verified}\n",
                     f"spec_correct_drafts_total{{model_name=\"{os.path.basename(MODEL)}\"}} {correct}\n",
                     "# TYPE sglang:spec_accept_length gauge\n", "# TYPE sglang:spec_accept_rate gauge\n"):
            self.assertIn(line, metrics)
        log = "".join(serve.lines)
        self.assertRegex(log, r"Decode batch, .*accept len: [1-4]\.\d\d, accept rate: [01]\.\d\d, "
                              r"by position: [01]\.\d\d( [01]\.\d\d)*, gen throughput")
        self.assertIn("NGRAM", log)
        self.assertEqual(answer["output_ids"], plain["output_ids"])

    def test_level(self):
        with Serve(BINARY, MODEL, "--log-level", "debug") as serve:
            generate(serve.url)
        self.assertRegex("".join(serve.lines), r"POST /generate 200")

    def serve_without_log(self, stdout, before=None):
        """A server with an unusable stdout still serves and exits normally. `before` runs first in its process."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = subprocess.Popen([BINARY, "serve", MODEL, "--port", str(port)], stdout=stdout, preexec_fn=before)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(100 * SECONDS):
                with contextlib.suppress(OSError):
                    return generate(url)
                self.assertIsNone(process.poll())
                time.sleep(0.01)
            self.fail("the server never responded")
        finally:
            process.terminate()
            self.assertEqual(process.wait(timeout=SECONDS), 0)

    def test_closed_pipe(self):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            self.serve_without_log(writing)
        finally:
            os.close(writing)

    def test_closed_stdout(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = subprocess.Popen(["sh", "-c", 'exec "$@" >&-', "sh", BINARY, "serve", MODEL, "--port", str(port)])
        try:
            for _ in range(100 * SECONDS):
                with contextlib.suppress(OSError):
                    generate(f"http://127.0.0.1:{port}")
                    break
                time.sleep(0.01)
            generate(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            self.assertEqual(process.wait(timeout=SECONDS), 0)

    def test_full_disk(self):
        with open("/dev/full", "w") as full:
            self.serve_without_log(full)

    def test_file_size_limit(self):
        """Under a file size limit, log lines beyond the limit are lost and the process continues."""
        with tempfile.TemporaryFile() as log:
            self.serve_without_log(log, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256)))
            self.assertEqual(os.fstat(log.fileno()).st_size, 256)


class ServiceManager(unittest.TestCase):
    def listen(self, address):
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(manager.close)
        manager.bind(address)
        manager.settimeout(SECONDS)
        return manager

    def serve(self, manager, address, **more):
        os.environ.update({"NOTIFY_SOCKET": address, **more})
        try:
            messages = []
            with Serve(BINARY, MODEL) as serve:
                messages.append(manager.recv(4096).decode())
                if more:
                    messages += [manager.recv(4096).decode() for _ in range(3)]
                generate(serve.url)
            manager.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                while True:
                    messages.append(manager.recv(4096).decode())
            return messages
        finally:
            for name in ("NOTIFY_SOCKET", *more):
                del os.environ[name]

    def test_ready_and_stopping(self):
        with tempfile.TemporaryDirectory() as folder:
            for address in (folder + "/notify", "\0fp4moe-test-" + str(os.getpid())):
                messages = self.serve(self.listen(address), address.replace("\0", "@"))
                self.assertEqual([m.split("\n")[0] for m in messages], ["READY=1", "STOPPING=1"])
                self.assertIn("STATUS=serving demo-gptoss-mxfp4", messages[0])

    def test_watchdog(self):
        with tempfile.TemporaryDirectory() as folder:
            messages = self.serve(self.listen(folder + "/n"), folder + "/n", WATCHDOG_USEC="400000")
            self.assertEqual(messages[:4], [messages[0]] + ["WATCHDOG=1"] * 3)
            self.assertIn("READY=1", messages[0])
            other = self.serve(self.listen(folder + "/m"), folder + "/m")
            self.assertNotIn("WATCHDOG=1", other)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
