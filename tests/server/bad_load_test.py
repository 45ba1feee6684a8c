"""A server under abuse: many clients, long prompts, an unusual system. It stays up and does not leak."""
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from urllib.parse import urlsplit

import crowd
from serve_process import Serve, eventually, metric

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
CONTEXT = 1024
MIB = 1 << 20
# An LD_PRELOAD library that shifts the system clock back and forth by up to a day, every 16 reads.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static long step(void) { static unsigned n; return ((n++ >> 4) % 3 - 1) * 86400L; }
int clock_gettime(clockid_t id, struct timespec* t) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec += step();
  return result;
}
time_t time(time_t* out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
"""


def ask(url, path, body=None, timeout=120):
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())


def generate(url, tokens=8, **fields):
    body = {"text": "Tom has", "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    return ask(url, "/generate", {**body, **fields})


class Prompts(unittest.TestCase):
    """Prompt lengths at the limits."""

    @classmethod
    def setUpClass(cls):
        cls.serve = Serve(BINARY, MODEL, "--context-length", str(CONTEXT), "--max-total-tokens", str(CONTEXT)).__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.serve.__exit__()
        assert cls.serve.exit_code == 0

    def refused(self, ids, *words):
        status, text, _ = ask(self.serve.url, "/v1/completions", {"prompt": ids, "max_tokens": 1})
        error = json.loads(text)["error"]
        self.assertEqual((status, error["code"]), (400, "context_length_exceeded"), text)
        for word in words:
            self.assertIn(word, error["message"])

    def test_beyond_the_context(self):
        for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
            self.refused([7] * length, str(length), str(CONTEXT))

    def test_larger_than_the_whole_kv_pool(self):
        """A request cannot exceed the pool: a pool smaller than the context is refused at start, and the largest
        request completes."""
        small = subprocess.run([BINARY, "serve", MODEL, "--context-length", str(CONTEXT), "--max-total-tokens", "512"],
                               capture_output=True, text=True, timeout=60)
        self.assertEqual(small.returncode, 4)
        self.assertIn("512", small.stderr)
        status, text, _ = generate(self.serve.url, 10 * CONTEXT, text=None, input_ids=[7] * (CONTEXT - 10))
        self.assertEqual((status, json.loads(text)["meta_info"]["completion_tokens"]), (200, 10))

    def test_100_mb(self):
        with crowd.connect(self.serve.url) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 104857600\r\n\r\n")
            before = crowd.resident_bytes(self.serve.process.pid)
            with contextlib.suppress(OSError):
                for _ in range(100):
                    client.sendall(b" " * MIB)
            self.assertIn(b" 413 ", client.recv(4096).split(b"\r\n")[0])
        self.assertLess(crowd.resident_bytes(self.serve.process.pid) - before, 40 * MIB)
        # The longest text that the body limit allows has far too many tokens and is refused quickly.
        self.assertEqual(ask(self.serve.url, "/generate", {"text": "ab " * (10 * MIB // 3)})[0], 400)

    def test_disconnect_during_prefill(self):
        ids = [7] * 500
        for _ in range(5):
            with crowd.connect(self.serve.url) as client:
                client.sendall(crowd.post_bytes("/generate", {"input_ids": ids}))
        self.assertTrue(eventually(lambda: metric(self.serve.url, "num_running_reqs") == 0 and
                                   metric(self.serve.url, "num_used_tokens") == 0))

    def test_special_tokens_in_text_are_text(self):
        """User text cannot contain the template's special tokens."""
        def prompt_tokens(role, content):
            status, text, _ = ask(self.serve.url, "/v1/chat/completions",
                                  {"messages": [{"role": role, "content": content}], "max_tokens": 1})
            self.assertEqual(status, 200, text)
            return json.loads(text)["usage"]["prompt_tokens"]
        mark = "<|im_end|>"
        self.assertEqual(prompt_tokens("system", 2 * mark) - prompt_tokens("system", mark), 1)
        self.assertGreater(prompt_tokens("user", 2 * mark) - prompt_tokens("user", mark), 1)


class Load(unittest.TestCase):
    def test_ten_times_over_capacity(self):
        """Refusals have Retry-After, memory does not grow, and the server serves normally afterwards."""
        with Serve(BINARY, MODEL, "--max-running-requests", "2", "--max-queued-requests", "2") as serve:
            expected = json.loads(generate(serve.url, 64)[1])["output_ids"]

            def burst():
                with concurrent.futures.ThreadPoolExecutor(40) as pool:
                    return list(pool.map(lambda _: generate(serve.url, 64), range(40)))
            burst()
            before = crowd.resident_bytes(serve.process.pid)
            statuses = []
            for _ in range(5):
                for status, text, headers in burst():
                    statuses.append(status)
                    if status == 200:
                        self.assertEqual(json.loads(text)["output_ids"], expected)
                    else:
                        self.assertIn(status, (429, 503), text)
                        self.assertGreaterEqual(int(headers["Retry-After"]), 1)
            self.assertGreater(statuses.count(200), 10)
            self.assertGreater(len(statuses) - statuses.count(200), 50)
            self.assertLess(crowd.resident_bytes(serve.process.pid) - before, 32 * MIB)
            self.assertEqual([generate(serve.url)[0] for _ in range(3)], [200] * 3)
            self.assertTrue(eventually(lambda: metric(serve.url, "num_used_tokens") == 0))

    def test_churn(self):
        """Clients that disconnect at once leave no state behind."""
        with Serve(BINARY, MODEL, "--context-length", "1024", "--max-total-tokens", "2048") as serve:
            body = crowd.post_bytes("/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 500}})

            def come_and_go(count):
                for _ in range(count):
                    with crowd.connect(serve.url) as client:
                        client.sendall(body)
            come_and_go(300)
            before = crowd.resident_bytes(serve.process.pid)
            come_and_go(2000)
            self.assertTrue(eventually(lambda: metric(serve.url, "num_running_reqs") == 0 and
                                       metric(serve.url, "num_queue_reqs") == 0))
            self.assertTrue(eventually(lambda: metric(serve.url, "num_used_tokens") == 0))
            self.assertLess(crowd.resident_bytes(serve.process.pid) - before, 16 * MIB)
            self.assertEqual(generate(serve.url)[0], 200)

    def test_thousands_idle_and_dozens_slow(self):
        """Idle and slow clients do not change a stream's tokens and use little memory."""
        count = min(10_000, crowd.raise_descriptor_limit() - 500)
        with Serve(BINARY, MODEL) as serve:
            expected, _ = crowd.stream(serve.url, 200)
            before = crowd.resident_bytes(serve.process.pid)
            with crowd.idle_connections(serve.url, count), crowd.slow_readers(serve.url, 50, 400) as sip:
                self.assertEqual(metric(serve.url, "num_open_connections") >= count + 50, True)
                self.assertEqual(crowd.stream(serve.url, 200)[0], expected)
                sip(1)
                self.assertEqual(ask(serve.url, "/health")[0], 200)
                self.assertLess(crowd.resident_bytes(serve.process.pid) - before, 200 * MIB)
            self.assertTrue(eventually(lambda: metric(serve.url, "num_open_connections") < 10))
            self.assertEqual(crowd.stream(serve.url, 200)[0], expected)

    def test_descriptors_run_out(self):
        """Once the descriptor limit is reached, new clients get 503 and connected clients are still served."""
        launcher = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
        with Serve(BINARY, MODEL, launcher=launcher) as serve, contextlib.ExitStack() as stack:
            clients = [stack.enter_context(crowd.connect(serve.url)) for _ in range(200)]
            served, refused = 0, 0
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = client.recv(4096)
                served += answer.startswith(b"HTTP/1.1 200 ")
                refused += answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in answer
            self.assertEqual(served + refused, 200)
            self.assertGreater(served, 50)
            self.assertGreater(refused, 50)
            stack.close()
            self.assertTrue(eventually(lambda: ask(serve.url, "/health")[0] == 200))


class System(unittest.TestCase):
    def test_hangup_is_ignored(self):
        with Serve(BINARY, MODEL) as serve:
            serve.process.send_signal(signal.SIGHUP)
            self.assertEqual(generate(serve.url)[0], 200)
        self.assertEqual(serve.exit_code, 0)

    def test_clock_that_jumps(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/clock.c", "w") as file:
                file.write(CLOCK)
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder + "/clock.so", folder + "/clock.c", "-ldl"],
                           check=True)
            with Serve(BINARY, MODEL, "--drain-timeout", "30",
                       launcher=("env", "LD_PRELOAD=" + folder + "/clock.so")) as serve:
                ids, gaps = crowd.stream(serve.url, 300)
                self.assertEqual(len(ids), 300)
                self.assertGreater(len(gaps), 30)  # some events are left out if the client is slow
                text = ask(serve.url, "/metrics")[1]
                for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
                    total = float(next(line for line in text.splitlines() if line.startswith(f"sglang:{name}_sum")).split()[1])
                    self.assertTrue(0 < total < 3600, (name, total))
            self.assertEqual(serve.exit_code, 0)
            days = {line[1:11] for line in serve.lines if line.startswith("[")}
            self.assertGreater(len(days), 1, "the clock did not jump")


class UnixSocket(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = folder.name + "/http.sock"

    def get(self, path):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(self.path)
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while data := client.recv(65536):
                answer += data
        return int(answer.split()[1])

    def serve(self, *flags):
        return Serve(BINARY, MODEL, "--host", "unix:" + self.path, *flags)

    def test_life(self):
        with self.serve("--unix-socket-mode", "600") as serve:
            self.assertEqual(self.get("/health"), 200)
            self.assertEqual(self.get("/v1/models"), 200)
            self.assertEqual(os.stat(self.path).st_mode & 0o777, 0o600)
            second = subprocess.run([BINARY, "serve", MODEL, "--host", "unix:" + self.path], capture_output=True, text=True)
            self.assertEqual(second.returncode, 1)
            self.assertIn("another server already listens there", second.stderr)
            self.assertEqual(self.get("/health"), 200)
            log = "".join(serve.lines)
            self.assertIn("listening on unix:" + self.path, log)
            self.assertIn("curl --unix-socket " + self.path, log)
        self.assertFalse(os.path.exists(self.path))

    def test_what_a_killed_server_left_is_replaced(self):
        with self.serve() as serve:
            serve.process.kill()
            serve.process.wait()
        self.assertTrue(os.path.exists(self.path))
        with self.serve():
            self.assertEqual(self.get("/health"), 200)
            os.unlink(self.path)  # now another process's file: must not be removed at the end
            with open(self.path, "w"):
                pass
        self.assertTrue(os.path.exists(self.path))
        refused = subprocess.run([BINARY, "serve", MODEL, "--host", "unix:" + self.path], capture_output=True, text=True)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("is not a socket", refused.stderr)

    def test_bad_places(self):
        for host, code, word in (("unix:", 2, "1 to 107"), ("unix:" + "/a" * 60, 2, "120"), ("unix:/none/x", 1, "No such file")):
            done = subprocess.run([BINARY, "serve", MODEL, "--host", host], capture_output=True, text=True)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(word, done.stderr)
        done = subprocess.run([BINARY, "serve", MODEL, "--unix-socket-mode", "8"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
