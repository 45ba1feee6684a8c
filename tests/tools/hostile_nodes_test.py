"""Prefill and decode nodes with untrusted peers: data sent to a node's port, or an address in a request, has a
bounded cost, and other requests are served meanwhile.

  hostile_nodes_test.py BINARY MODEL
"""
import concurrent.futures
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from urllib.parse import urlsplit

import node_strangers
from serve_process import Serve, eventually

BINARY, MODEL = sys.argv[1:3]
LIMITS = ["--device", "cpu", "--max-total-tokens", "2048", "--max-running-requests", "8", "--self-test", "off",
          "--disable-autotune", "--threads", "1"]
SECRET = "f9f1c4f2a1f04c1ab9d58cbd"


class Node(Serve):
    def __init__(self, role, *flags, launcher=()):
        super().__init__(BINARY, MODEL, *LIMITS, "--disaggregation-mode", role, "--disaggregation-bootstrap-port", "0",
                         *flags, launcher=launcher)

    @property
    def port(self):
        return urlsplit(self.url).port

    @property
    def bootstrap_port(self):
        return ask(self, "/server_info")[1]["disaggregation_bootstrap_port"]


def ask(node, path, body=None, timeout=60):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", node.port, timeout=timeout)) as c:
        c.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = c.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.getheader("Content-Type", "") else text


def generate(node, port, host="127.0.0.1"):
    """Generates on a decode node, through the prefill node at host:port."""
    return ask(node, "/generate", {"text": "7 + 5 =", "bootstrap_host": host, "bootstrap_port": port,
                                   "sampling_params": {"temperature": 0, "max_new_tokens": 4}})


def message(answer):
    return answer[1]["error"]["message"]


@contextlib.contextmanager
def secret_file(text=SECRET, mode=0o600):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "secret")
        with open(path, "w") as file:
            file.write(text + "\n")
        os.chmod(path, mode)
        yield path


class Strangers(unittest.TestCase):
    """All attacks on one pair of nodes, whose responses must be the same at the end as at the beginning."""

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.p = cls.stack.enter_context(Node("prefill", "--disaggregation-io-timeout", "1"))
        cls.d = cls.stack.enter_context(Node("decode", "--disaggregation-io-timeout", "2"))
        cls.want = generate(cls.d, cls.p.bootstrap_port)[1]["text"]

    @classmethod
    def tearDownClass(cls):
        cls.stack.close()
        assert (cls.p.exit_code, cls.d.exit_code) == (0, 0)

    def tearDown(self):
        for node in (self.p, self.d):
            self.assertIsNone(node.process.poll(), "the process has ended")
            self.assertEqual(ask(node, "/health")[0], 200)
            for line in node.lines:
                self.assertNotIn("\x1b", line)
                self.assertLess(len(line), 2000)
        self.check()

    def check(self):
        answer = generate(self.d, self.p.bootstrap_port)
        self.assertEqual((answer[0], answer[1].get("text")), (200, self.want), answer)

    def test_a_deep_hello_on_the_bootstrap_port(self):
        node_strangers.deep_hello(self.p.bootstrap_port)

    def test_a_deep_hello_from_a_named_host(self):
        deep = b'{"epoch": ' + node_strangers.deep_json(200_000) + b', "facts": []}'
        for reply in (node_strangers.frame(node_strangers.HELLO, deep),
                      node_strangers.frame(node_strangers.FAILED, deep[:8_000]),
                      node_strangers.challenge() + node_strangers.frame(node_strangers.HELLO, bytes(32) + deep[:8_000]),
                      node_strangers.frame(node_strangers.FAILED, b'{"code": 7, "message": "a\\n\\u001b[31mb"}')):
            with node_strangers.FakePrefillNode(reply) as fake:
                answer = generate(self.d, fake.port)
                self.assertEqual(answer[0], 503, answer)
                self.assertLess(len(message(answer)), 1500)
                self.assertIn(f"prefill node 127.0.0.1:{fake.port}: ", message(answer))

    def test_drips_are_cut_off(self):
        with node_strangers.Drips(self.p.bootstrap_port, 8) as drips:
            self.assertTrue(eventually(lambda: drips.num_ended >= 8), drips.num_ended)
            self.check()
        with node_strangers.FakePrefillNode(node_strangers.challenge()[:30]) as silent:
            started = time.monotonic()
            self.assertEqual(generate(self.d, silent.port)[0], 503)
            self.assertLess(time.monotonic() - started, 30)

    def test_a_flood_is_bounded(self):
        threads, descriptors = self.p.status("Threads"), self.p.num_descriptors()
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(node_strangers.connect(self.p.bootstrap_port))
            self.assertLessEqual(self.p.status("Threads"), threads + 40)
            self.assertLessEqual(self.p.num_descriptors(), descriptors + 40)
            self.check()
        self.assertTrue(eventually(lambda: self.p.status("Threads") <= threads + 2 and
                                   self.p.num_descriptors() <= descriptors + 2))

    def test_host_strings_leave_nothing_behind(self):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # warms up the buffers of both HTTP threads
            list(pool.map(lambda _: generate(self.d, 1, "x" * (20 << 20)), range(4)))
        before, lines = self.d.status("VmRSS"), len(self.d.lines)
        for i in range(10):
            answer = generate(self.d, 8998, chr(ord("a") + i) * (20 << 20))
            self.assertEqual(answer[0], 400, answer)
            self.assertLess(len(message(answer)), 500)
        for host in ("a\nb", "\x1b[31mred", "a b", "http://127.0.0.1", "127.0.0.1:80", "[::1"):
            self.assertEqual(generate(self.d, 8998, host)[0], 400, host)
        self.assertLess(self.d.status("VmRSS") - before, 64 << 10, "resident KiB grew with the 200 MiB of host strings")
        self.assertLess(len(self.d.lines), lines + 5)

    def test_hosts_that_are_not_allowed(self):
        for host in ("10.255.255.1", "prefill.example", "::2", "127.0.0.1.example"):
            started = time.monotonic()
            answer = generate(self.d, 8998, host)
            self.assertEqual(answer[0], 400, answer)
            self.assertIn("--disaggregation-allowed-hosts", message(answer))
            self.assertLess(time.monotonic() - started, 4, "the node resolved the host or connected to it")


