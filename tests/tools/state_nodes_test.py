"""Random models with delta nets on prefill nodes, decode nodes and a router: layouts of ranks, chunks of prompts, prefix
reuse, retraction, few slots, cancelled requests, several choices and killed nodes change no bit of the log-probabilities
of one server, with 1 and with 32 requests at once, and leave no slot behind.

    python3 state_nodes_test.py FP4MOE_BINARY
"""
import concurrent.futures
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import unittest

import pd_nodes
from serve_process import Serve, eventually, metric
from state_requests import DRAFTS, LENGTHS, NUM_REQUESTS, NUM_TOKENS, RANKS, begin_and_cancel, generate, generate_all, outputs, post, prompts

BINARY = sys.argv[1]
MODELS = {"qwen3.5-moe-tiny": "modelopt", "qwen3-next-tiny": "compressed-nvfp4"}
FLAGS = ["--device", "cpu", "--self-test", "off", "--disable-autotune", "--context-length", "512",
         "--max-running-requests", str(NUM_REQUESTS)]


class StateNodes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.asked = prompts()
        cls.folder = tempfile.TemporaryDirectory()
        for like, dialect in MODELS.items():
            subprocess.run([BINARY, "make-tiny", cls.path(like), "--like", like, "--dialect", dialect, "--vocab-size", "300",
                            "--num-nextn-predict-layers", "1"], check=True, capture_output=True)
        cls.expected = cls.alone("qwen3.5-moe-tiny")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def path(cls, like):
        return os.path.join(cls.folder.name, like)

    @classmethod
    def alone(cls, like, *flags):
        """The outputs of one server, without prefix reuse."""
        with Serve(BINARY, cls.path(like), *FLAGS, "--disable-radix-cache", *flags) as one:
            return outputs(generate_all(one.url, cls.asked))

    @contextlib.contextmanager
    def nodes(self, prefill_flags=(), decode_flags=(), like="qwen3.5-moe-tiny"):
        """Yields the router's address and both nodes, which must be empty at the end."""
        with pd_nodes.Node(BINARY, "prefill", self.path(like), *FLAGS, *prefill_flags) as p, \
                pd_nodes.Node(BINARY, "decode", self.path(like), *FLAGS, *decode_flags) as d, \
                pd_nodes.Router(BINARY, [p], [d]) as router:
            yield router.url, p, d
            for node in (p, d):
                self.assertTrue(eventually(node.is_empty), node.role)

    def check_layouts(self, like):
        for protocol, layouts in RANKS.items():
            flags = ["--moe-a2a-backend", protocol, "--enable-deterministic-inference"]
            expected = self.alone(like, *flags)
            for prefill, decode in ((layouts[0], layouts[-1]), (layouts[-1], layouts[0]), ([], layouts[1])):
                with self.nodes([*prefill, *flags], [*decode, *flags], like) as (url, _, _):
                    for what in ("cold", "warm"):
                        self.assertEqual(outputs(generate_all(url, self.asked)), expected, (prefill, decode, what))

    def test_layouts(self):
        self.check_layouts("qwen3.5-moe-tiny")

    def test_layouts_of_qwen3_next(self):
        self.check_layouts("qwen3-next-tiny")

    def test_chunks_and_prefixes(self):
        for chunk in (7, 64, 65):
            with self.nodes(["--chunked-prefill-size", str(chunk)]) as (url, p, d):
                for at_once in (NUM_REQUESTS, 1):
                    answers = generate_all(url, self.asked, at_once)
                    self.assertEqual(outputs(answers), self.expected, (chunk, at_once))
                self.assertEqual(answers[LENGTHS.index(300)][1], 288, "cached on the prefill node")
                self.assertGreater(metric(d.url, "kv_transfer_bytes_total"), 0)
                # A conversation goes on; its prompt has the output, whose pages only the decode node has.
                turns = [ids + [token for _, token in output] + [5, 6, 7] for ids, output in zip(self.asked, self.expected)]
                more = generate_all(url, turns)
        with Serve(BINARY, self.path("qwen3.5-moe-tiny"), *FLAGS, "--disable-radix-cache") as one:
            self.assertEqual(outputs(generate_all(one.url, turns)), outputs(more))

    def test_retraction(self):
        with self.nodes([], ["--max-total-tokens", "640", "--schedule-conservativeness", "0"]) as (url, _, d):
            for _ in range(2):
                self.assertEqual(outputs(generate_all(url, self.asked)), self.expected)
            self.assertGreater(metric(d.url, "num_retracted_requests_total"), 0)

    def test_few_slots(self):
        few = ["--max-mamba-cache-size", "3"]
        for prefill, decode in ((few, []), ([], few), (few, [*few, "--max-total-tokens", "640"])):
            with self.nodes(prefill, decode) as (url, _, _):
                for _ in range(2):
                    self.assertEqual(outputs(generate_all(url, self.asked)), self.expected, (prefill, decode))

    def test_cancelled_requests(self):
        with self.nodes(["--max-mamba-cache-size", "6"], ["--max-mamba-cache-size", "8"]) as (url, _, _):
            with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
                for i, ids in enumerate(self.asked):
                    pool.submit(begin_and_cancel, url, ids, i % 5)
                self.assertEqual(outputs(pool.map(lambda ids: generate(url, ids), self.asked)), self.expected)

    def test_drafts(self):
        few_pages = ["--max-total-tokens", "640", "--schedule-conservativeness", "0"]
        for drafts in DRAFTS:
            for few in ([], few_pages):
                with self.nodes(drafts, [*drafts, *few]) as (url, _, d):
                    for _ in range(2):
                        self.assertEqual(outputs(generate_all(url, self.asked)), self.expected, (drafts, few))
                    self.assertGreater(metric(d.url, "spec_verify_calls_total"), 0)

    def test_several_choices(self):
        body = {"input_ids": self.asked[LENGTHS.index(129)], "return_logprob": True, "sampling_params": {
            "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": 4, "temperature": 0.9, "sampling_seed": 5}}
        def choices(url):
            return [[entry[:2] for entry in choice["meta_info"]["output_token_logprobs"]]
                    for choice in post(url, "/generate", body)]
        with Serve(BINARY, self.path("qwen3.5-moe-tiny"), *FLAGS) as one:
            expected = choices(one.url)
        self.assertEqual(len(expected), 4)
        with self.nodes() as (url, _, _):
            for _ in range(2):
                self.assertEqual(choices(url), expected)

    def test_nodes_of_other_models_are_refused(self):
        with pd_nodes.Node(BINARY, "prefill", self.path("qwen3.5-moe-tiny"), *FLAGS) as p, \
                pd_nodes.Node(BINARY, "decode", self.path("qwen3-next-tiny"), *FLAGS) as d, \
                pd_nodes.Router(BINARY, [p], [d]) as router:
            with self.assertRaisesRegex(AssertionError, "503.*model is .* on the prefill node and .* on the decode node"):
                generate(router.url, self.asked[0])
            self.assertTrue(eventually(p.is_empty) and eventually(d.is_empty))

    def check_kill(self, victim):
        """Kills one side under load. The other side gives back all slots, and serves a new process of the same role."""
        with contextlib.ExitStack() as stack:
            path = self.path("qwen3.5-moe-tiny")
            nodes = {role: pd_nodes.Node(BINARY, role, path, *FLAGS) for role in ("prefill", "decode")}
            for node in nodes.values():
                node.__enter__()
                stack.callback(lambda n=node: n.process.poll() is None and n.kill())
            router = stack.enter_context(pd_nodes.Router(BINARY, [nodes["prefill"]], [nodes["decode"]]))
            ends, served = threading.Event(), []
            def load(i):
                while not ends.is_set():
                    with contextlib.suppress(OSError, AssertionError, ValueError):
                        served.append((i, generate(router.url, self.asked[i])[0]))
            clients = [threading.Thread(target=load, args=(i,)) for i in range(16, 24)]
            for client in clients:
                client.start()
            self.assertTrue(eventually(lambda: len(served) > 8))
            nodes[victim].kill()
            survivor = nodes["decode" if victim == "prefill" else "prefill"]
            self.assertTrue(eventually(survivor.is_empty), "the survivor still holds slots of the dead node's requests")
            node = nodes[victim].again()
            node.__enter__()
            stack.callback(node.kill)
            done = len(served)
            self.assertTrue(eventually(lambda: len(served) > done + 16, 60))
            ends.set()
            for client in clients:
                client.join()
            self.assertTrue(eventually(node.is_empty) and eventually(survivor.is_empty))
            for i, output in served:
                self.assertEqual(output, self.expected[i], i)

    def test_a_killed_prefill_node(self):
        self.check_kill("prefill")

    def test_a_killed_decode_node(self):
        self.check_kill("decode")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
