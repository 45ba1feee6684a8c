"""Honest and hostile clients on two prefill nodes, two decode nodes and two routers, for seconds or hours.

  siege_test.py BINARY MODEL [--minutes M] [--clients N] [--seed S] [--restart-every SECONDS] [--no-grammars]

One node of each kind ("spare") is killed and restarted repeatedly; the other ("steady") is not. One router
has only the steady nodes, the other has all nodes. Honest clients stream greedy responses, disconnect and
request structured output; hostile ones send malicious grammars, HTTP bytes and node connections. The test
checks that

* no steady process ends early, and SIGTERM ends each with 0;
* an honest request through the steady router succeeds, with the text that the model gives alone; through the other
  router it may end with 502 or 503 or an error event, after a prefix of that text;
* a hostile request ends within its time limit with a status that is allowed for it;
* afterwards the steady processes have as many pages, descriptors and threads as before, and their memory has
  not grown.
"""
import argparse
import collections
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
sys.dont_write_bytecode = True
from pd_nodes import Node, Router  # noqa: E402
from serve_process import eventually, metrics  # noqa: E402

SECONDS = 120  # time limit for any response
LATE = 10  # seconds beyond a hostile request's own time limit, for machines with few cores
WARM_UP = 0.4  # fraction of the run before memory is measured
RSS_GROWTH_MIB = 48  # limit from then to the end: allows fragmentation, not leaks
NODE_FLAGS = ["--device", "cpu", "--threads", "1", "--self-test", "off", "--disable-autotune",
              "--max-running-requests", "64", "--max-total-tokens", "16384"]
GREEDY_TOKENS = 32
GREEDY = ["Tom has 3 apples and buys 4.", "a", "The answer is", "7 + 5 =", "Lea shares 24 stamps equally."]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
          "required": ["name", "count"], "additionalProperties": False}
HOSTILE_GRAMMARS = [
    {"regex": "((.{0,999}){0,999}){0,999}x"},
    {"regex": "(.{0,999}){0,999}x"},
    {"regex": "(.{0,20}){0,20}x"},
    {"json_schema": json.dumps({"type": "string", "pattern": "^(.{0,99}){0,99}x$"})},
    {"ebnf": 'root ::= s\ns ::= s s | "a" | "b" | ""'},
    {"json_schema": json.dumps({"$ref": "#"})},
    {"json_schema": json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3500)}})},
]
HOSTILE_BYTES = [
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: " + b"a" * 60000 + b"\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n" * 3000,
]


class Wrong(Exception):
    pass


def require(condition, *what):
    if not condition:
        raise Wrong(" ".join(map(str, what))[:600])


def connect(url):
    return contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS))


def read_stream(response):
    """Returns text, error and whether the stream finished. If it did not finish and has no error, the connection
    broke."""
    text, finished = "", False
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return text, event["error"], False
        text += event["choices"][0]["text"]
        finished = finished or event["choices"][0]["finish_reason"] is not None
    return text, None, finished


def greedy_body(prompt):
    return {"prompt": prompt, "temperature": 0, "max_tokens": GREEDY_TOKENS, "ignore_eos": True, "stream": True}


