"""Measures what a grammar adds to a decode step of a model with gpt-oss-20b's dims: alternates streams with and without it.

  grammar_steps.py BINARY --folder FOLDER [--layers 24] [--batches 1,8] [--tokens 24] [--rounds 2] [--url URL] [-- FLAGS OF SERVE]

Writes a random checkpoint with a vocabulary of gpt-oss's size into --folder, unless it has one, and serves it; --url names
a server that already serves it. A row has milliseconds per step without and with the grammar, and the increase in percent.
grammar_bench measures the time of the masks on one core.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from urllib.parse import urlsplit

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "server"))
sys.dont_write_bytecode = True
from serve_process import Serve  # noqa: E402

VOCABULARY = 201088
PERSON = {"type": "object", "required": ["name", "tags", "score"], "properties": {
    "name": {"type": "string", "maxLength": 40}, "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 5},
    "score": {"type": "number", "minimum": 0, "maximum": 1}}}
GRAMMARS = {
    "any JSON strings": {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 20}},
    "bounded strings and numbers": {"json_schema": {"type": "array", "items": PERSON, "minItems": 20}},
    "counted pattern": {"regex": "([A-Za-z ]{1,60}[.!?] ){20,}"},
}


def words(count):
    """Yields words as long and as frequent as in trained vocabularies; a space is encoded as in byte-level ones."""
    draw = random.Random(1)
    seen = set()
    while len(seen) < count:
        kind = draw.randrange(20)
        letters, length = (("{}[]:,.()=-_/<>#*'", draw.randint(2, 5)) if kind == 0 else
                           ("0123456789", draw.randint(2, 3)) if kind == 1 else ("abcdefghijklmnopqrstuvwxyz", draw.randint(2, 10)))
        word = ("\u0120" if kind > 10 else "") + "".join(draw.choices(letters, k=length))
        if word not in seen:
            seen.add(word)
            yield word


def make_checkpoint(binary, folder, layers):
    subprocess.run([binary, "make-tiny", folder, "--like", "gpt-oss-20b", "--num-hidden-layers", str(layers)],
                   check=True, stdout=subprocess.DEVNULL)
    path = os.path.join(folder, "tokenizer.json")
    with open(path) as file:
        tokenizer = json.load(file)
    vocab = tokenizer["model"]["vocab"]
    vocab.update(zip(words(VOCABULARY - len(vocab)), range(len(vocab), VOCABULARY)))
    with open(path, "w") as file:
        json.dump(tokenizer, file)


def stream(url, tokens, grammar, number=0):
    """Returns the number of tokens after the first and the seconds that they took."""
    parts, times = urlsplit(url), []
    body = {"text": chr(ord("a") + number), "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **grammar}}
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)) as connection:
        connection.request("POST", "/generate", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                last = json.loads(line[6:])
    if len(last["output_ids"]) != tokens:
        raise RuntimeError(f"the response has {len(last['output_ids'])} tokens instead of the requested number: {last}")
    return tokens - 1, times[-1] - times[0]


def step_ms(url, batch, tokens, grammar):
    with concurrent.futures.ThreadPoolExecutor(batch) as pool:
        parts = list(pool.map(lambda i: stream(url, tokens, grammar, i), range(batch)))
    return 1000 * sum(seconds for _, seconds in parts) / sum(count for count, _ in parts)


def measure(url, options):
    grammars = {name: GRAMMARS[name] for name in options.grammars}
    for grammar in grammars.values():
        stream(url, 2, grammar)  # compiles the grammar
    print("| grammar | streams | ms per step without | with | increase |\n| --- | ---: | ---: | ---: | ---: |")
    for name, grammar in grammars.items():
        for batch in options.batches:
            pairs = [(step_ms(url, batch, options.tokens, {}), step_ms(url, batch, options.tokens, grammar))
                     for _ in range(options.rounds)]
            without, with_it = (statistics.mean(times) for times in zip(*pairs))
            print(f"| {name} | {batch} | {without:.1f} | {with_it:.1f} | {100 * (with_it / without - 1):.1f} % |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--grammars", type=lambda s: s.split(","), default=list(GRAMMARS), help=", ".join(GRAMMARS))
    parser.add_argument("--url")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    if not os.path.exists(os.path.join(options.folder, "config.json")):
        make_checkpoint(options.binary, options.folder, options.layers)
    if options.url:
        return measure(options.url, options)
    with Serve(options.binary, options.folder, "--context-length", "2048", *options.flags) as serve:
        measure(serve.url, options)


if __name__ == "__main__":
    main()
