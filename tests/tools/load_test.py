"""Mixed load on `fp4moe serve`: 64 concurrent streaming clients, some of which disconnect, for a few minutes.

  load_test.py BINARY MODEL [--device cpu|cuda] [--minutes M] [--clients N] [--seed S] [-- SERVE_FLAGS]

No response may be an error, every complete response must be well-formed, memory and descriptors must not grow,
KV pages must always add up, no request, KV token or state slot may remain at the end, and SIGTERM must end the server with
exit status 0. On a CPU, a greedy response must also be the same each time. The exit status is 77 if there is no
usable GPU.
"""
import argparse
import collections
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
sys.dont_write_bytecode = True
from serve_process import Serve, exit_without_gpu, read_metrics  # noqa: E402

SECONDS = 120  # time limit for any response
WARM_UP = 0.4  # fraction of the run before memory is measured: pools and arenas fill
RSS_GROWTH_MIB = 32  # limit from then to the end: allows fragmentation, not leaks
GPU_GROWTH_MIB = 32
MAX_FAILURES = 10  # after which a client process gives up
GREEDY_TOKENS = 40
GREEDY = ["Tom has 3 apples and buys 4.", "a", "The answer is", "7 + 5 =", "1 2 3 4 5 6",
          "Roy buys 8 cookies for 6 dollars each and pays with 94 dollars. How much change does Roy get?",
          "Lea shares 24 stamps equally among 3 children. Each child gives 3 back."]
WORDS = "Tom has apples and buys 4 more 17 beads than Roy dollars each how many children stamps cost left".split()
BAD = [  # path, body, status
    ("/v1/chat/completions", {"messages": "Hi"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e30}, 400),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": -1}, 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": "Hi", "model": "no-such-model"}, 404),
    ("/generate", {"input_ids": [2**40]}, 400),
    ("/generate", {"text": 7}, 400),
    ("/generate", [1], 400),
    ("/v1/embeddings", {}, 404),
]

# A finished choice; tops is the number of alternatives at each position.
Choice = collections.namedtuple("Choice", "text finish logprobs tops")


class Malformed(Exception):
    pass


def require(condition, *what):
    if not condition:
        raise Malformed(" ".join(map(str, what))[:600])


def read_openai(answers):
    """Returns the choices and the number of completion tokens of a response: its events or its single object."""
    texts, finish = collections.defaultdict(str), {}
    logprobs, tops = collections.defaultdict(list), collections.defaultdict(list)
    usage = None
    for answer in answers:
        require("error" not in answer, answer)
        usage = answer.get("usage") or usage
        for choice in answer["choices"]:
            i = choice["index"]
            require(i not in finish, "output for a finished choice:", answer)
            if "text" in choice:
                texts[i] += choice["text"]
            else:
                texts[i] += choice.get("delta", choice.get("message", {})).get("content", "")
            news = choice["logprobs"]
            if news is not None and "content" in news:
                logprobs[i] += [entry["logprob"] for entry in news["content"]]
                tops[i] += [len(entry["top_logprobs"]) for entry in news["content"]]
            elif news is not None:
                logprobs[i] += news["token_logprobs"]
                require(len(news["tokens"]) == len(news["token_logprobs"]) == len(news["text_offset"]), answer)
            if choice["finish_reason"] is not None:
                finish[i] = choice["finish_reason"]
    require(usage is not None, "no usage:", answers[-1])
    require(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage)
    return [Choice(texts[i], finish.get(i), logprobs[i], tops[i]) for i in sorted(texts)], usage["completion_tokens"]


def read_generate(answers):
    last = answers[-1]
    require("error" not in last, last)
    meta = last["meta_info"]
    require(len(last["output_ids"]) == meta["completion_tokens"], last)
    chosen = meta.get("output_token_logprobs", [])
    require(all(before["meta_info"]["finish_reason"] is None for before in answers[:-1]), last)
    finish = meta["finish_reason"] and meta["finish_reason"]["type"]
    return [Choice(last["text"], finish, [entry[0] for entry in chosen],
                   [len(top) for top in meta.get("output_top_logprobs", [])])], meta["completion_tokens"]


