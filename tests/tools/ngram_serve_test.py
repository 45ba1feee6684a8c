"""A model that repeats the passage of its prompt (models/training/train_copier.py) writes at least 2.5 tokens per verify
with n-gram drafts, and every text equals that of plain decoding, greedy and sampled, with 1 and 32 requests at once.

    python3 ngram_serve_test.py FP4MOE_BINARY MODEL
"""
import concurrent.futures
import http.client
import json
import os
import random
import re
import sys
import unittest
from urllib.parse import urlsplit

from serve_process import Serve, metrics

BINARY, MODEL = sys.argv[1:3]
NUM_PROMPTS = 32
MIN_WORDS, MAX_WORDS = 20, 32  # of a passage
INSTRUCTION = "Write the passage again."
LEAST_ACCEPTED = 2.5  # tokens per verify with three drafts
LEAST_REPEATED = 28  # outputs that are the passage


def words():
    """The words that are one token with the space before them, except those of the instruction."""
    with open(os.path.join(MODEL, "tokenizer.json")) as file:
        vocabulary = json.load(file)["model"]["vocab"]
    return sorted({token[1:] for token in vocabulary if re.fullmatch("Ġ[a-z]+", token)} - set(re.findall(r"\w+", INSTRUCTION)))


def passages():
    r, listed = random.Random("held out"), words()  # the recipe draws with seed 0
    return ["Passage: " + " ".join(r.choices(listed, k=r.randint(MIN_WORDS, MAX_WORDS))) + "." for _ in range(NUM_PROMPTS)]


def chat(url, passage, temperature, seed):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(
        {"messages": [{"role": "user", "content": passage + "\n" + INSTRUCTION}],
         "temperature": temperature, "seed": seed, "max_tokens": 64}))
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply["choices"][0]["message"]["content"]


def chats(url, asked, temperature, threads):
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda i: chat(url, asked[i], temperature, i), range(len(asked))))


class NgramDrafts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.asked = passages()
        with Serve(BINARY, MODEL) as plain:
            cls.texts = {t: chats(plain.url, cls.asked, t, NUM_PROMPTS) for t in (0, 0.7)}

    def test_the_model_repeats_passages(self):
        for temperature, texts in self.texts.items():
            repeated = sum(text == passage for text, passage in zip(texts, self.asked))
            print(f"temperature {temperature}: {repeated} of {NUM_PROMPTS} outputs are the passage")
            self.assertGreaterEqual(repeated, LEAST_REPEATED, temperature)

    def compare(self, *flags):
        """Returns the tokens per verify at both temperatures."""
        with Serve(BINARY, MODEL, "--speculative-algorithm", "NGRAM", *flags) as drafted:
            for threads in (NUM_PROMPTS, 1):
                for temperature, texts in self.texts.items():
                    self.assertEqual(chats(drafted.url, self.asked, temperature, threads), texts, (temperature, threads))
            length = metrics(drafted.url)["spec_accept_length"]
        print("tokens per verify", *flags, round(length, 3))
        return length

    def test_drafts(self):
        self.assertGreaterEqual(self.compare(), LEAST_ACCEPTED)

    def test_adaptive_drafts(self):
        # The number of drafts depends on the measured step times.
        self.assertGreater(self.compare("--speculative-adaptive"), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
