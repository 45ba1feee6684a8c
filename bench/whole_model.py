"""Measures a model with published dims on one GPU: server start times, decode steps against their byte floor, prefill, and
decode steps behind long contexts against the bytes of their keys and values.

  whole_model.py BINARY --gbps RATE --tflops RATE [--like gpt-oss-20b|gpt-oss-120b|deepseek-v3] [--layers 24]
                 [--folder FOLDER] [--dummy] [--device cuda] [--batches 1,4,16,64] [--prompts 512,8192]
                 [--contexts 128,8192] [--context-batches 1,64] [--repetitions 3]

RATE: the rate that `fp4moe bench peak` measured on the machine. Writes a random checkpoint (gpt-oss-20b: 13 GB) into a
temporary folder, or into --folder unless it has one; with --dummy, writes only the config.json and starts no server. A step's
byte floor counts every dense weight, the experts that BATCH tokens with uniform routing choose and, behind a context, its keys
and values. deepseek-v3 has no floor here: its rows show how a step grows with the context. Exit status 1 if a command failed.
"""
import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

READY = "The server is fired up and ready to roll!"


@dataclasses.dataclass
class GptOss:
    """Dims of gpt-oss; every second layer has a window."""
    experts: int
    layers: int
    hidden: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    top_k: int = 4
    vocabulary: int = 201088

    def config(self):
        return {"hidden_size": self.hidden, "intermediate_size": self.hidden, "num_local_experts": self.experts,
                "vocab_size": self.vocabulary, "num_hidden_layers": self.layers}

    def dense_weights_of_layer(self):
        return self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim + self.heads * self.head_dim * self.hidden

    def step_bytes(self, batch):
        active = self.experts * (1 - (1 - self.top_k / self.experts) ** batch)
        experts = active * 3 * self.hidden * self.hidden * 17 / 32
        return self.layers * (2 * self.dense_weights_of_layer() + experts) + 2 * self.vocabulary * self.hidden

    def context_elements(self, batch, context):
        """Elements read by the layers without a window; the other layers read the same bytes at any context of at least a window."""
        return self.layers // 2 * batch * context * 2 * self.kv_heads * self.head_dim

    def flops_of_token(self):
        """Flops per token of a long prompt: all matrix products except attention and the head."""
        return 2 * self.layers * (self.dense_weights_of_layer() + self.top_k * 3 * self.hidden * self.hidden)


@dataclasses.dataclass
class DeepSeek:
    """One dense layer, then layers with 64 experts: attention as in the real model's 61 layers, but weights that fit."""
    layers: int
    latent: int = 576

    def config(self):
        return {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 64,
                "first_k_dense_replace": 1, "vocab_size": 129280, "num_hidden_layers": self.layers}

    def step_bytes(self, batch):
        return None

    def context_elements(self, batch, context):
        return self.layers * batch * context * self.latent

    def flops_of_token(self):
        return None


SHAPES = {"gpt-oss-20b": GptOss(experts=32, layers=24), "gpt-oss-120b": GptOss(experts=128, layers=36), "deepseek-v3": DeepSeek(layers=4)}
# A checkpoint of these sizes is written quickly; --dummy keeps only its config.json.
SMALL = "--hidden-size 256 --intermediate-size 256 --num-experts 16 --vocab-size 1024 --num-hidden-layers 2".split()


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
    """Returns the JSON lines that `fp4moe bench latency` prints."""
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def make_model(options, shape, folder):
    model = os.path.join(folder, options.like)
    if os.path.exists(model):
        return model
    sizes = SMALL if options.dummy else ["--num-hidden-layers", str(shape.layers)]
    if options.dummy and options.like == "deepseek-v3":
        sizes = [*sizes, "--num-dense-layers", "1", "--dense-intermediate-size", "256"]
    subprocess.run([options.binary, "make-tiny", model, "--like", options.like, *sizes], check=True, stdout=subprocess.DEVNULL)
    if options.dummy:
        path = os.path.join(model, "config.json")
        with open(path, encoding="utf-8") as file:
            config = json.load(file) | shape.config()
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        os.remove(os.path.join(model, "model.safetensors"))
    return model


