"""Requests to random models with delta nets, whose log-probabilities tests compare bit for bit."""
import concurrent.futures
import http.client
import json
import random
from urllib.parse import urlsplit

NUM_REQUESTS, NUM_TOKENS = 32, 40
# Cuts of a prompt and pages of 16 tokens and chunks of 64 fall on all sides of these.
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300]
RANKS = {"none": [["--tp", "2"], ["--tp", "4"], ["--tp", "4", "--dp", "2", "--enable-dp-attention"]],
         "deepep": [["--tp", "2", "--ep-size", "2", "--dp", "2", "--enable-dp-attention"], ["--tp", "4", "--ep-size", "4"]]}
DRAFTS = [["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6",
           "--speculative-ngram-min-match-window-size", "1"],
          ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"]]


def prompts():
    """Unrelated prompts, and prompts that share their first 200 tokens."""
    r = random.Random("states")
    ids = lambda n: [r.randrange(3, 250) for _ in range(n)]
    shared = ids(200)
    alone = [ids(n) for n in LENGTHS]
    return alone + [shared[:r.choice([70, 130, 200])] + ids(r.randrange(1, 60)) for _ in range(NUM_REQUESTS - len(alone))]


def post(url, path, body):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, (response.status, text)
    return json.loads(text)


def generate(url, ids, **sampling):
    """Returns the log-probability and id of every output token, and how many prompt tokens were found in the cache."""
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    meta = post(url, "/generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True})["meta_info"]
    return [(value, token) for value, token, _ in meta["output_token_logprobs"]], meta["cached_tokens"]


def generate_all(url, asked, at_once=NUM_REQUESTS):
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda ids: generate(url, ids), asked))


def outputs(answers):
    return [output for output, _ in answers]


def begin_and_cancel(url, ids, num_events):
    """Closes a stream after some events."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request("POST", "/generate", json.dumps({"input_ids": ids, "stream": True, "sampling_params": {
        "temperature": 0, "max_new_tokens": 150, "ignore_eos": True}}))
    response = connection.getresponse()
    for _ in range(2 * num_events):  # an event is a line and an empty line
        response.readline()
    connection.close()
    response.close()
