"""Measures a prefill node and a decode node with different kernels, beside one server with either of them.

    python3 bench/node_schemes.py BINARY MODEL [--flags FLAGS] [--prefill FLAGS] [--decode FLAGS] [--prompt 4096]
                                  [--output 128] [--requests 64] [--concurrency 1,16] [--rounds 3]

FLAGS, each one argument: of all servers, such as "--device cuda --load-format dummy", and of the prefill node and the decode
node (default: --fp4-compute w4a8 and w4a16). With --device cuda, the nodes have a GPU each, and a server alone has the first
one. `fp4moe bench serving` sends REQUESTS random prompts of PROMPT tokens to each, for OUTPUT tokens; the servers are
measured in turn, ROUNDS times each. Prints the medians of the rounds: TTFT and TPOT in ms, and output tokens per second.
Exit status 1 if a request failed.
"""
import contextlib
import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "server"))
sys.dont_write_bytecode = True
from node_arguments import node_arguments  # noqa: E402
from pd_nodes import Node, Router  # noqa: E402
from serve_process import Serve, environment, num_gpus  # noqa: E402


def gpu(options, number):
    """Lets a process use only this GPU."""
    if "cuda" not in options.flags.split():
        return contextlib.nullcontext()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible is not None else [str(i) for i in range(num_gpus())]
    if number >= len(gpus):
        raise SystemExit(f"node_schemes: a GPU for each node needs {number + 1}; there are {len(gpus)}")
    return environment(CUDA_VISIBLE_DEVICES=gpus[number])


@contextlib.contextmanager
def alone(options, flags):
    with gpu(options, 0), Serve(options.binary, options.model, *options.flags.split(), *flags.split()) as server:
        yield server.url


@contextlib.contextmanager
def nodes(options):
    with contextlib.ExitStack() as stack:
        entered = []
        for number, (role, flags) in enumerate((("prefill", options.prefill), ("decode", options.decode))):
            with gpu(options, number):
                entered.append(stack.enter_context(Node(options.binary, role, options.model, *options.flags.split(),
                                                        *flags.split())))
        yield stack.enter_context(Router(options.binary, entered[:1], entered[1:])).url


def measure(options, url, vocab_size, concurrency, seed):
    out = subprocess.run(
        [options.binary, "bench", "serving", "--base-url", url, "--json", "--random-input-len", str(options.prompt),
         "--random-output-len", str(options.output), "--random-range-ratio", "1", "--vocab-size", str(vocab_size),
         "--num-prompts", str(min(options.requests, 16 * concurrency)), "--max-concurrency", str(concurrency), "--seed",
         str(seed)], check=True, capture_output=True, text=True).stdout
    result = json.loads(out)
    return result["median_ttft_ms"], result["median_tpot_ms"], result["output_throughput"]


def main():
    options = node_arguments(__doc__, flags="", prefill="--fp4-compute w4a8", decode="--fp4-compute w4a16",
                             concurrency="1,16", prompt=4096, output=128, requests=64, rounds=3)
    with open(os.path.join(options.model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    vocab_size = config.get("text_config", config)["vocab_size"]
    places = {f"alone, {options.prefill}": lambda: alone(options, options.prefill),
              f"alone, {options.decode}": lambda: alone(options, options.decode),
              f"prefill {options.prefill}, decode {options.decode}": lambda: nodes(options)}
    concurrencies = [int(text) for text in options.concurrency.split(",")]
    rows = {}
    for number in range(options.rounds):
        for name, place in places.items():
            with place() as url:
                for i, concurrency in enumerate(concurrencies):  # other prompts, which no prefix cache has
                    rows.setdefault((concurrency, name), []).append(
                        measure(options, url, vocab_size, concurrency, number * len(concurrencies) + i))
    print(f"{options.model} {options.flags}; prompts of {options.prompt} tokens, {options.output} generated, medians of "
          f"{options.rounds} rounds\n\n| requests at once | servers | TTFT ms | TPOT ms | tokens/s |\n"
          "| ---: | --- | ---: | ---: | ---: |")
    for (concurrency, name), results in sorted(rows.items()):
        ttft, tpot, rate = (statistics.median(column) for column in zip(*results))
        print(f"| {concurrency} | {name} | {ttft:.2f} | {tpot:.3f} | {rate:.0f} |")


if __name__ == "__main__":
    main()