def report_decode(latency, options, shape):
    for row in rows_of([*latency, "-p", "0", "-n", "128", "-b", options.batches]):
        batch, rate = row["n_batch"], row["avg_ts"]
        ms = 1e3 * batch / rate
        print(f"| decode, {batch} at a time | {rate:.0f} | {ms:.2f} | {of_floor(ms, shape.step_bytes(batch), options)} | |", flush=True)


def report_prefill(latency, options, shape):
    for row in rows_of([*latency, "-p", options.prompts, "-n", "0"]):
        rate, flops = row["avg_ts"], shape.flops_of_token()
        share = f"{rate * flops / (options.tflops * 1e12):.2f}" if flops else ""
        print(f"| prefill of {row['n_prompt']} | {rate:.0f} | | | {share} |", flush=True)


def report_contexts(latency, options, shape):
    """Reports each context's steps, and their growth compared with the first context."""
    first = {}
    kv_bytes = 1 if options.kv_cache_dtype == "fp8_e4m3" else 2
    for row in rows_of([*latency, "-p", "0", "-n", "128", "-d", options.contexts, "-b", options.context_batches]):
        batch, rate, context = row["n_batch"], row["avg_ts"], row["n_depth"]
        ms, weights = 1e3 * batch / rate, shape.step_bytes(batch)
        floor = of_floor(ms, weights and weights + kv_bytes * shape.context_elements(batch, context), options)
        start, start_ms = first.setdefault(batch, (context, ms))
        grown = ""
        if context != start:
            wanted = kv_bytes * shape.context_elements(batch, context - start) / options.gbps * 1e-6
            grown = f": + {ms - start_ms:.2f} ms, keys and values {wanted:.2f}"
        print(f"| decode, {batch} at a time behind {context}{grown} | {rate:.0f} | {ms:.2f} | {floor} | |", flush=True)


def of_floor(ms, num_bytes, options):
    return f"{ms / (num_bytes / options.gbps * 1e-6):.2f}" if num_bytes else ""


def report(options, folder):
    shape = dataclasses.replace(SHAPES[options.like], **({"layers": options.layers} if options.layers else {}))
    model = make_model(options, shape, folder)
    title = f"{options.like}'s dims, {shape.layers} layers"
    if options.dummy:
        print(f"{title}, dummy weights\n")
    else:
        serve = [options.binary, "serve", model, "--device", options.device, "--host", "127.0.0.1", "--port", "0"]
        first, second = seconds_to_ready(serve), seconds_to_ready(serve)
        print(f"{title}; first start to ready {first:.1f} s, second {second:.1f} s\n")
    latency = [options.binary, "bench", "latency", model, "--device", options.device, "-o", "jsonl", "-r", options.repetitions,
               "--kv-cache-dtype", options.kv_cache_dtype]
    if options.dummy:
        latency += ["--load-format", "dummy"]
    print("| test | tokens/s | ms per step | times the byte floor | share of the bf16 rate |\n| --- | ---: | ---: | ---: | ---: |")
    if options.batches:
        report_decode(latency, options, shape)
    if options.prompts:
        report_prefill(latency, options, shape)
    if options.contexts:
        report_contexts(latency, options, shape)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--gbps", type=float, required=True)
    parser.add_argument("--tflops", type=float, required=True)
    parser.add_argument("--like", choices=SHAPES, default="gpt-oss-20b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repetitions", default="3")
    parser.add_argument("--batches", default="1,4,16,64", help="empty: none")
    parser.add_argument("--prompts", default="512,8192", help="empty: none")
    parser.add_argument("--contexts", default="128,8192", help="empty: none")
    parser.add_argument("--context-batches", default="1,64")
    parser.add_argument("--kv-cache-dtype", default="auto")
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
