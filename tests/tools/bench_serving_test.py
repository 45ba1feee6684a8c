"""fp4moe bench serving with fp4moe serve, and with a fake server whose URL path selects an error."""
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from serve_process import Serve

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
TOKENS = 4  # per fake response; usage reports 9 for its prompts
PIECES = ["one", " twö", " three"]  # the second token has no text
DELAY = 0.05  # before each piece of /slow


def event(**fields):
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


class Fake(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    bodies, keys, in_flight, most_in_flight, count = [], set(), 0, 0, 0

    def log_message(self, *_):
        pass

    def reply(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        mode = self.path.split("/")[1]
        Fake.keys.add(self.headers["Authorization"])
        if self.path.endswith("/server_info"):
            return self.reply(b"no such route", 404)
        meta = {} if mode == "nameless" else {"n_vocab": 50}
        self.reply(json.dumps({"data": [{"id": "fake", "meta": meta}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Fake.lock:
            Fake.bodies.append((self.path, body))
            Fake.count += 1
            number = Fake.count
        self.answer(self.path.split("/")[1], body, number)

    def answer(self, mode, body, number):
        if mode == "broken" or mode == "every_third" and number % 3 == 0:
            return self.reply(b'{"error": {"message": "out of luck"}}', 500)
        if mode == "silent":
            return time.sleep(3)
        if not body["stream"]:
            usage = {} if mode == "no_usage" else {"usage": self.usage()}
            return self.reply(json.dumps({"choices": [{"text": "".join(PIECES)}], **usage}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header(*(("Connection", "close") if mode == "until_close" else ("Transfer-Encoding", "chunked")))
        self.end_headers()
        for piece in self.pieces(mode, body):
            self.wfile.write(piece if mode == "until_close" else b"%x\r\n%s\r\n" % (len(piece), piece))
        if mode not in ("until_close", "hang_up"):
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def usage(self):
        return {"prompt_tokens": 9, "completion_tokens": TOKENS, "total_tokens": 9 + TOKENS}

    def pieces(self, mode, body):
        """Returns the stream in the pieces that are sent."""
        text = lambda t: {"delta": {"content": t}} if "messages" in body else {"text": t}
        events = [event(choices=[{"index": 0, **text(t)}]) for t in [PIECES[0], "", *PIECES[1:]]]
        if mode == "hang_up":
            return [events[0], events[2][:7]]
        if mode == "garbage":
            return [events[0], b"data: {\n\n"]
        if mode == "error_event":
            return [events[0], event(error={"message": "the engine failed"}), b"data: [DONE]\n\n"]
        if mode != "no_usage" and body.get("stream_options", {}).get("include_usage"):
            events.append(event(choices=[], usage=self.usage()))
        if mode != "no_done":
            events.append(b"data: [DONE]\n\n")
        if mode == "split":
            whole = b": comment\r\n\r\n" + b"".join(events).replace(b"\n", b"\r\n")
            return [whole[i:i + 1] for i in range(len(whole))]
        if mode == "slow":
            return self.slowly(events)
        return events

    def slowly(self, events):
        self.count_in_flight(1)
        for e in events:
            time.sleep(DELAY)
            if e == events[-1]:
                self.count_in_flight(-1)  # the client can send its next request once it has this event
            yield e

    @staticmethod
    def count_in_flight(change):
        with Fake.lock:
            Fake.in_flight += change
            Fake.most_in_flight = max(Fake.most_in_flight, Fake.in_flight)


def bench(url, *flags, environment=None):
    return subprocess.run([BINARY, "bench", "serving", "--base-url", url, *flags], capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, **(environment or {})))


class AgainstFake(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        cls.url = f"http://127.0.0.1:{cls.server.server_port}"
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()

    @classmethod
    def tearDownClass(cls):
        cls.server.shutdown()
        cls.server.server_close()

    def run_fake(self, mode, *flags, failed=0, requests=6):
        """Runs the bench; checks that `failed` requests failed and that the warm-up does not count. Returns
        the result."""
        Fake.bodies.clear()
        Fake.count = 0
        usual = {"--num-prompts": requests, "--random-input-len": 5, "--random-output-len": TOKENS, "--random-range-ratio": 1,
                 "--warmup-requests": 0}
        usual = [str(word) for flag, value in usual.items() if flag not in flags for word in (flag, value)]
        ended = bench(f"{self.url}/{mode}", "--json", *usual, *flags)
        self.said = ended.stderr
        self.assertEqual(ended.returncode, 1 if failed else 0, ended.stderr)
        result = json.loads(ended.stdout)
        self.assertEqual((result["completed"], result["failed"]), (requests - failed, failed))
        return result

    def check_counts(self, result, usage):
        n = result["completed"]
        self.assertEqual(result["total_output_tokens"], n * (TOKENS if usage else len(PIECES)))
        self.assertEqual(result["total_input_tokens"], n * (9 if usage else 5))
        self.assertEqual((result["counted_by_usage"], result["counted_by_pieces"]), (n, 0) if usage else (0, n))
        self.assertAlmostEqual(result["output_throughput"] * result["duration"], result["total_output_tokens"])

    def test_well_behaved(self):
        for backend in ("sglang-oai", "vllm-chat"):
            result = self.run_fake("good", "--backend", backend, "--output-details")
            self.check_counts(result, usage=True)
            self.assertEqual(result["generated_texts"], ["".join(PIECES)] * 6)
            self.assertEqual([len(gaps) for gaps in result["itls"]], [2] * 6)
            self.assertEqual(result["errors"], [""] * 6)
            self.assertEqual({path for path, _ in Fake.bodies},
                             {"/good/v1/chat/completions" if "chat" in backend else "/good/v1/completions"})
            for _, body in Fake.bodies:
                self.assertEqual((body["model"], body["max_tokens"], body["ignore_eos"]), ("fake", TOKENS, True))

    def test_lines_split_at_any_byte(self):
        result = self.run_fake("split", "--output-details")
        self.check_counts(result, usage=True)
        self.assertEqual(result["generated_texts"], ["".join(PIECES)] * 6)

    def test_body_until_close(self):
        self.check_counts(self.run_fake("until_close"), usage=True)

    def test_no_usage_is_said(self):
        self.check_counts(self.run_fake("no_usage"), usage=False)
        self.assertIn("pieces of text in 6 of 6 responses, which had no usage", self.said)
        result = self.run_fake("no_usage", "--backend", "vllm-chat")
        self.assertEqual((result["unknown_inputs"], result["total_input_tokens"]), (6, 0))
        self.assertIn("Prompts of unknown length", self.said)

    def test_whole_answers(self):
        result = self.run_fake("good", "--disable-stream")
        self.check_counts(result, usage=True)
        self.assertIsNone(result["median_ttft_ms"])
        self.assertNotIn("TTFT", self.said)
        self.run_fake("no_usage", "--disable-stream", failed=6)
        self.assertIn("failed, 6 x: the response has no usage; without usage, only the text of a stream can be counted", self.said)

    def test_failures_are_counted_and_named(self):
        for mode, message in (("hang_up", "after 1 pieces of text: the connection broke: "),
                              ("no_done", "after 4 tokens: the stream ended without [DONE]"),
                              ("garbage", "an event is not a JSON object: {"), ("broken", "HTTP 500: "),
                              ("error_event", "the stream ended with an error: "), ("broken", "out of luck")):
            self.run_fake(mode, failed=6)
            self.assertIn("failed, 6 x: ", self.said)
            self.assertIn(message, self.said)
            self.assertIn("error: 6 of 6 requests failed", self.said)

    def test_some_failures_leave_the_rest(self):
        self.check_counts(self.run_fake("every_third", "--max-concurrency", "1", failed=2), usage=True)
        self.assertIn("failed, 2 x: HTTP 500", self.said)

    def test_a_silent_server_runs_out_of_time(self):
        self.run_fake("silent", "--timeout", "1", failed=6)
        self.assertIn("failed, 6 x: no bytes received for 1 s", self.said)

    def test_warm_up_must_succeed(self):
        ended = bench(self.url + "/broken", "--num-prompts", "2")
        self.assertEqual(ended.returncode, 1)
        self.assertIn("error: warm-up: HTTP 500", ended.stderr)
        self.run_fake("good", "--warmup-requests", "3", "--max-concurrency", "1")
        self.assertEqual(len(Fake.bodies), 9)
        self.assertEqual([body for body in Fake.bodies if body == Fake.bodies[0]], Fake.bodies[:4])

    def test_times(self):
        result = self.run_fake("slow", "--max-concurrency", "2", "--output-details")
        for ttft, gaps in zip(result["ttfts"], result["itls"]):
            self.assertGreaterEqual(ttft, DELAY)
            self.assertGreaterEqual(ttft + sum(gaps), 4 * DELAY)
            self.assertLessEqual(ttft + sum(gaps), result["max_e2e_latency_ms"] / 1e3)
        self.assertLess(min(result["ttfts"]), 3 * DELAY)  # of 6 * DELAY: read as it arrives
        self.assertGreaterEqual(result["mean_e2e_latency_ms"], 6e3 * DELAY)
        self.assertGreaterEqual(result["duration"], 3 * 6 * DELAY)
        self.assertLessEqual(result["concurrency"], 2)

    def test_concurrency_and_rate(self):
        for at_once in (1, 3):
            Fake.most_in_flight = 0
            self.run_fake("slow", "--max-concurrency", str(at_once))
            self.assertEqual(Fake.most_in_flight, at_once)
        self.assertGreater(self.run_fake("good", "--request-rate", "100", requests=20)["duration"], 0.02)

    def test_prompts(self):
        flags = ("--random-range-ratio", "0.5", "--random-input-len", "10", "--random-output-len", "6", "--max-concurrency", "1")
        self.run_fake("good", *flags, requests=50)
        first = list(Fake.bodies)
        self.assertEqual({len(body["prompt"]) for _, body in first}, set(range(5, 11)))
        self.assertEqual({body["max_tokens"] for _, body in first}, set(range(3, 7)))
        ids = {i for _, body in first for i in body["prompt"]}
        self.assertTrue(max(ids) == 49 and min(ids) == 0, ids)
        self.run_fake("good", *flags, requests=50)
        self.assertEqual(Fake.bodies, first)
        self.run_fake("good", *flags, "--seed", "2", "--vocab-size", "7", requests=50)
        self.assertEqual(max(i for _, body in Fake.bodies for i in body["prompt"]), 6)
        self.assertNotEqual(Fake.bodies, first)

    def test_body_and_key(self):
        Fake.keys.clear()
        self.run_fake("good", "--request-rate", "inf", "--extra-request-body", '{"temperature": 0.5, "top_k": 3}', "--disable-ignore-eos", "--api-key", "k")
        for _, body in Fake.bodies:
            self.assertEqual((body["temperature"], body["top_k"], body["ignore_eos"]), (0.5, 3, False))
        self.assertEqual(Fake.keys, {"Bearer k"})

    def test_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path, output = os.path.join(folder, "prompts.jsonl"), os.path.join(folder, "out.jsonl")
            with open(path, "w") as file:
                file.write('{"prompt": "a"}\n\n{"prompt": [1, 2], "max_tokens": 3}\n')
            flags = ("--dataset-name", "file", "--dataset-path", path, "--max-concurrency", "1", "--output-file", output)
            self.run_fake("good", *flags, requests=2)
            self.assertEqual([(body["prompt"], body["max_tokens"]) for _, body in Fake.bodies], [("a", TOKENS), ([1, 2], 3)])
            result = self.run_fake("good", *flags, "--tag", "second", requests=2)
            with open(output) as file:
                lines = [json.loads(line) for line in file]
            self.assertEqual([line["tag"] for line in lines], ["", "second"])
            self.assertEqual(lines[1], result)
            ended = bench(self.url + "/good", *flags, "--backend", "vllm-chat")
            self.assertEqual(ended.returncode, 2)
            self.assertIn('line 3: "prompt" has token ids, which /v1/chat/completions does not accept', ended.stderr)

    def test_unwritable_files_are_refused_before_any_request(self):
        for path, reason in (("/none/x", "No such file or directory"), (tempfile.gettempdir(), "Is a directory")):
            ended = bench("http://127.0.0.1:1", "--output-file", path)
            self.assertEqual((ended.returncode, ended.stderr), (2, f"error: --output-file {path}: {reason}\n"))

    def test_refusals(self):
        ended = bench(self.url + "/nameless")
        self.assertEqual(ended.returncode, 3)
        self.assertIn("does not report its vocabulary size at /server_info or /v1/models; set --vocab-size", ended.stderr)
        ended = bench("http://127.0.0.1:1")
        self.assertEqual(ended.returncode, 1)
        self.assertIn("http://127.0.0.1:1/v1/models: Connection refused", ended.stderr)
        for code, message, flags in (
                (2, "--dataset-name file requires --dataset-path", ("--dataset-name", "file")),
                (2, "--extra-request-body 7 must be a JSON object", ("--extra-request-body", "7")),
                (2, "--backend: sglang not in", ("--backend", "sglang")),
                (2, "--request-rate: 0 must be inf or at least 0.01", ("--request-rate", "0")),
                (2, "--request-rate: nan must be inf or at least 0.01", ("--request-rate", "nan")),
                (2, "--timeout: Value inf not in range", ("--timeout", "inf")),
                (2, "--dataset-path /nowhere cannot be read", ("--dataset-name", "file", "--dataset-path", "/nowhere"))):
            ended = bench(self.url + "/good", *flags)
            self.assertEqual((ended.returncode, message in ended.stderr), (code, True), ended.stderr)


class AgainstServe(unittest.TestCase):
    def test_known_numbers_of_tokens(self):
        with Serve(BINARY, MODEL) as serve:
            ended = bench(serve.url, *"--num-prompts 40 --random-input-len 17 --random-output-len 9 --random-range-ratio 1 "
                                      "--max-concurrency 8 --json".split())
            self.assertEqual(ended.returncode, 0, ended.stderr)
            result = json.loads(ended.stdout)
            self.assertEqual((result["completed"], result["total_input_tokens"], result["total_output_tokens"]), (40, 680, 360))
            self.assertEqual((result["counted_by_usage"], result["short_outputs"]), (40, 0))
            for label in ("Successful requests:", "Output token throughput (tok/s):", "Median TTFT (ms):", "P99 ITL (ms):"):
                self.assertIn(label, ended.stderr)
            ended = bench(serve.url, *"--backend vllm-chat --num-prompts 8 --random-input-len 5 --random-output-len 7 "
                                      "--random-range-ratio 1 --disable-stream --json".split())
            self.assertEqual((ended.returncode, json.loads(ended.stdout)["total_output_tokens"]), (0, 56), ended.stderr)
            ended = bench(serve.url, *"--num-prompts 3 --random-input-len 200000 --random-range-ratio 1 --warmup-requests 0".split())
            self.assertEqual(ended.returncode, 1)
            self.assertIn("failed, 3 x: HTTP 400: ", ended.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