def check_choices(choices, tokens, asked):
    """Checks choices. asked has n, max_tokens and logprobs (None, or the number of alternatives)."""
    require(len(choices) == asked["n"], len(choices), "choices of", asked["n"])
    require(all(c.finish in ("stop", "length") for c in choices), choices)
    require(0 < tokens <= asked["n"] * asked["max_tokens"], tokens, "tokens of", asked)
    if all(c.finish == "length" for c in choices):
        require(tokens == asked["n"] * asked["max_tokens"], tokens, "tokens of", asked)
    if asked["logprobs"] is None:
        return
    require(sum(len(c.logprobs) for c in choices) == tokens, "the number of logprobs is not the number of tokens", tokens, choices)
    for c in choices:
        require(all(math.isfinite(p) and p <= 1e-6 for p in c.logprobs), c)
        require(all(count == asked["logprobs"] for count in c.tops), c)


def make_prompt(rng, vocab):
    """Returns a text or ids of random length (at least 1), mostly short."""
    length = int(2 ** rng.uniform(0, 8.3))
    if rng.random() < 0.4:
        return [rng.randrange(vocab) for _ in range(length)]
    return " ".join(rng.choice(WORDS) for _ in range(length))


def make_sampling(rng):
    sampling = {"temperature": rng.choice([0, 0.7, 1, 1.5]), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.3:
        sampling["top_p"] = rng.uniform(0.1, 1)
    if rng.random() < 0.3:
        sampling["top_k"] = rng.randint(1, 50)
    if rng.random() < 0.3:
        sampling["seed"] = rng.randrange(1 << 40)
    return sampling


def make_request(rng, vocab, stream):
    """Returns a random request: its path, its body, and the parameters that the response must match."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/generate"])
    prompt, max_tokens = make_prompt(rng, vocab), int(2 ** rng.uniform(0, 7.5))
    logprobs = rng.randint(0, 5) if rng.random() < 0.25 else None
    asked = {"n": 1, "max_tokens": max_tokens, "logprobs": logprobs}
    sampling = make_sampling(rng)
    if path == "/generate":
        body = {"sampling_params": sampling | {"max_new_tokens": max_tokens}, "stream": stream}
        body["text" if isinstance(prompt, str) else "input_ids"] = prompt
        if logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": logprobs}
        return path, body, asked
    asked["n"] = rng.choice([1, 1, 1, 1, 1, 1, 1, 2, 3])
    body = sampling | {"max_tokens": max_tokens, "n": asked["n"], "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        body["prompt"] = prompt
        if logprobs is not None:
            body["logprobs"] = logprobs
    else:
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        body["messages"] = [{"role": "user", "content": text}]
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
    return path, body, asked


class Client:
    """Sends one request after another until the time is over."""

    def __init__(self, url, vocab, end, seed, counts, texts, failures):
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
        self.vocab, self.end, self.rng = vocab, end, random.Random(seed)
        self.counts, self.texts, self.failures = counts, texts, failures

    def run(self):
        kinds = [(self.finished, 60), (self.hung_up, 20), (self.greedy, 12), (self.refused, 8)]
        actions, weights = zip(*kinds)
        while time.time() < self.end and len(self.failures) < MAX_FAILURES:
            action = self.rng.choices(actions, weights)[0]
            try:
                action()
                self.counts[action.__name__] += 1
            except (Malformed, OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                self.failures.append(f"{action.__name__}: {type(error).__name__}: {error}; {self.latest[:400]}")
                self.connection.close()
            if self.rng.random() < 0.3:
                self.connection.close()
        self.connection.close()

    def send(self, path, body):
        data = json.dumps(body)
        self.latest = f"{path} {data}"
        self.connection.request("POST", path, data)

    def answers(self, path, body):
        """Returns all events of a stream, or a list with the whole response."""
        self.send(path, body)
        with self.connection.getresponse() as response:
            data = response.read().decode()
            require(response.status == 200, response.status, data)
            if not body["stream"]:
                return [json.loads(data)]
        *events, done, rest = data.split("\n\n")
        require(done == "data: [DONE]" and not rest, "a stream ends with", data[-200:])
        # Comments keep a quiet stream alive.
        return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]

    def ask(self, path, body, asked):
        read = read_generate if path == "/generate" else read_openai
        choices, tokens = read(self.answers(path, body))
        check_choices(choices, tokens, asked)
        return choices

    def finished(self):
        self.ask(*make_request(self.rng, self.vocab, stream=self.rng.random() < 0.85))

    def greedy(self):
        i, stream = self.rng.randrange(len(GREEDY)), self.rng.random() < 0.7
        body = {"prompt": GREEDY[i], "temperature": 0, "max_tokens": GREEDY_TOKENS, "ignore_eos": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        choice, = self.ask("/v1/completions", body, {"n": 1, "max_tokens": GREEDY_TOKENS, "logprobs": None})
        self.texts[i].add(choice.text)

    def hung_up(self):
        """Disconnects before the first byte, in mid-stream, or while waiting for a whole response."""
        stream = self.rng.random() < 0.85
        path, body, _ = make_request(self.rng, self.vocab, stream)
        self.send(path, body)
        events = self.rng.randint(0, 30)
        if stream and events > 0:
            response = self.connection.getresponse()
            require(response.status == 200, response.status)
            for _ in range(2 * events):  # an empty line follows each event
                if not response.readline():
                    break
            response.close()
        elif not stream:
            time.sleep(self.rng.random() * 0.05)
        self.connection.close()

    def refused(self):
        path, body, status = self.rng.choice(BAD)
        self.send(path, body)
        with self.connection.getresponse() as response:
            data = response.read().decode()
            require(response.status == status, response.status, data)
            require(json.loads(data)["error"]["message"], data)


def run_clients(url, vocab, end, seeds):
    """Runs in its own process: one client per seed; returns their counts, greedy texts and failures."""
    counts, failures = collections.Counter(), []
    texts = collections.defaultdict(set)
    clients = [Client(url, vocab, end, seed, counts, texts, failures) for seed in seeds]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, dict(texts), failures


class LoadedServe(Serve):
    """Serve with queries for use under load."""

    def get(self, path):
        with contextlib.closing(http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=SECONDS)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            require(response.status == 200, path, response.status, text)
            return text

    def metrics(self):
        return read_metrics(self.get("/metrics"))

    def rss_mib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            found = re.search(r"VmRSS:\s+(\d+) kB", status.read())
        require(found, "the server has ended")
        return int(found.group(1)) / 1024

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def gpu_mib():
    """Returns the used memory of the whole GPU in MiB, because the driver does not know a container's process ids."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


class Watch(threading.Thread):
    """Samples memory and metrics until the load is over."""

    def __init__(self, serve, on_gpu, start, end):
        super().__init__()
        self.serve, self.on_gpu, self.begin, self.end = serve, on_gpu, start, end
        self.samples = []  # (seconds, RSS, GPU memory)
        self.peak = collections.Counter()
        self.failure = None
        if on_gpu:
            gpu_mib()  # fails early if the memory cannot be read

    def run(self):
        printed = self.begin
        try:
            while time.time() < self.end:
                now, metrics = time.time(), self.serve.metrics()
                self.samples.append((now - self.begin, self.serve.rss_mib(), gpu_mib() if self.on_gpu else 0))
                pages = sum(metrics[f"kv_{state}_tokens"] for state in ("used", "evictable", "available"))
                require(metrics["num_leaked_pages"] == 0 and pages == metrics["max_total_num_tokens"], "KV pages:", metrics)
                for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "kv_evictable_tokens"):
                    self.peak[name] = max(self.peak[name], int(metrics[name]))
                if now - printed > 30:
                    printed = now
                    seconds, rss, gpu = self.samples[-1]
                    print(f"  {seconds:.0f} s: RSS {rss:.1f} MiB, GPU {gpu:.0f} MiB, {metrics['num_requests_total']:.0f} "
                          f"requests, {metrics['gen_throughput']:.0f} tokens/s", flush=True)
                time.sleep(0.25)
        except (OSError, http.client.HTTPException, Malformed, LookupError, ValueError,
                subprocess.CalledProcessError) as error:
            self.failure = f"watch: {type(error).__name__}: {error}"

    def first_and_last(self, column):
        """Returns medians over a tenth of the run: after the warm-up and at the end."""
        length = self.end - self.begin
        spans = [(WARM_UP, WARM_UP + 0.1), (0.9, 1)]
        return [statistics.median(s[column] for s in self.samples if a * length <= s[0] <= b * length) for a, b in spans]