class Client:
    """Performs one action after another until the time is over. target has URLs, ports and expected texts."""

    def __init__(self, target, end, seed, counts, failures):
        self.target, self.end, self.rng = target, end, random.Random(seed)
        self.counts, self.failures = counts, failures

    def run(self):
        kinds = [(self.steady_greedy, 40), (self.any_greedy, 15), (self.hung_up, 15), (self.structured, 6),
                 (self.hostile_http, 6), (self.hostile_node, 6)]
        if self.target["grammars"]:
            kinds.append((self.hostile_grammar, 6))
        else:
            kinds.remove((self.structured, 6))
        actions, weights = zip(*kinds)
        while time.time() < self.end and len(self.failures) < 10:
            action = self.rng.choices(actions, weights)[0]
            try:
                action()
                self.counts[action.__name__] += 1
            except (Wrong, OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                self.failures.append(f"{action.__name__}: {type(error).__name__}: {error}")

    def greedy(self, url):
        """Returns status, text, error, whether the stream finished, and the expected text."""
        prompt = self.rng.choice(GREEDY)
        with connect(url) as c:
            c.request("POST", "/v1/completions", json.dumps(greedy_body(prompt)))
            response = c.getresponse()
            if response.status != 200:
                return response.status, "", response.read().decode(), False, self.target["texts"][prompt]
            return 200, *read_stream(response), self.target["texts"][prompt]

    def steady_greedy(self):
        status, text, error, finished, right = self.greedy(self.target["steady_router"])
        require(status == 200 and finished, "steady router:", status, error, repr(text))
        require(text == right, "steady router:", repr(text), "instead of", repr(right))

    def any_greedy(self):
        try:
            status, text, error, finished, right = self.greedy(self.target["router"])
        except (ConnectionError, http.client.IncompleteRead) as broken:
            raise Wrong("the router closed the connection:", broken)
        require(status in (200, 502, 503), "router:", status, error)
        require(text == right if finished else right.startswith(text), "router:", repr(text), "of", repr(right))
        if not finished:
            self.counts["any_greedy_cut"] += 1

    def hung_up(self):
        with connect(self.target["steady_router"]) as c:
            c.request("POST", "/v1/completions", json.dumps(greedy_body(self.rng.choice(GREEDY)) | {"max_tokens": 200}))
            if self.rng.random() < 0.7:
                response = c.getresponse()
                require(response.status == 200, response.status)
                for _ in range(self.rng.randint(0, 40)):
                    if not response.readline():
                        break

    def structured(self):
        body = {"text": "Tom:", "sampling_params": {"temperature": 0.8, "max_new_tokens": 60,
                                                    "json_schema": json.dumps(SCHEMA)}}
        with connect(self.target["steady_router"]) as c:
            c.request("POST", "/generate", json.dumps(body))
            response = c.getresponse()
            answer = json.loads(response.read())
        require(response.status == 200, "structured:", response.status, answer)
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            value = json.loads(answer["text"])
            require(sorted(value) == ["count", "name"] and len(value["name"]) <= 8, "structured:", answer["text"])

    def hostile_grammar(self):
        limit = self.rng.choice([1, 3])
        body = {"text": "Tom", "timeout": limit,
                "sampling_params": {"temperature": 1, "max_new_tokens": 16, **self.rng.choice(HOSTILE_GRAMMARS)}}
        start = time.monotonic()
        with connect(self.target["steady_router"]) as c:
            c.request("POST", "/generate", json.dumps(body))
            response = c.getresponse()
            data = response.read()
        seconds = time.monotonic() - start
        require(response.status in (200, 400, 503, 504), "hostile grammar:", response.status, data)
        require(seconds < limit + LATE, "hostile grammar:", f"{seconds:.1f} s with a timeout of {limit}")

    def send_raw(self, port, data):
        """Sends some or all of the bytes, at once or slowly, then sometimes reads, then closes."""
        data = data[:self.rng.randint(1, len(data))] if self.rng.random() < 0.3 else data
        with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(("127.0.0.1", port), 10)) as s:
            s.settimeout(3)
            if self.rng.random() < 0.3:
                for i in range(min(20, len(data))):
                    s.sendall(data[i:i + 1])
                    time.sleep(0.05)
            else:
                s.sendall(data)
            if self.rng.random() < 0.5:
                s.recv(4096)

    def hostile_http(self):
        self.send_raw(urlsplit(self.rng.choice(self.target["steady_urls"])).port, self.rng.choice(HOSTILE_BYTES))

    def hostile_node(self):
        deep = b'{"a":' * 20000
        size = self.rng.choice([0, 39, len(deep), 2**31, 2**63])
        header = self.target["magic"] + struct.pack("<I", self.rng.choice([0, 1, 2, 99])) + struct.pack("<QQQQ", 0, 0, size, 0)
        self.send_raw(self.target["bootstrap_port"], self.rng.choice([
            self.rng.randbytes(self.rng.randint(1, 4000)), header + deep, header[:20], deep]))


def run_clients(target, end, seeds):
    """Runs in its own process: one client per seed; returns their counts and failures."""
    counts, failures = collections.Counter(), []
    clients = [Client(target, end, seed, counts, failures) for seed in seeds]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, failures


