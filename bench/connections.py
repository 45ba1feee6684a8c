"""What a crowd of connections costs a running stream: its median time between tokens, and the server's memory, with and
without 10,000 idle connections and 50 clients that take their answers slowly; alternated, in two processes.

    PYTHONPATH=tests/server python3 bench/connections.py build/release/bin/fp4moe models/demo-gptoss-mxfp4 [--json]
"""
import argparse
import contextlib
import json
import statistics
import threading
import time
import urllib.request

import crowd
from serve_process import Serve


def wait_for_idle(url):
    """Until every answer is generated: the slow readers then only read."""
    while True:
        with urllib.request.urlopen(url + "/server_info") as answer:
            if json.loads(answer.read())["num_running_reqs"] == 0:
                return
        time.sleep(0.1)


def measure(serve, options, crowded):
    """Median seconds between tokens, and the server's resident bytes."""
    with contextlib.ExitStack() as stack:
        if crowded:
            stack.enter_context(crowd.idle_connections(serve.url, options.idle))
            sip = stack.enter_context(crowd.slow_readers(serve.url, options.slow, 900))
            wait_for_idle(serve.url)
            done = threading.Event()

            def sipping():
                while not done.is_set():
                    sip(0.1)
            thread = threading.Thread(target=sipping)
            thread.start()
            stack.callback(thread.join)
            stack.callback(done.set)
        _, gaps = crowd.stream(serve.url, options.tokens)
        resident = crowd.resident_bytes(serve.process.pid)
    wait_for_idle(serve.url)
    return statistics.median(gaps), resident


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
        parser.error(f"needs a limit of {options.idle + 200} descriptors (ulimit -Hn)")
    rows = []
    with Serve(options.binary, options.model, "--context-length", "4096", "--max-total-tokens", "131072") as serve:
        crowd.stream(serve.url, 200)  # warm
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
    print(f"median ratio {summary['median_ratio']:.3f}, largest growth {summary['largest_rss_growth_mb']:.0f} MB")


if __name__ == "__main__":
    main()
