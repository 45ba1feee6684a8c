"""Measures transfers of KV pages and states between a prefill node and a decode node, and running streams beside them.

    python3 bench/node_transfers.py BINARY MODEL [--flags FLAGS] [--prefill FLAGS] [--decode FLAGS]
                                    [--prompt 8192] [--transfers 32] [--streams 8] [--seconds 10]

FLAGS, each one argument: of both nodes or of one, such as "--device cuda --tp 2". The same prompt of PROMPT tokens is sent
again and again, one request at a time: the prefill node has it in its prefix cache, the decode node has no cache, so that
there is little but transfers. Then STREAMS requests generate tokens on the decode node for SECONDS alone, and for SECONDS
beside further transfers. Prints the rates of the transfers and of the nodes' copies between connections and KV memory, the
nodes' CPU time per GB, which other processes on the machine change less than the rates, and the limits: a TCP connection over
loopback and, with --device cuda, the host copies that `fp4moe bench peak` measures. Exit status 1 if a command or a request
failed.
"""
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "server"))
sys.dont_write_bytecode = True
from node_arguments import node_arguments  # noqa: E402
from pd_nodes import Node  # noqa: E402
from serve_process import metrics  # noqa: E402


def loopback_rate(seconds=1.0):
    """GB/s of one TCP connection over loopback, with messages of 1 MiB."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        buffer, received = bytearray(1 << 20), 0

        def send():
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                sender.sendall(buffer)
            sender.shutdown(socket.SHUT_WR)
        thread = threading.Thread(target=send)
        started = time.monotonic()
        thread.start()
        while count := receiver.recv_into(buffer):
            received += count
        thread.join()
        receiver.close()
        return received / (time.monotonic() - started) / 1e9


def cpu_seconds(process):
    """The CPU time of all threads of a process."""
    with open(f"/proc/{process.pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Pair:
    """A prefill node and a decode node."""
    def __init__(self, prefill, decode, vocab_size):
        self.prefill, self.decode, self.vocab_size = prefill, decode, vocab_size

    def generate(self, ids, num_tokens):
        body = {"input_ids": ids, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port,
                "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}}
        request = urllib.request.Request(self.decode.url + "/generate", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def ids(self, count):
        return [random.randrange(self.vocab_size) for _ in range(count)]

    def measure(self, act):
        """Runs act(); returns the counters' increases on both nodes, and the seconds."""
        nodes = (self.prefill, self.decode)

        def counters():
            return [{**metrics(node.url), "cpu_seconds_total": cpu_seconds(node.process)} for node in nodes]
        before, started = counters(), time.monotonic()
        act()
        seconds = time.monotonic() - started
        time.sleep(0.1)  # the counters are published after a response
        after = counters()
        return [{name: b[name] - a[name] for name in b if name.endswith("_total") and name in a}
                for a, b in zip(before, after)], seconds


def print_rates(what, counters):
    for role, counts in zip(("prefill", "decode"), counters):
        rates = [counts["kv_transfer_bytes_total"] / max(counts[f"kv_transfer_{name}seconds_total"], 1e-9) / 1e9
                 for name in ("", "copy_")]
        gigabytes = counts["kv_transfer_bytes_total"] / 1e9
        whole = f"{rates[0]:.2f}" if role == "prefill" else "-"  # the decode node's seconds are waits for pages
        print(f"| {what}, {role} node: {1e3 * gigabytes:.1f} MB | {whole} | {rates[1]:.2f} | "
              f"{counts['cpu_seconds_total'] / max(gigabytes, 1e-9):.2f} |")


def measure_streams(pair, options, prompt):
    """Prints the tokens/s of streams alone, and beside transfers."""
    def stream():
        with contextlib.suppress(OSError, http.client.HTTPException):  # the node is killed at the end
            pair.generate(pair.ids(64), options.stream_tokens)
    for _ in range(options.streams):
        threading.Thread(target=stream, daemon=True).start()
    while metrics(pair.decode.url)["num_running_reqs"] < options.streams:
        time.sleep(0.05)
    counters, seconds = pair.measure(lambda: time.sleep(options.seconds))
    alone = counters[1]["generation_tokens_total"] / seconds

    def transfer():
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            pair.generate(prompt, 2)
    counters, seconds = pair.measure(transfer)
    if metrics(pair.decode.url)["num_running_reqs"] != options.streams:
        raise RuntimeError("a stream has ended: the context is too short for --seconds")
    beside = counters[1]["generation_tokens_total"] / seconds
    print_rates(f"beside {options.streams} streams", counters)
    print(f"\n{options.streams} streams: {alone:.0f} tokens/s alone, {beside:.0f} beside "
          f"{counters[1]['kv_transfer_bytes_total'] / seconds / 1e9:.3f} GB/s of transfers")


def main():
    options = node_arguments(__doc__, flags="", prefill="", decode="", prompt=8192, transfers=32, streams=8, seconds=10)
    with open(os.path.join(options.model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    vocab_size = config.get("text_config", config)["vocab_size"]
    flags = options.flags.split()
    limits = f"TCP over loopback {loopback_rate():.2f} GB/s"
    if "cuda" in flags:
        peak = json.loads(subprocess.run([options.binary, "bench", "peak", "--json"], check=True, capture_output=True,
                                         text=True).stdout)
        limits += f", device to host {peak['d2h_gbps']:.1f} GB/s, host to device {peak['h2d_gbps']:.1f} GB/s"
    print(f"prefill '{options.prefill}', decode '{options.decode}', both '{options.flags}', prompts of {options.prompt} tokens")
    print(f"limits: {limits}\n\n| transfers | GB/s | copies GB/s | CPU s/GB |\n| --- | ---: | ---: | ---: |")
    with Node(options.binary, "prefill", options.model, *flags, *options.prefill.split()) as prefill, \
            Node(options.binary, "decode", options.model, "--disable-radix-cache", *flags, *options.decode.split()) as decode:
        pair = Pair(prefill, decode, vocab_size)
        with urllib.request.urlopen(decode.url + "/server_info") as answer:
            info = json.load(answer)
        room = min(info["context_length"], (info["max_total_num_tokens"] - options.prompt) // (2 * options.streams))
        options.stream_tokens = room - 128
        prompt = pair.ids(options.prompt)
        pair.generate(prompt, 2)
        print_rates("alone", pair.measure(lambda: [pair.generate(prompt, 2) for _ in range(options.transfers)])[0])
        measure_streams(pair, options, prompt)
        decode.kill()
        prefill.kill()


if __name__ == "__main__":
    main()