class Watch(threading.Thread):
    """Restarts the spare nodes and samples the steady ones' memory until the time is over."""

    def __init__(self, steady, spares, options, seconds):
        super().__init__()
        self.steady, self.spares, self.options = steady, spares, options
        self.begin = time.time()
        self.end = self.begin + seconds
        self.samples = {name: [] for name in steady}
        self.num_restarts = 0
        self.failure = None

    def run(self):
        printed = self.begin
        restarts = threading.Thread(target=self.restart_spares)
        restarts.start()
        try:
            while time.time() < self.end and not self.failure:
                now = time.time()
                for name, server in self.steady.items():
                    require(server.process.poll() is None, name, "ended with", server.process.poll())
                    self.samples[name].append((now - self.begin, server.status("VmRSS") / 1024))
                if now - printed > 60:
                    printed = now
                    print(f"  {now - self.begin:.0f} s, {self.num_restarts} restarts, RSS in MiB: " +
                          ", ".join(f"{name} {values[-1][1]:.0f}" for name, values in self.samples.items()), flush=True)
                time.sleep(0.25)
        except (OSError, Wrong) as error:
            self.failure = f"watch: {type(error).__name__}: {error}"
        restarts.join()

    def restart_spares(self):
        try:
            while time.time() + self.options.restart_every < self.end:
                time.sleep(self.options.restart_every)
                index = self.num_restarts % len(self.spares)
                self.spares[index].kill()
                self.spares[index] = self.spares[index].again()
                self.spares[index].__enter__()
                self.num_restarts += 1
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.failure = f"restart: {type(error).__name__}: {error}"

    def growth(self, name):
        """Returns medians over a tenth of the run: after the warm-up and at the end."""
        length = self.end - self.begin
        return [statistics.median(rss for at, rss in self.samples[name] if a * length <= at <= b * length)
                for a, b in ((WARM_UP, WARM_UP + 0.1), (0.9, 1))]


def right_texts(url):
    texts = {}
    for prompt in GREEDY:
        with connect(url) as c:
            c.request("POST", "/v1/completions", json.dumps(greedy_body(prompt)))
            texts[prompt], error, finished = read_stream(c.getresponse())
            require(finished, prompt, error)
    return texts


def resources(server):
    return server.num_descriptors(), server.status("Threads")


def leftovers(steady, before):
    """Yields failures for resources that steady processes still hold after all clients have disconnected."""
    slack = 4  # for connections between nodes that were first opened under load
    for name, server in steady.items():
        if isinstance(server, Node) and not eventually(server.is_empty, 60):
            yield f"{name} still has {metrics(server.url)}"
        if not eventually(lambda: all(now <= then + slack for now, then in zip(resources(server), before[name])), 90):
            yield f"{name} had {before[name]} descriptors and threads, now {resources(server)}"


def run_clients_and_watch(target, watch, options):
    processes = max(1, min(8, (os.cpu_count() or 1)))
    seeds = [[options.seed * 10007 + i for i in range(p, options.clients, processes)] for p in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        watch.start()
        results = pool.starmap(run_clients, [(target, watch.end, s) for s in seeds])
        watch.join()
    return sum((r[0] for r in results), collections.Counter()), [f for r in results for f in r[1]]


def siege(stack, options):
    """Returns the failures and a summary line."""
    enter = stack.enter_context
    prefill, decode, *spares = (Node(options.binary, role, options.model, *NODE_FLAGS)
                                for role in ("prefill", "decode", "prefill", "decode"))
    for node in (prefill, decode):
        enter(node)
    for spare in spares:
        spare.__enter__()
    stack.callback(lambda: [spare.kill() for spare in spares])
    steady_router = enter(Router(options.binary, [prefill], [decode]))
    router = enter(Router(options.binary, [prefill, spares[0]], [decode, spares[1]]))
    steady = {"prefill": prefill, "decode": decode, "steady router": steady_router, "router": router}
    target = {"steady_router": steady_router.url, "router": router.url, "texts": right_texts(steady_router.url),
              "steady_urls": [server.url for server in steady.values()], "bootstrap_port": prefill.bootstrap_port,
              "magic": b"F4PD", "grammars": options.grammars}
    before = {name: resources(server) for name, server in steady.items()}
    watch = Watch(steady, spares, options, options.minutes * 60)
    counts, failures = run_clients_and_watch(target, watch, options)
    if watch.failure:
        return failures + [watch.failure], "broken off"
    failures += leftovers(steady, before)
    grown = {name: watch.growth(name) for name in steady}
    failures += [f"{name} grew from {first:.0f} to {last:.0f} MiB" for name, (first, last) in grown.items()
                 if last - first > RSS_GROWTH_MIB]
    kinds = {"steady_greedy", "any_greedy", "hung_up", "hostile_http", "hostile_node"}
    if missing := kinds - set(counts):
        failures.append(f"the run was too short to perform {sorted(missing)}")
    return failures, (f"siege: {time.time() - watch.begin:.0f} s, {options.clients} clients, {watch.num_restarts} restarts, "
                      f"{dict(sorted(counts.items()))}, RSS " +
                      ", ".join(f"{name} {a:.0f} -> {b:.0f} MiB" for name, (a, b) in grown.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--restart-every", type=float, default=8)
    parser.add_argument("--no-grammars", dest="grammars", action="store_false")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        failures, summary = siege(stack, options)
    print(summary)
    for failure in failures[:20]:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
