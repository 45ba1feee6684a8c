"""Measures how long a server with several ranks pauses while experts move between the ranks under load (--enable-eplb): the
pause beside a step and beside one copy of the moved bytes. Prompts of the clients use other tokens in each round, so
that other experts are busy.

    PYTHONPATH=tests/server python3 bench/rebalance.py BINARY MODEL [--device cpu] [--ranks 2] [--clients 8] [--rounds 8] [--seconds 5]
                                                       [--redundant 4] [-- flags of serve]
"""
import argparse
import contextlib
import http.client
import json
import statistics
import sys
import threading
import time
from urllib.parse import urlsplit

from serve_process import Serve, metric

PROMPT, TOKENS, IDS_OF_ROUND = 48, 32, 6


def post(url, path, body):
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)) as connection:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def stream(url, ids, gaps):
    """Runs one request and appends the seconds between its tokens. Returns the number of its tokens."""
    body = {"input_ids": ids, "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)) as connection:
        connection.request("POST", "/generate", json.dumps(body))
        times, last = [], {}
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                last = json.loads(line[6:])
    gaps.extend(b - a for a, b in zip(times, times[1:]))
    return last["meta_info"]["completion_tokens"]


def copy_seconds(num_bytes):
    """Seconds of one thread's copy of this many bytes in memory, the median of five."""
    source, target = bytearray(b"\1") * num_bytes, bytearray(num_bytes)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Load:
    """Clients that send requests until the end of the `with`."""

    def __init__(self, url, clients):
        self.url, self.round, self.ended, self.gaps, self.incomplete, self.requests = url, 0, False, [], 0, 0
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(clients)]

    def run(self, i):
        n = 0
        while not self.ended:
            first = 7 + 97 * self.round
            ids = [first + (11 * i + n + k) % IDS_OF_ROUND for k in range(PROMPT)]
            self.incomplete += stream(self.url, ids, self.gaps) != TOKENS
            self.requests += 1
            n += 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended = True
        for thread in self.threads:
            thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    for name, default in (("ranks", 2), ("clients", 8), ("rounds", 8), ("redundant", 4)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=5, help="of load before each rebalance")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    flags = ["--device", options.device, "--tp", str(options.ranks), "--moe-a2a-backend", "deepep", "--enable-eplb",
             "--ep-num-redundant-experts", str(options.redundant), "--eplb-rebalance-num-iterations", "0",
             "--disable-radix-cache", "--max-total-tokens", "4096", *sys.argv[end + 1:]]
    rows = []
    with Serve(options.binary, options.model, *flags) as serve, Load(serve.url, options.clients) as load:
        for load.round in range(options.rounds + 1):
            load.gaps = []
            time.sleep(options.seconds)
            while len(load.gaps) < 50:
                time.sleep(0.1)
            step = statistics.median(load.gaps)
            status, moves = post(serve.url, "/rebalance_experts", {})
            assert status == 200, moves
            if load.round > 0:  # the first round starts the clients
                rows.append((step, moves))
        failed = metric(serve.url, "num_failed_requests_total")
    print("| experts | MB | busiest rank | step, ms | pause, ms | copying, ms | rest, steps | one copy, ms |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for step, moves in rows:
        pause, copying = moves["seconds"], moves["copy_seconds"]
        print(f"| {moves['num_experts']} | {moves['num_bytes'] / 1e6:.1f} | {moves['imbalance_before']:.2f} -> "
              f"{moves['imbalance_after']:.2f} | {1e3 * step:.1f} | {1e3 * pause:.1f} | {1e3 * copying:.1f} | "
              f"{(pause - copying) / step:.3f} | {1e3 * copy_seconds(moves['num_bytes']):.1f} |")
    print(f"\n{load.requests} requests, {load.incomplete} incomplete, {failed:.0f} failed")


if __name__ == "__main__":
    main()
