"""Bad requests to a running server: each gets a clear error and disturbs no concurrent stream."""
import concurrent.futures
import contextlib
import http.client
import json
import os
import socket
import sys
import tempfile
import threading
import unittest
from urllib.parse import urlsplit

from serve_process import Serve

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
SECONDS = 10  # far more than any response takes
STREAM = {"text": "Tom has", "stream": True,
          "sampling_params": {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}}
HUGE_LOOP = "{% set r = range(9999) %}" + "{% for a in r %}" * 5 + "{% endfor %}" * 5


def get(serve, path, method="GET", body=None):
    url = urlsplit(serve.url)
    with contextlib.closing(http.client.HTTPConnection(url.hostname, url.port, timeout=60)) as connection:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()


def post(serve, path, body):
    return get(serve, path, "POST", body if isinstance(body, bytes) else json.dumps(body))


def chat(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


REQUESTS = [  # name, path, body, status, text in error.message
    ("malformed JSON", "/v1/chat/completions", b'{"messages": ', 400, "not valid JSON"),
    ("no body", "/v1/completions", b"", 400, "not valid JSON"),
    ("deep JSON", "/v1/completions", b'{"prompt":' + b"[" * 60000, 400, "deeper than 64"),
    ("invalid UTF-8", "/v1/completions", b'{"prompt": "\xff\xfe"}', 400, "not valid JSON"),
    ("a list for a body", "/v1/completions", b"[1]", 400, "must be a JSON object"),
    ("prompt is an object", "/v1/completions", {"prompt": {"a": 1}}, 400, "prompt", "a string, token ids"),
    ("prompt is missing", "/v1/completions", {}, 400, "prompt", "missing"),
    ("empty prompt", "/v1/completions", {"prompt": []}, 400, "prompt", "at least one"),
    ("id out of range", "/generate", {"input_ids": [99999]}, 400, "99999", "between 0 and 1023"),
    ("id beyond 2^31", "/generate", {"input_ids": [2**40]}, 400, "input_ids", "token id"),
    ("messages are a text", "/v1/chat/completions", chat(messages="Hi"), 400, "messages", "array"),
    ("role is a number", "/v1/chat/completions", chat(messages=[{"role": 1, "content": ""}]), 400, "messages[0].role"),
    ("stream is a text", "/v1/chat/completions", chat(stream="yes"), 400, "stream", "a boolean"),
    ("max_tokens is negative", "/v1/chat/completions", chat(max_tokens=-1), 400, "max_tokens", "-1"),
    ("max_tokens is a text", "/v1/chat/completions", chat(max_tokens="many"), 400, "max_tokens", "an integer"),
    ("temperature is huge", "/v1/chat/completions", chat(temperature=1e30), 400, "temperature", "[0, 100]"),
    ("unknown model", "/v1/chat/completions", chat(model="gpt-9"), 404, '"gpt-9"', '"demo"'),
    ("unknown route", "/v1/embeddings", {}, 404, "/v1/embeddings"),
    ("long prompt", "/v1/completions", {"prompt": [7] * 2000}, 400, "2000 tokens", "1024"),
    ("large body", "/v1/completions", {"prompt": "a" * 100_000}, 413, "65536"),
]

RAW = [  # name, bytes on the wire, status
    ("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    ("large header", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", 431),
    ("bad length", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
    ("unknown method", b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    ("wrong method", b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
]


class Requests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.serve = Serve(BINARY, MODEL, "--served-model-name", "demo", "--context-length", "1024",
                          "--max-body-bytes", "65536").__enter__()
        cls.expected = json.loads(post(cls.serve, "/generate", STREAM | {"stream": False})[1])["output_ids"]

    @classmethod
    def tearDownClass(cls):
        cls.serve.__exit__()
        assert cls.serve.exit_code == 0, cls.serve.exit_code

    def setUp(self):
        """Streams run one after another during each test; all must produce the same output as alone."""
        self.done = threading.Event()
        pool = concurrent.futures.ThreadPoolExecutor()
        self.neighbour = pool.submit(self.keep_streaming)
        pool.shutdown(wait=False)
        self.addCleanup(self.check_neighbour)

    def keep_streaming(self):
        streams = [post(self.serve, "/generate", STREAM)[1]]
        while not self.done.is_set():
            streams.append(post(self.serve, "/generate", STREAM)[1])
        return streams

    def check_neighbour(self):
        self.done.set()
        for stream in self.neighbour.result():
            *_, last, done = stream.removesuffix("\n\n").split("\n\n")
            answer = json.loads(last.removeprefix("data: "))
            self.assertEqual(done, "data: [DONE]")
            self.assertEqual(answer["meta_info"]["finish_reason"], {"type": "length", "length": 900})
            self.assertEqual(answer["output_ids"], self.expected)
        self.assert_alive()

    def assert_alive(self):
        self.assertEqual(get(self.serve, "/health")[0], 200)

    def socket(self, data):
        url = urlsplit(self.serve.url)
        connection = socket.create_connection((url.hostname, url.port), timeout=SECONDS)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before everything was sent
            connection.sendall(data)
        return connection

    def test_bodies(self):
        for name, path, body, status, *words in REQUESTS:
            with self.subTest(name):
                got, text = post(self.serve, path, body)
                self.assertEqual(got, status, text)
                error = json.loads(text)["error"]
                for word in words:
                    self.assertIn(word, error["message"])
                self.assertEqual(error["code"] == "context_length_exceeded", name == "long prompt")
                self.assert_alive()

    def test_raw(self):
        for name, data, status in RAW:
            with self.subTest(name), self.socket(data) as connection:
                answer = connection.recv(65536).decode()
                self.assertTrue(answer.startswith(f"HTTP/1.1 {status} "), answer)
                self.assertIn('{"error":{"message":"', answer)
                self.assert_alive()

    def test_disconnects(self):
        post = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        body = json.dumps(STREAM).encode()
        for name, data in [("half a header", b"POST /gener"), ("half a body", post % (len(body), body[:9])),
                           ("no reading", post % (len(body), body))]:
            with self.subTest(name):
                self.socket(data).close()
                self.assert_alive()
        with self.subTest("mid-stream"), self.socket(post % (len(body), body)) as connection:
            while b"data: " not in connection.recv(4096):
                pass
        self.assert_alive()


class Logs(unittest.TestCase):
    NAME = "x\n[2026-01-01 00:00:00] forged\r\x1b[31m\x7f\u009b2J\u2028\u202e"

    def lines(self, *flags):
        with Serve(BINARY, MODEL, *flags) as serve:
            self.assertEqual(post(serve, "/generate", {"text": "a", self.NAME: 1, "sampling_params": {"max_new_tokens": 1}})[0], 200)
            self.assertEqual(get(serve, "/generate/" + "x" * 5000)[0], 404)
        return serve.lines

    def check(self, lines):
        for line in lines:
            self.assertNotRegex(line.removesuffix("\n"), "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u202e]")
            self.assertNotRegex(line, "^.2026-01-01")
            self.assertLess(len(line), 4096)

    def test_names_of_clients_stay_inside_their_line(self):
        lines = self.lines("--log-level", "debug")
        self.check(lines)
        [line] = [line for line in lines if "forged" in line]
        self.assertIn(r"unknown field x\x0a[2026-01-01 00:00:00] forged\x0d\x1b[31m\x7f\xc2\x9b2J", line)

    def test_as_json(self):
        lines = self.lines("--log-format", "json", "--log-level", "debug")
        self.check(lines)
        [line] = [line for line in lines if "forged" in line]
        self.assertIn(self.NAME, json.loads(line)["message"])


class Templates(unittest.TestCase):
    def test_template_without_end_fails_its_request_alone(self):
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
            file.write(HUGE_LOOP)
            file.flush()
            with Serve(BINARY, MODEL, "--chat-template", file.name) as serve:
                status, text = post(serve, "/v1/chat/completions", chat())
                self.assertEqual(status, 400, text)
                error = json.loads(text)["error"]
                self.assertRegex(error["message"], "chat template line 1: .* steps")
                self.assertEqual(error["code"], None)
                self.assertEqual(post(serve, "/generate", {"text": "Hi"})[0], 200)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
