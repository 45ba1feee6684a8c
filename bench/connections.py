"""Measures how many connections slow down a running stream: the time between its tokens (median of five streams) and
the server's memory, alternately without and with 10,000 idle connections and 50 clients that read their responses
slowly. Client and server are separate processes.

    PYTHONPATH=tests/server python3 bench/connections.py build/release/bin/fp4moe models/demo-gptoss-mxfp4 [--json]
"""
import argparse
import contextlib
import http.client
import json
import statistics
import threading
import time
from urllib.parse import urlsplit

import crowd
from serve_process import Serve, metric


def wait_for_ended(url, count):
    """Waits until `count` requests have ended, after which the slow readers only read."""
    while metric(url, "num_requests_total") < count:
        time.sleep(0.1)


def stream(url, tokens):
    """Returns the mean seconds between the tokens of one stream: the mean, because a client receives several at a time.
    Events are not parsed."""
    body = {"prompt": "Tom has", "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        times = [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]
    assert len(times) > tokens / 2  # a token that ends within a character has no event
    return (times[-1] - times[0]) / (tokens - 1)


def measure(serve, options, crowded):
    """Returns the seconds between tokens and the server's resident bytes."""
    with contextlib.ExitStack() as stack:
        if crowded:
            before = metric(serve.url, "num_requests_total")
            stack.enter_context(crowd.idle_connections(serve.url, options.idle))
            sip = stack.enter_context(crowd.slow_readers(serve.url, options.slow, 900))
            wait_for_ended(serve.url, before + options.slow)
            done = threading.Event()

            def sipping():
                while not done.is_set():
                    sip(0.1)
            thread = threading.Thread(target=sipping)
            thread.start()
            stack.callback(thread.join)
            stack.callback(done.set)
        seconds = statistics.median(stream(serve.url, options.tokens) for _ in range(5))
        resident = crowd.resident_bytes(serve.process.pid)
    return seconds, resident


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if crowd.raise_descriptor_limit() < options.idle + 200:
        parser.error(f"needs a limit of at least {options.idle + 200} descriptors (ulimit -Hn)")
    rows = []
    with Serve(options.binary, options.model, "--context-length", "4096", "--max-total-tokens", "131072") as serve:
        stream(serve.url, 200)  # warm
        for _ in range(options.rounds):
            alone, before = measure(serve, options, False)
            crowded, after = measure(serve, options, True)
            rows.append({"alone_us": alone * 1e6, "crowded_us": crowded * 1e6, "ratio": crowded / alone,
                         "rss_growth_mb": (after - before) / 1e6})
    summary = {"median_ratio": statistics.median(r["ratio"] for r in rows),
               "largest_rss_growth_mb": max(r["rss_growth_mb"] for r in rows), "rounds": rows}
    if options.json:
        print(json.dumps(summary))
        return
    print("| alone us | crowded us | ratio | RSS growth MB |\n| --- | --- | --- | --- |")
    for r in rows:
        print(f"| {r['alone_us']:.0f} | {r['crowded_us']:.0f} | {r['ratio']:.3f} | {r['rss_growth_mb']:.0f} |")
    print(f"median ratio {summary['median_ratio']:.3f}, largest RSS growth {summary['largest_rss_growth_mb']:.0f} MB")


if __name__ == "__main__":
    main()
