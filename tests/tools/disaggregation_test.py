"""Prefill nodes, decode nodes and a router as processes: they give the same responses as one server, and
handle client disconnects, killed nodes and incompatible nodes.

  disaggregation_test.py BINARY MODELS_FOLDER [grammars] [cuda]

grammars: the binary has a grammar backend. cuda: all nodes run on one GPU, or together with nodes on the CPU;
exit status 77 without a GPU.
"""
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import sys
import threading
import time
import unittest
from urllib.parse import urlsplit

import pd_nodes
from listed_ids import check_listed_ids
from serve_process import Serve, eventually, exit_without_gpu, metric

BINARY, MODELS = sys.argv[1:3]
GRAMMARS, CUDA = ("grammars" in sys.argv[3:], "cuda" in sys.argv[3:])
GPTOSS, DSV3 = f"{MODELS}/demo-gptoss-mxfp4", f"{MODELS}/demo-dsv3-nvfp4"
QWEN35 = f"{MODELS}/demo-qwen35-nvfp4"  # with states
POOL = ["--max-total-tokens", "4096"]
LIMITS = ["--max-running-requests", "16", "--self-test", "off", "--disable-autotune",
          "--threads", "1"]  # for all nodes and servers
# With these flags a response does not depend on its batch, as on a CPU.
DEVICE = ["--device", "cuda", "--enable-deterministic-inference"] if CUDA else ["--device", "cpu"]
PROMPTS = ["Tom has 3 apples and buys 4.", "a", "The answer is", "7 + 5 =", "Tom has 3 apples and buys 4. " * 12]

with open(f"{MODELS}/evals/gsm8k_form.jsonl", encoding="utf-8") as file:
    QUESTIONS = [json.loads(line)["question"] for line in itertools.islice(file, 8)]


class Node(pd_nodes.Node):
    def __init__(self, role, model, *flags):
        pool = [] if "--max-total-tokens" in flags else POOL
        device = [] if "--device" in flags else DEVICE
        steps = ["--chunked-prefill-size", "16"] if role == "prefill" else []  # so that pages leave early
        super().__init__(BINARY, role, model, *LIMITS, *device, *pool, *steps, *flags)


class Router(pd_nodes.Router):
    def __init__(self, *nodes, **options):
        super().__init__(BINARY, *nodes, **options)


@contextlib.contextmanager
def connection(url, timeout=60):
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)) as c:
        yield c


def ask(url, path, body=None):
    """Returns the status and the body, parsed if it is JSON."""
    with connection(url) as c:
        c.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = c.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.getheader("Content-Type", "") else text


def generate(url, prompt, tokens=24, **sampling):
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    return ask(url, "/generate", {"text": prompt, "sampling_params": params, "return_logprob": True,
                                  "top_logprobs_num": 2, "token_ids_logprob": [70, 2, 70],
                                  "return_text_in_logprobs": True})


def answers(url):
    """Greedy and sampled responses with log-probabilities, and one with a grammar, all concurrently."""
    calls = [(p, {}) for p in PROMPTS] + [(p, {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 7,
                                               "frequency_penalty": 0.5}) for p in PROMPTS]
    if GRAMMARS:
        calls.append((PROMPTS[3], {"regex": " [0-9]{3,8}"}))
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(lambda call: generate(url, call[0], **call[1]), calls))
    assert all(status == 200 for status, _ in results), results
    return [(r["text"], r["meta_info"]["output_token_logprobs"], r["meta_info"]["output_token_ids_logprobs"],
             r["meta_info"]["prompt_tokens"]) for _, r in results]


def chats(url, temperatures):
    """The texts of chats with questions like those of the models' training, at each temperature, all concurrently."""
    def chat(i):
        body = {"messages": [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}], "max_tokens": 256,
                "temperature": temperatures[i // len(QUESTIONS)], "seed": i}
        status, answer = ask(url, "/v1/chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(chat, range(len(temperatures) * len(QUESTIONS))))


def experts(url):
    """The routed experts of a response's tokens, including its prompt's."""
    body = {"text": PROMPTS[0], "return_routed_experts": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    status, answer = ask(url, "/generate", body)
    assert status == 200, answer
    return answer["meta_info"]["routed_experts"]


def stream(url, prompt, tokens, on_event=None):
    """Returns the status and the events of a streamed completion as sent, or the error if the status is not 200."""
    events = []
    with connection(url) as c:
        c.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0,
                                                         "stream": True, "ignore_eos": True}))
        answer = c.getresponse()
        if answer.status != 200:
            return answer.status, json.loads(answer.read())
        for line in answer:
            if line.startswith(b"data: "):
                events.append(line[6:].strip().decode())
                if on_event:
                    on_event(events)
    return 200, events


