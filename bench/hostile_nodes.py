"""Measures what one hostile peer costs a prefill node, a decode node and their clients: 8 plain streams and a structured
one over both nodes, alone and together with an attacker of each kind. Prints the columns of bench/hostile.py for the
attacked node.

    build/venv/bin/python bench/hostile_nodes.py build/ci/bin/fp4moe models/demo-gptoss-mxfp4 [--attackers NAME,...]
"""
import contextlib
import json
import sys
import time

import hostile  # first: it extends sys.path for the next two
import node_strangers
from serve_process import Serve

FLAGS = ["--context-length", "2048", "--max-total-tokens", "65536", "--disaggregation-bootstrap-port", "0"]


def deep_hellos(port, _, stopped):
    while not stopped.is_set():
        node_strangers.deep_hello(port)


def drips(port, _, stopped):
    with node_strangers.Drips(port, 100):
        stopped.wait()


def flood(port, _, stopped):
    """Silent connections, 200 at a time, replaced by new ones continuously."""
    while not stopped.is_set():
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    stack.enter_context(node_strangers.connect(port))


def host_strings(_, url, stopped):
    """Requests to the decode node whose bootstrap_host has 20 MB, a different one each time."""
    def body(number):
        return {"text": "Tom has", "bootstrap_host": chr(ord("a") + number % 26) * (20 << 20)}
    hostile.repeat_posts(body, at_once=1)(url, stopped)


def deep_hosts(_, url, stopped):
    """Requests that name a host which responds with deeply nested JSON."""
    deep = node_strangers.frame(node_strangers.HELLO, node_strangers.deep_json(200_000))
    with node_strangers.FakePrefillNode(deep) as fake:
        body = {"text": "Tom has", "bootstrap_host": "127.0.0.1", "bootstrap_port": fake.port}
        hostile.repeat_posts(lambda _: body, at_once=2)(url, stopped)


# Name: (role of the attacked node, attacker).
ATTACKS = {
    "deep hellos": ("prefill", deep_hellos),
    "100 connections that drip": ("prefill", drips),
    "floods of 200 connections": ("prefill", flood),
    "host strings of 20 MB": ("decode", host_strings),
    "hosts that answer deep JSON": ("decode", deep_hosts),
}


def bench_attacker(name, options):
    role = ATTACKS[name][0]
    with contextlib.ExitStack() as stack:
        nodes = {role: stack.enter_context(Serve(options.binary, options.model, *FLAGS, "--disaggregation-mode", role,
                                                 *options.flags)) for role in ("prefill", "decode")}
        with contextlib.closing(hostile.connect(nodes["prefill"].url)) as connection:
            connection.request("GET", "/server_info")
            port = json.loads(connection.getresponse().read())["disaggregation_bootstrap_port"]
        decode = nodes["decode"].url
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        streams = [hostile.Stream(decode, {**hostile.PLAIN, **place}) for _ in range(hostile.PLAIN_STREAMS)]
        streams.append(hostile.Stream(decode, {**hostile.STRUCTURED, **place}))
        health = hostile.Health(nodes[role].url)
        time.sleep(2)  # warm
        try:
            row = hostile.run_attack(nodes[role], streams, health, name, [port, decode], options)
        finally:
            for one in [*streams, health]:
                one.stopped.set()
            begin = time.perf_counter()
            for node in nodes.values():
                node.process.terminate()
            for node in nodes.values():
                node.process.wait(timeout=30)
        return {"attacker": f"{name} ({role})", **row, "sigterm_s": time.perf_counter() - begin}


if __name__ == "__main__":
    hostile.ATTACKERS = {name: attack for name, (_, attack) in ATTACKS.items()}
    hostile.bench_attacker = bench_attacker
    sys.exit(hostile.main())