class Descriptors(unittest.TestCase):
    def test_a_node_without_descriptors_recovers(self):
        with Node("prefill", "--disaggregation-io-timeout", "300", launcher=("prlimit", "--nofile=40:40")) as p, \
                Node("decode") as d:
            want, port = generate(d, p.bootstrap_port), p.bootstrap_port
            self.assertEqual(want[0], 200, want)
            with contextlib.ExitStack() as stack:
                for _ in range(60):  # half of them over HTTP, where connections cannot be evicted
                    stack.enter_context(node_strangers.connect(port))
                    stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", p.port))).connect()
                # The last descriptor goes to either listener; the other one finds none.
                self.assertTrue(eventually(lambda: any("no file descriptor is left" in line or "Too many open files" in line
                                                       for line in p.lines)), "the node never ran out of descriptors")
                for _ in range(20):
                    stack.enter_context(node_strangers.connect(port))
                self.assertIsNone(p.process.poll())
            self.assertTrue(eventually(lambda: ask(p, "/health")[0] == 200))
            self.assertEqual(generate(d, port)[1]["text"], want[1]["text"])
            self.assertLess(sum("descriptor" in line for line in p.lines), 40)


class Secrets(unittest.TestCase):
    def test_nodes_with_the_same_secret_alone(self):
        with secret_file() as same, secret_file("another secret of some length") as other, contextlib.ExitStack() as stack:
            p = stack.enter_context(Node("prefill", "--host", "0.0.0.0", "--disaggregation-secret-file", same))
            right = stack.enter_context(Node("decode", "--disaggregation-secret-file", same))
            wrong = stack.enter_context(Node("decode", "--disaggregation-secret-file", other))
            none = stack.enter_context(Node("decode"))
            open_p = stack.enter_context(Node("prefill"))
            self.assertEqual(generate(right, p.bootstrap_port)[0], 200)
            for node, prefill in ((wrong, p), (none, p), (right, open_p)):
                answer = generate(node, prefill.bootstrap_port)
                self.assertEqual(answer[0], 503, answer)
                self.assertIn("--disaggregation-secret-file", message(answer))
            self.assertEqual(generate(none, open_p.bootstrap_port)[0], 200)
            for node in (p, right, wrong, none, open_p):
                for text in ("".join(node.lines), json.dumps(ask(node, "/server_info")[1])):
                    self.assertNotIn(SECRET, text)
            self.assertTrue(any("--disaggregation-secret-file" in line for line in p.lines), "the refusal was not logged")

    def refused(self, *flags):
        done = subprocess.run([BINARY, "serve", MODEL, *LIMITS, "--port", "0", *flags], capture_output=True, text=True,
                              timeout=60)
        self.assertNotIn(SECRET, done.stdout + done.stderr)
        return done.returncode, done.stdout + done.stderr

    def test_refusals_at_start(self):
        prefill, decode = ("--disaggregation-mode", "prefill"), ("--disaggregation-mode", "decode")
        code, text = self.refused(*prefill, "--host", "0.0.0.0")
        self.assertEqual(code, 3, text)
        self.assertIn("--disaggregation-secret-file", text)
        for hosts in ("*", "10.0.0.1", "127.0.0.1,prefill.example:8998"):
            code, text = self.refused(*decode, "--disaggregation-allowed-hosts", hosts)
            self.assertEqual(code, 3, text)
            self.assertIn("--disaggregation-secret-file", text)
        code, text = self.refused(*decode, "--disaggregation-allowed-hosts", "a b")
        self.assertEqual(code, 2, text)
        with secret_file(mode=0o644) as path:
            code, text = self.refused(*prefill, "--disaggregation-secret-file", path)
            self.assertEqual(code, 2, text)
            self.assertIn("mode 0644", text)
        with secret_file("short") as path:
            code, text = self.refused(*prefill, "--disaggregation-secret-file", path)
            self.assertEqual(code, 2, text)
            self.assertIn("16 to 4096", text)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
