"""Measures what one hostile client costs other clients: 8 plain streams and one stream of cheap structured output run
alone and together with an attacker of each kind. Reports for each p50 and p99 of the time between tokens, tokens per
second, the server's memory and the latency of /health, and how long the streams take to recover after the attack.

    build/venv/bin/python bench/hostile.py build/ci/bin/fp4moe models/demo-gptoss-mxfp4 [--attackers NAME,...]
        [--hidden-size 1024 --layers 8] [--json] [-- FLAGS OF SERVE]

An attacker is a row of ATTACKERS: a name, and a function of its target and an event that attacks until the event is set.
It runs in a separate process at the lowest priority (nice 19). So does a baseline while the streams are "alone": for
hostile grammars, the same number of honest requests; for other attackers, a process that computes something.
hostile_nodes.py measures a prefill and a decode node.

A step should take longer than a time slice, but the demos' steps take less: --hidden-size and --layers change the dims in
MODEL's config.json and use dummy weights. The clients need CPU time too: on a machine with few cores, leave them some
(-- --threads 1).
"""
import argparse
import contextlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from urllib.parse import urlsplit

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "server"))
sys.dont_write_bytecode = True
import hostile_http  # noqa: E402
from crowd import resident_bytes  # noqa: E402
from serve_process import Serve  # noqa: E402

PLAIN_STREAMS = 8
CHEAP_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 100000}
PLAIN = {"text": "Tom has", "stream": True, "sampling_params": {"temperature": 0, "ignore_eos": True}}
STRUCTURED = {"text": "Tom has", "stream": True,
              "sampling_params": {"temperature": 0, "json_schema": json.dumps(CHEAP_SCHEMA)}}
HEALTH_TIMEOUT = 10  # seconds


def connect(url, timeout=3600):
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)


# ---- attackers ------------------------------------------------------------------------------------

def repeat_posts(make_body, at_once=4):
    """Returns an attacker that keeps `at_once` requests open; its clients disconnect when the attack ends."""
    def attack(url, stopped):
        connections = [connect(url) for _ in range(at_once)]

        def run(worker):
            number = worker
            while not stopped.is_set():
                with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):  # disconnected in the meantime
                    connections[worker].request("POST", "/generate", json.dumps(make_body(number)))
                    connections[worker].getresponse().read()
                number += at_once
        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(at_once)]
        for thread in threads:
            thread.start()
        stopped.wait()
        for connection in connections:
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    return attack


def constrained(field, text):
    return {"text": "Tom has", "sampling_params": {"temperature": 0, "max_new_tokens": 400, field: text}}


def regex(pattern):
    return repeat_posts(lambda _: constrained("regex", pattern))


AMBIGUOUS = 'root ::= a a a a a a a a\na ::= "" | "x" | a a\n'


def many_properties(number):
    """Returns a request with a schema of 75 KB, a different one each time."""
    return constrained("json_schema", json.dumps({"type": "object", "properties": {
        f"p{number}_{i}": {"type": "integer"} for i in range(3500)}}))


GRAMMARS = {
    "regex: three nested counts": regex("((.{0,999}){0,999}){0,999}x"),
    "regex: two nested counts": regex("(.{0,999}){0,999}x"),
    "regex: ambiguous counts": regex("(.{0,20}){0,20}x"),
    "pattern in a schema": repeat_posts(lambda _: constrained("json_schema", json.dumps(
        {"type": "string", "pattern": "^(.{0,99}){0,99}x$"}))),
    "ambiguous EBNF": repeat_posts(lambda _: constrained("ebnf", AMBIGUOUS)),
    "schemas of 3500 properties": repeat_posts(many_properties),
}
ATTACKERS = {**GRAMMARS, **hostile_http.ATTACKERS}


def busy(_, stopped):
    """Uses idle CPU time as attackers do, so that the baseline includes the cost of a busy machine."""
    while not stopped.is_set():
        sum(range(10000))