def wait_for_idle(serve, descriptors):
    """Returns the metrics and the remaining resources after all clients have disconnected. Polls, because requests
    of disconnected clients end at their next step."""
    deadline = time.time() + 20
    while True:
        metrics = serve.metrics()
        left = {name: metrics[name] for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "mamba_num_used_slots")}
        left["descriptors"] = max(0, serve.descriptors() - descriptors)
        if not any(left.values()) or time.time() > deadline:
            return metrics, left
        time.sleep(0.2)


def grown(rss, gpu):
    """Yields failures for growth that exceeds the limits, from the median after the warm-up to the one at the end."""
    for name, (first, last), most in [("RSS", rss, RSS_GROWTH_MIB), ("GPU memory", gpu, GPU_GROWTH_MIB)]:
        if last - first > most:
            yield f"{name} grew from {first:.1f} to {last:.1f} MiB; at most {most} MiB more are allowed"


def differing(texts):
    """Yields failures for prompts with different responses. texts has each process's responses to each prompt."""
    for i, prompt in enumerate(GREEDY):
        answers = set().union(*(t.get(i, set()) for t in texts))
        if len(answers) > 1:
            yield f"{len(answers)} different greedy responses to {prompt!r}: {sorted(answers)}"


def run_clients_and_watch(serve, options, seconds):
    """Returns the watch and the result of run_clients() in each process."""
    vocab = json.loads(serve.get("/server_info"))["vocab_size"]
    processes = max(1, min(8, options.clients, (os.cpu_count() or 1) // 2))
    seeds = [[options.seed * 10007 + i for i in range(p, options.clients, processes)] for p in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        start = time.time()
        watch = Watch(serve, options.device == "cuda", start, start + seconds)
        watch.start()
        results = pool.starmap(run_clients, [(serve.url, vocab, watch.end, s) for s in seeds])
        watch.join()
    return watch, results


def run_load(serve, options, seconds):
    """Returns the failures and a summary line."""
    descriptors = serve.descriptors()
    watch, results = run_clients_and_watch(serve, options, seconds)
    elapsed = time.time() - watch.begin
    counts = sum((r[0] for r in results), collections.Counter())
    failures = [failure for r in results for failure in r[2]]
    if watch.failure:
        return failures + [watch.failure], f"load: stopped early, {dict(counts)}"
    metrics, left = wait_for_idle(serve, descriptors)
    if not watch.on_gpu:  # on a GPU, the kernel can depend on the number of rows
        failures += differing([r[1] for r in results])
    rss, gpu = watch.first_and_last(1), watch.first_and_last(2)
    failures += grown(rss, gpu)
    if any(left.values()):
        failures.append(f"left after all clients disconnected: {left}")
    if metrics["num_failed_requests_total"] != 0:
        failures.append(f"{metrics['num_failed_requests_total']:.0f} requests failed")
    if not all(counts[kind] for kind in ("finished", "hung_up", "greedy", "refused")):
        failures.append(f"the run was too short for every kind of request: {dict(counts)}")
    memory = f"RSS {rss[0]:.1f} -> {rss[1]:.1f} MiB" + (f", GPU {gpu[0]:.0f} -> {gpu[1]:.0f} MiB" if watch.on_gpu else "")
    return failures, (
        f"load {os.path.basename(os.path.normpath(options.model))} on {options.device}: {elapsed:.0f} s, {options.clients} "
        f"clients, {counts.total()} requests ({counts['hung_up']} hung up, {counts['refused']} refused as expected), "
        f"{metrics['generation_tokens_total'] / elapsed:.0f} tokens/s, {metrics['num_aborted_requests_total']:.0f} aborted, "
        f"peak {watch.peak['num_running_reqs']} running, {watch.peak['num_queue_reqs']} queued, "
        f"{watch.peak['num_used_tokens']} KV tokens, {watch.peak['kv_evictable_tokens']} kept for reuse, "
        f"{metrics['cached_tokens_total']:.0f} of {metrics['prompt_tokens_total']:.0f} prompt tokens found there, "
        f"{metrics['num_retracted_requests_total']:.0f} retracted; {memory}; left: {left['num_used_tokens']:.0f} KV tokens")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, default=0.33)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, flags = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1:]
    if options.device == "cuda":
        exit_without_gpu(options.binary, options.model)
    with LoadedServe(options.binary, options.model, "--device", options.device, *flags) as serve:
        failures, summary = run_load(serve, options, 60 * options.minutes)
    if serve.exit_code != 0:
        failures.insert(0, f"serve ended with {serve.exit_code}:\n" + "".join(serve.lines[-20:]))
    for failure in failures[:20]:
        print("FAILED:", failure)
    print(summary + f"; {len(failures)} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