def print_rates(node):
    """Prints how fast a node's KV pages and states were sent or received, and how fast its copies were."""
    num_bytes = metric(node.url, "kv_transfer_bytes_total")
    whole, copies = (metric(node.url, f"kv_transfer_{name}seconds_total") for name in ("", "copy_"))
    print(f"{' '.join(node.command[2:])}: {num_bytes:.0f} bytes at {num_bytes / whole / 1e9:.3f} GB/s, "
          f"copies at {num_bytes / copies / 1e9:.3f} GB/s")


class Disaggregation(unittest.TestCase):
    def check_model(self, model, prefill_flags, decode_flags, flags=None):
        """The nodes give the answers of one server with `flags`, by default those of the prefill node."""
        with Serve(BINARY, model, *LIMITS, *DEVICE, *POOL, *(prefill_flags if flags is None else flags)) as one:
            want, went, listed = answers(one.url), experts(one.url), check_listed_ids(one.url)
        for _, output, without_output in listed:
            self.assertEqual(without_output, output[:1])
        with Node("prefill", model, *prefill_flags) as p, Node("decode", model, *decode_flags) as d:
            with Router([p], [d]) as router:
                self.assertEqual(answers(router.url), want)
                self.assertEqual(answers(router.url), want, "with warm caches")
                self.assertEqual(experts(router.url), went)
                self.assertEqual(check_listed_ids(router.url), listed)
                for node in (p, d):
                    self.assertTrue(eventually(node.is_empty), node.role)
                    self.assertGreater(metric(node.url, "kv_transfer_bytes_total"), 0)
                    self.assertGreater(metric(node.url, "kv_transfer_copy_seconds_total"), 0)
                    self.assertGreater(metric(node.url, "kv_transfer_seconds_total"), 0)
                    print_rates(node)
            self.assertEqual(router.exit_code, 0)

    def test_sliding_windows(self):
        drafts = [] if CUDA else ["--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match-window-size", "1"]
        self.check_model(GPTOSS, drafts, [*drafts, "--disable-radix-cache", "--chunked-prefill-size", "32"])

    # The answers are those of a server without drafts, and drafts are as often right as on one server.
    def check_drafter(self, model, decode_drafts, prefill_drafts, least, *ranks):
        with Serve(BINARY, model, *LIMITS, *DEVICE, *POOL) as one:
            want, asked = answers(one.url), chats(one.url, (0, 0.7))
        with Node("prefill", model, *prefill_drafts, "--chunked-prefill-size", "32") as p, \
                Node("decode", model, *decode_drafts, *ranks) as d, Router([p], [d]) as router:
            self.assertEqual(chats(router.url, (0, 0.7)), asked)
            self.assertGreaterEqual(metric(d.url, "spec_accept_length"), least)
            for what in ("cold", "with warm caches"):
                self.assertEqual(answers(router.url), want, what)
            for node in (p, d):
                self.assertTrue(eventually(node.is_empty), node.role)

    def test_draft_models(self):
        head = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", f"{MODELS}/demo-gptoss-eagle3"]
        mtp = ["--speculative-algorithm", "EAGLE"]
        alone = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", GPTOSS]
        self.check_drafter(GPTOSS, head, head, 2.5)
        if not CUDA:
            self.check_drafter(GPTOSS, head, head, 2.5, "--tp", "2", "--enable-deterministic-inference")
        self.check_drafter(DSV3, mtp, mtp, 2.5)
        self.check_drafter(GPTOSS, alone, [], 3.5)

    def test_drafters_that_differ_are_refused(self):
        mtp = ["--speculative-algorithm", "EAGLE"]
        for prefill, decode in (([], mtp), (mtp, [])):
            with Node("prefill", DSV3, *prefill) as p, Node("decode", DSV3, *decode) as d, Router([p], [d]) as router:
                status, error = generate(router.url, "a")
                self.assertEqual(status, 503, error)
                self.assertIn("--speculative-algorithm is ", json.dumps(error))

    @unittest.skipUnless(CUDA, "needs a GPU")
    def test_latents(self):
        self.check_model(DSV3, [], ["--disable-cuda-graph"])

    def test_states(self):
        self.check_model(QWEN35, [], ["--chunked-prefill-size", "32"])
        self.check_model(QWEN35, ["--disable-radix-cache"], ["--max-mamba-cache-size", "3"])

    # Pages of 8-bit codes are handed over as they are, so every response is that of one server.
    def test_eight_bit_pages(self):
        fp8 = ["--kv-cache-dtype", "fp8_e4m3"]
        self.check_model(GPTOSS, fp8, [*fp8, "--chunked-prefill-size", "32"])
        self.check_model(DSV3, fp8, [*fp8, *(["--disable-cuda-graph"] if CUDA else [])])

    def test_pages_of_different_types_are_refused(self):
        with Node("prefill", GPTOSS, "--kv-cache-dtype", "fp8_e4m3") as p, Node("decode", GPTOSS) as d:
            with Router([p], [d]) as router:
                status, answer = generate(router.url, "a")
                self.assertEqual(status, 503)
                self.assertIn("KV type is F8_E4M3 on the prefill node and BF16 on the decode node",
                              answer["error"]["message"])

    # The kernels differ in the last bits, but not in the greedy answers to questions like those of the training.
    def check_gpu_and_cpu(self, *flags):
        """flags: of the node on a GPU or on several."""
        devices = (["--device", "cpu"], ["--device", "cuda", *flags])
        for model in (GPTOSS, DSV3, QWEN35):
            with Serve(BINARY, model, *LIMITS, *devices[0], *POOL) as one:
                want = chats(one.url, (0,))
            for first, second in (devices, devices[::-1]):
                with Node("prefill", model, *first) as p, Node("decode", model, *second) as d, Router([p], [d]) as router:
                    self.assertEqual(chats(router.url, (0,)), want, (model, first))

    @unittest.skipUnless(CUDA, "needs a GPU")
    def test_a_gpu_and_a_cpu(self):
        self.check_gpu_and_cpu()

    @unittest.skipIf(CUDA, "runs several ranks on a CPU")
    def test_latents_and_other_ranks(self):
        ranks = ["--tp", "2", "--ep-size", "2", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", "deepep"]
        self.check_model(DSV3, ["--moe-a2a-backend", "deepep"], ranks)

    # Sums over shards differ in the last bits, but not in the greedy text of these prompts.
    @unittest.skipIf(CUDA, "runs several ranks on a CPU")
    def test_heads_on_two_ranks_and_on_one(self):
        prompts = PROMPTS[2:]
        with Serve(BINARY, GPTOSS, *LIMITS, *DEVICE, *POOL) as one:
            want = [generate(one.url, p)[1]["text"] for p in prompts]
        with Node("prefill", GPTOSS, "--tp", "2") as p2, Node("decode", GPTOSS) as d1, \
                Node("decode", GPTOSS, "--tp", "2") as d2, Router([p2], [d1, d2]) as router:
            for _ in range(2):  # least loaded, then round-robin: uses both decode nodes
                self.assertEqual([generate(router.url, p)[1]["text"] for p in prompts], want)
            self.assertEqual({w["num_requests"] for w in ask(router.url, "/workers")[1]["workers"]
                              if w["role"] == "decode"}, {len(prompts)})

    def test_routes_and_refusals(self):
        with Node("prefill", GPTOSS) as p, Node("decode", GPTOSS) as d, Router([p], [d]) as router:
            self.assertEqual(ask(router.url, "/health")[0], 200)
            self.assertEqual(ask(router.url, "/v1/models")[1]["data"][0]["id"], "demo-gptoss-mxfp4")
            self.assertEqual(ask(router.url, "/tokenize", {"prompt": "a"})[1]["count"], 1)
            self.assertEqual(ask(router.url, "/server_info")[1]["disaggregation_mode"], "decode")
            self.assertEqual(ask(p.url, "/server_info")[1]["disaggregation_bootstrap_port"], p.bootstrap_port)
            self.assertIn("fp4moe_router_node_up", ask(router.url, "/metrics")[1])
            self.check_routes(router, d)
            self.check_responses(router, d)
            self.assertEqual(ask(router.url, "/generate", [1])[0], 400)
            status, answer = ask(router.url, "/generate", {"text": "a", "sampling_params": {"temperature": -1}})
            self.assertEqual(status, 400)
            self.assertIn("temperature", answer["error"]["message"])
            for node, word in ((p, "prefill node"), (d, "bootstrap_host")):
                status, answer = ask(node.url, "/generate", {"text": "a"})
                self.assertEqual(status, 400)
                self.assertIn(word, answer["error"]["message"])
                self.assertEqual(ask(node.url, "/health_generate")[0], 200)
            chat = {"model": "default", "messages": [{"role": "user", "content": "7 + 5"}], "max_tokens": 8, "n": 2}
            self.assertEqual(len(ask(router.url, "/v1/chat/completions", chat)[1]["choices"]), 2)
            scored = ask(router.url, "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True,
                                                         "logprobs": 1})
            self.assertEqual(scored[0], 200, scored)

            # A client disconnects: both nodes release its resources.
            def leave(events):
                if len(events) == 3:
                    raise ConnectionAbortedError
            before = metric(d.url, "num_aborted_requests_total")
            with self.assertRaises(ConnectionAbortedError):
                stream(router.url, PROMPTS[0], 2000, leave)
            self.assertTrue(eventually(lambda: metric(d.url, "num_aborted_requests_total") == before + 1))
            for node in (p, d):
                self.assertTrue(eventually(node.is_empty), node.role)

    def check_responses(self, router, node):
        """The Responses API gives the text of a chat through the router, but its responses are not stored."""
        chat = ask(router.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPTS[0]}],
                                                        "temperature": 0, "max_tokens": 12})[1]
        body = {"input": PROMPTS[0], "temperature": 0, "max_output_tokens": 12, "store": True}
        status, response = ask(router.url, "/v1/responses", body)
        self.assertEqual(status, 200, response)
        self.assertEqual(response["output"][-1]["content"][0]["text"], chat["choices"][0]["message"]["content"])
        self.assertEqual(response["store"], False)
        self.assertIn("event: response.created\n", ask(router.url, "/v1/responses", {**body, "stream": True})[1])
        for url in (node.url, router.url):
            self.assertEqual(ask(url, "/v1/responses/" + response["id"])[0], 404)
        status, error = ask(router.url, "/v1/responses", {**body, "previous_response_id": response["id"]})
        self.assertEqual((status, error["error"]["param"]), (400, "previous_response_id"))

    def check_routes(self, router, node):
        """Checks for every route of a node whether the router has it (docs/disaggregation.md)."""
        passed = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/generate",
                  "/tokenize", "/detokenize", "/apply-template", "/v1/models", "/v1/models/{model}", "/model_info",
                  "/get_model_info", "/version", "/props", "/server_info", "/get_server_info", "/health_generate", "/openapi.json",
                  "/expert_load", "/expert_load.svg", "/", "/chat"}
        own, operators = {"/health", "/ping", "/metrics"}, {"/abort_request", "/flush_cache"}
        operators |= {"/get_load", "/v1/loads", "/slots", "/rebalance_experts", "/update_weights_from_disk"}  # of one node
        routes = ask(node.url, "/openapi.json")[1]["paths"]
        stored = {path for path in routes if path.startswith("/v1/responses/")}  # a router has none
        self.assertEqual(set(routes) - passed - own - operators - stored, set(), "a new route must be in one of these lists")
        for path, methods in routes.items():
            for method in methods:
                body = None if method == "get" else {}
                status = ask(router.url, path.replace("{model}", "demo-gptoss-mxfp4"), body)[0]
                (self.assertEqual if path in operators | stored else self.assertNotEqual)(status, 404, (method, path))
        for path in operators:  # with any method
            self.assertEqual(ask(router.url, path)[0], 404)
            self.assertEqual(ask(router.url, path, {})[0], 404)

    def test_nodes_that_do_not_fit(self):
        with Node("prefill", GPTOSS, "--page-size", "32") as p, Node("decode", GPTOSS) as d:
            with Router([p], [d]) as router:
                status, answer = generate(router.url, "a")
                self.assertEqual(status, 503)
                self.assertIn(f"prefill node 127.0.0.1:{p.bootstrap_port}: --page-size is 32 on the "
                              "prefill node and 16 on the decode node", answer["error"]["message"])

    def test_a_full_decode_pool_queues(self):
        with Node("prefill", GPTOSS) as p, Node("decode", GPTOSS, "--max-total-tokens", "256") as d:
            with Router([p], [d]) as router:
                with concurrent.futures.ThreadPoolExecutor(12) as pool:
                    results = list(pool.map(lambda i: generate(router.url, PROMPTS[i % 4], 48), range(12)))
                self.assertEqual([s for s, _ in results], [200] * 12)
                for i in range(4, 12):
                    self.assertEqual(results[i][1]["text"], results[i % 4][1]["text"])
                for node in (p, d):
                    self.assertTrue(eventually(node.is_empty), node.role)

    def check_kill(self, victim, prefill_flags=(), decode_flags=()):
        """Kills one side under continuous load: its requests fail with an error that names it, and after a restart
        requests succeed again."""
        with contextlib.ExitStack() as stack:
            nodes = {"prefill": Node("prefill", GPTOSS, *prefill_flags), "decode": Node("decode", GPTOSS, *decode_flags)}
            for node in nodes.values():
                node.__enter__()
                stack.callback(lambda n=node: n.process.poll() is None and n.kill())
            router = stack.enter_context(Router([nodes["prefill"]], [nodes["decode"]], looks_apart=0.5))
            results, ends = [], threading.Event()

            def load():
                while not ends.is_set():
                    try:
                        results.append(stream(router.url, PROMPTS[4], 40))
                    except (OSError, http.client.HTTPException) as error:
                        results.append((0, repr(error)))
            clients = [threading.Thread(target=load) for _ in range(6)]
            for client in clients:
                client.start()
            self.assertTrue(eventually(lambda: len(results) > 6))
            nodes[victim].kill()
            time.sleep(0.5)
            survivor = nodes["decode" if victim == "prefill" else "prefill"]
            self.assertTrue(eventually(survivor.is_empty), "the survivor still holds pages of the dead node's requests")
            if victim == "prefill":  # requests fail at the client only; the failed connection is logged once
                self.assertLessEqual(sum("Connection refused" in line for line in survivor.lines), 1)
            node = nodes[victim].again()
            node.__enter__()
            stack.callback(node.kill)
            self.assertTrue(eventually(lambda: ask(router.url, "/health")[0] == 200))
            done = len(results)
            self.assertTrue(eventually(lambda: sum(s == 200 and "error" not in e[-2] for s, e in results[done:]) > 6))
            ends.set()
            for client in clients:
                client.join()
            self.assertTrue(eventually(node.is_empty) and eventually(survivor.is_empty))
            failed = [json.dumps(e) for s, e in results if s != 200] + \
                     [e[-2] for s, e in results if s == 200 and '"error"' in e[-2]]
            self.assertTrue(failed)
            self.assertEqual({s for s, _ in results} - {200, 502, 503}, set(), results)
            name = f"prefill node 127.0.0.1:{node.bootstrap_port}" if victim == "prefill" else node.url
            self.assertTrue(any(name in f for f in failed), failed[:3])
            self.assertTrue(all(f"{victim} node" in f for f in failed), failed[:3])
            texts = {"".join(json.loads(x)["choices"][0]["text"] for x in e[:-1]) for s, e in results
                     if s == 200 and '"error"' not in e[-2]}
            self.assertEqual(len(texts), 1)

    def test_a_killed_prefill_node(self):
        self.check_kill("prefill")

    def test_a_killed_decode_node(self):
        self.check_kill("decode")


if __name__ == "__main__":
    if CUDA:
        exit_without_gpu(BINARY, GPTOSS)
    unittest.main(argv=sys.argv[:1], verbosity=2)
