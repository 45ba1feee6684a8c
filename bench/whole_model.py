"""A model of gpt-oss-20b's dims on one GPU: starts of a server on its checkpoint, decode steps beside their byte floor, prefill.

  whole_model.py BINARY --gbps RATE --tflops RATE [--layers 24] [--folder FOLDER] [--device cuda]
                 [--batches 1,4,16,64] [--prompts 512,8192]

RATE: what `fp4moe bench peak` measured on the machine. Writes a random checkpoint (24 layers: 13 GB) into a temporary
folder, or into --folder if it holds none yet. A step's floor is its bytes, attention's keys and values left out: every dense
weight, and the experts that BATCH tokens with uniform routing choose. Exit status 1 if a command failed.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, VOCABULARY = 2880, 64, 8, 64, 32, 4, 201088
READY = "The server is fired up and ready to roll!"


def dense_weights_of_layer():
    return HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN


def step_bytes(layers, batch):
    active = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** batch)
    experts = active * 3 * HIDDEN * HIDDEN * 17 / 32
    return layers * (2 * dense_weights_of_layer() + experts) + 2 * VOCABULARY * HIDDEN


def flops_of_token(layers):
    """Of a long prompt: every weight that a token meets, without attention and the head of one row."""
    return 2 * layers * (dense_weights_of_layer() + TOP_K * 3 * HIDDEN * HIDDEN)


def seconds_to_ready(command):
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            for line in server.stdout:
                if READY in line:
                    return time.monotonic() - start
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()
    raise RuntimeError(f"{' '.join(command)} ended with {server.returncode} before it was ready")


def rows_of(command):
    """JSON lines of `fp4moe bench latency`."""
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def report(options, folder):
    binary, model = options.binary, os.path.join(folder, "gpt-oss-20b")
    if not os.path.exists(model):
        layers = ["--num-hidden-layers", str(options.layers)]
        subprocess.run([binary, "make-tiny", model, "--like", "gpt-oss-20b", *layers], check=True, stdout=subprocess.DEVNULL)
    serve = [binary, "serve", model, "--device", options.device, "--host", "127.0.0.1", "--port", "0"]
    first, second = seconds_to_ready(serve), seconds_to_ready(serve)
    print(f"gpt-oss-20b's dims, {options.layers} layers; first start to ready {first:.1f} s, second {second:.1f} s\n")
    latency = [binary, "bench", "latency", model, "--device", options.device, "-o", "jsonl", "-r", "3"]
    print("| test | tokens/s | a step, ms | of the byte floor | of the bf16 rate |\n| --- | ---: | ---: | ---: | ---: |")
    for row in rows_of([*latency, "-p", "0", "-n", "128", "-b", options.batches]):
        batch, rate = row["n_batch"], row["avg_ts"]
        ms, floor = 1e3 * batch / rate, step_bytes(options.layers, batch) / options.gbps * 1e-6
        print(f"| decode, {batch} at a time | {rate:.0f} | {ms:.2f} | {ms / floor:.2f} | |")
    for row in rows_of([*latency, "-p", options.prompts, "-n", "0"]):
        rate = row["avg_ts"]
        share = rate * flops_of_token(options.layers) / (options.tflops * 1e12)
        print(f"| prefill of {row['n_prompt']} | {rate:.0f} | | | {share:.2f} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--gbps", type=float, required=True)
    parser.add_argument("--tflops", type=float, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--prompts", default="512,8192")
    options = parser.parse_args()
    try:
        if options.folder is not None:
            report(options, options.folder)
        else:
            with tempfile.TemporaryDirectory() as folder:
                report(options, folder)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"whole_model: {error}\n{getattr(error, 'stderr', '') or ''}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