# The same number of concurrent requests as hostile grammars, but without a grammar: their rows make steps longer.
honest = repeat_posts(lambda _: {"text": "Tom has", "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}})
BASELINES = {"busy": busy, "honest": honest}


# ---- measuring ------------------------------------------------------------------------------------

class Stream:
    """Sends requests of 400 tokens one after another and records the arrival time of each event."""

    def __init__(self, url, body):
        self.url, self.body = url, body
        self.stopped = threading.Event()
        self.gaps = []  # (time, seconds since the previous event)
        self.latest = time.perf_counter()  # time of the most recent event
        self.failures = 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        body = {**self.body, "sampling_params": {**self.body["sampling_params"], "max_new_tokens": 400}}
        while not self.stopped.is_set():
            try:
                with contextlib.closing(connect(self.url)) as connection:
                    connection.request("POST", "/generate", json.dumps(body))
                    answer = connection.getresponse()
                    before = None
                    for line in answer:
                        if not line.startswith(b"data: {"):
                            continue
                        now = time.perf_counter()
                        if before is not None:
                            self.gaps.append((now, now - before))
                        before = self.latest = now
                        if self.stopped.is_set():
                            return
                    self.failures += answer.status != 200
            except (OSError, http.client.HTTPException):
                self.failures += 1
                time.sleep(0.1)

    def gaps_within(self, begin, end):
        """Returns the gaps in seconds; the last one may not have ended yet."""
        gaps = [gap for at, gap in list(self.gaps) if begin <= at <= end]
        return gaps + [end - min(self.latest, end)] if self.latest < end else gaps


class Health:
    """Measures the latency of /health every 50 ms."""

    def __init__(self, url):
        self.url, self.seconds = url, []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.stopped.wait(0.05):
            begin = time.perf_counter()
            status = 0
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connect(self.url, HEALTH_TIMEOUT)) as connection:
                connection.request("GET", "/health")
                status = connection.getresponse().status
            self.seconds.append((begin, time.perf_counter() - begin if status == 200 else float("inf")))

    def worst_within(self, begin, end):
        return max((s for at, s in list(self.seconds) if begin <= at <= end), default=float("inf"))


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(serve, streams, health, seconds):
    """Returns a row measured over the next `seconds` of the streams."""
    begin = time.perf_counter()
    peak = 0
    while time.perf_counter() < begin + seconds:
        time.sleep(0.2)
        peak = max(peak, resident_bytes(serve.process.pid))
    end = time.perf_counter()
    plain = [gap for stream in streams[:-1] for gap in stream.gaps_within(begin, end)]
    structured = streams[-1].gaps_within(begin, end)
    return {"plain_p50_ms": 1000 * statistics.median(plain), "plain_p99_ms": 1000 * quantile(plain, 0.99),
            "structured_p50_ms": 1000 * statistics.median(structured), "structured_p99_ms": 1000 * quantile(structured, 0.99),
            "tokens_per_second": (len(plain) + len(structured)) / (end - begin), "rss_mb": peak / 2**20,
            "health_ms": 1000 * health.worst_within(begin, end)}


def recovery_seconds(streams, alone, most):
    """Returns the seconds until the plain streams' median gap over half a second is at most 1.2 times the gap alone."""
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + most:
        time.sleep(0.1)
        recent = [gap for stream in streams for gap in stream.gaps_within(now - 0.4, now + 0.1)]
        if 1000 * statistics.median(recent) <= 1.2 * alone["plain_p50_ms"]:
            return now - begin
    return float("inf")


@contextlib.contextmanager
def attacking(name, *target):
    """Runs the attacker or baseline `name` in a separate process until the end of the block."""
    attacker = subprocess.Popen([sys.executable, sys.argv[0], "--attack", name, *map(str, target)], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        attacker.stdin.close()
        try:
            attacker.wait(timeout=2)
        except subprocess.TimeoutExpired:  # its connections end with the process
            attacker.kill()
            attacker.wait()


def attack_until_stdin_ends(name, target):
    """The body of the process that attacking() starts. A real attacker takes no CPU time from the server, hence nice 19."""
    os.nice(19)
    stopped = threading.Event()
    threading.Thread(target={**ATTACKERS, **BASELINES}[name], args=(*target, stopped), daemon=True).start()
    sys.stdin.read()
    stopped.set()


def run_attack(serve, streams, health, name, target, options):
    with attacking("honest" if name in GRAMMARS else "busy", target[-1]):
        alone = measure(serve, streams, health, options.seconds)
    with attacking(name, *target):
        time.sleep(1)
        beside = measure(serve, streams, health, options.seconds)
    recovery = recovery_seconds(streams, alone, options.seconds)
    return {"alone": alone, "beside": beside, "recovery_s": recovery,
            "plain_p99_ratio": beside["plain_p99_ms"] / alone["plain_p99_ms"],
            "structured_p99_ratio": beside["structured_p99_ms"] / alone["structured_p99_ms"],
            "rss_growth_mb": beside["rss_mb"] - alone["rss_mb"]}


def bench_attacker(name, options):
    """Measures one attacker on a separate server, which may not survive the attack."""
    with Serve(options.binary, options.model, "--context-length", "2048", "--max-total-tokens", "65536", *options.flags) as serve:
        streams = [Stream(serve.url, PLAIN) for _ in range(PLAIN_STREAMS)] + [Stream(serve.url, STRUCTURED)]
        health = Health(serve.url)
        time.sleep(2)  # warm
        try:
            row = run_attack(serve, streams, health, name, [serve.url], options)
        finally:
            for one in [*streams, health]:
                one.stopped.set()
            begin = time.perf_counter()
            serve.process.terminate()
            try:
                serve.process.wait(timeout=30)
            except Exception:  # the server hangs, which sigterm_s shows
                serve.process.kill()
        return {"attacker": name, **row, "sigterm_s": time.perf_counter() - begin}


def resized(model, options, folder):
    """Fills `folder` with MODEL's tokenizer and a config.json with other dims, without weights; returns it."""
    for name in os.listdir(model):
        if name.endswith(".json") and name != "config.json":
            shutil.copy(os.path.join(model, name), folder)
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    if options.hidden_size:
        config["hidden_size"] = config["intermediate_size"] = options.hidden_size
    if options.layers:
        config["num_hidden_layers"] = options.layers
        config["layer_types"] = (config["layer_types"] * options.layers)[:options.layers]
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return folder


def main():
    if sys.argv[1:2] == ["--attack"]:
        return attack_until_stdin_ends(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--attackers", type=lambda s: s.split(","), default=list(ATTACKERS), help="; ".join(ATTACKERS))
    parser.add_argument("--seconds", type=float, default=10, help="duration of each measurement")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json", action="store_true")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[:own.index("--")], own[own.index("--") + 1:]
    options = parser.parse_args(own, argparse.Namespace(flags=flags))
    with contextlib.ExitStack() as stack:
        if options.hidden_size or options.layers:
            options.model = resized(options.model, options, stack.enter_context(tempfile.TemporaryDirectory()))
            options.flags += ["--load-format", "dummy"]
        return bench(options)


def bench(options):
    if not options.json:
        print("| attacker | plain p50/p99 ms alone | under attack | p99 ratio | structured p50/p99 ms alone | under attack | p99 ratio | tokens/s alone | under attack "
              "| RSS + MiB | /health ms | recovery s | SIGTERM s |\n| --- |" + " ---: |" * 12)
    rows = []
    for name in options.attackers:
        row = bench_attacker(name, options)
        rows.append(row)
        a, b = row["alone"], row["beside"]
        if not options.json:
            print(f"| {name} | {a['plain_p50_ms']:.1f}/{a['plain_p99_ms']:.1f} | {b['plain_p50_ms']:.1f}/{b['plain_p99_ms']:.1f} "
                  f"| {row['plain_p99_ratio']:.2f} | {a['structured_p50_ms']:.1f}/{a['structured_p99_ms']:.1f} "
                  f"| {b['structured_p50_ms']:.1f}/{b['structured_p99_ms']:.1f} | {row['structured_p99_ratio']:.2f} "
                  f"| {a['tokens_per_second']:.0f} | {b['tokens_per_second']:.0f} | {row['rss_growth_mb']:.0f} "
                  f"| {b['health_ms']:.0f} | {row['recovery_s']:.1f} | {row['sigterm_s']:.1f} |", flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
