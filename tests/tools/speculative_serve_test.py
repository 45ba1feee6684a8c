"""Chats with every drafter of speculative decoding have the texts of plain decoding, greedy and sampled, with 1 and 32
requests at once and on four ranks; the trained drafters are often right. On a GPU, this is so with
--enable-deterministic-inference; without it, the test prints how many texts differ and expects the questions' answers.

    python3 speculative_serve_test.py FP4MOE_BINARY MODELS_FOLDER [QUESTIONS_PER_FORM [cuda]]
"""
import concurrent.futures
import http.client
import json
import os
import subprocess
import sys
import unittest
from urllib.parse import urlsplit

from serve_process import Serve, exit_without_gpu, metrics

BINARY, MODELS = sys.argv[1:3]
NUM_QUESTIONS = int(sys.argv[3]) if len(sys.argv) > 3 else 8
ON_GPU = "cuda" in sys.argv[4:]
# Flags with which all texts are the same.
EQUAL = [["--device", "cuda", "--enable-deterministic-inference"]] if ON_GPU else [["--threads", "4"],
                                                                                  ["--threads", "4", "--tp", "4"]]
FORMS = (("gsm8k", "gsm8k_form.jsonl"), ("gpqa", "gpqa_form.csv"))
LEAST_ACCEPTED = 2.5  # tokens per verify of a trained drafter with three drafts
LEAST_SCORE = 0.98


def path(*names):
    return os.path.join(MODELS, *names)


def evals(url, threads=8):
    """Returns the scores of both forms and the texts of their questions, as `fp4moe eval` asks them."""
    scores, asked = [], []
    for name, data in FORMS:
        out = subprocess.run([BINARY, "eval", "--base-url", url, "--eval-name", name, "--data-path", path("evals", data),
                              "--num-examples", str(NUM_QUESTIONS), "--max-tokens", "256", "--num-threads", str(threads),
                              "--json"], check=True, capture_output=True, text=True).stdout
        result = json.loads(out)["rounds"][0]
        scores.append(result["score"])
        asked += [answer["question"] for answer in result["answers"]]
    return scores, asked


def chat(url, question, temperature, seed):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(
        {"messages": [{"role": "user", "content": question}], "temperature": temperature, "seed": seed, "max_tokens": 256}))
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply["choices"][0]["message"]["content"]


def chats(url, asked, temperature, threads):
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda i: chat(url, asked[i], temperature, i), range(len(asked))))


class Speculation(unittest.TestCase):
    def check(self, model, drafters):
        """drafters: algorithm -> (flags, least tokens per verify)."""
        for flags in EQUAL:
            serve = [BINARY, path(model), "--max-running-requests", "32", *flags]
            with Serve(*serve) as plain:
                _, asked = evals(plain.url)
                texts = {t: chats(plain.url, asked, t, 32) for t in (0, 0.7, 2)}
            self.assertEqual(len(asked), 2 * NUM_QUESTIONS)
            for algorithm, (drafter, least) in drafters.items():
                drafting = ["--speculative-algorithm", algorithm, *drafter]
                with self.subTest(drafting + flags):
                    self.assertGreaterEqual(self.compare(serve + drafting, asked, texts), least)
                    if flags == EQUAL[0]:
                        self.compare([*serve, *drafting, "--speculative-adaptive"], asked, texts)
        if ON_GPU:
            self.check_scores([BINARY, path(model), "--max-running-requests", "32", "--device", "cuda"], drafters, asked)

    def check_scores(self, serve, drafters, asked):
        with Serve(*serve) as plain:
            texts = chats(plain.url, asked, 0.7, 32)
        for algorithm, (drafter, _) in drafters.items():
            with self.subTest(algorithm), Serve(*serve, "--speculative-algorithm", algorithm, *drafter) as drafted:
                differing = sum(a != b for a, b in zip(chats(drafted.url, asked, 0.7, 32), texts, strict=True))
                scores = evals(drafted.url)[0] + evals(drafted.url, threads=1)[0]
                print(f"{algorithm}: {differing} of {len(asked)} texts differ; scores {scores}")
                self.assertGreaterEqual(min(scores), LEAST_SCORE)

    def compare(self, serve, asked, texts):
        """Returns the tokens per verify at the temperatures 0 and 0.7."""
        with Serve(*serve) as drafted:
            for temperature in (0, 0.7):
                for threads in (32, 1):
                    self.assertEqual(chats(drafted.url, asked, temperature, threads), texts[temperature], (temperature, threads))
            length = metrics(drafted.url)["spec_accept_length"]
            self.assertEqual(chats(drafted.url, asked, 2, 32), texts[2])
            return length

    def test_gptoss(self):
        model = "demo-gptoss-mxfp4"
        draft = "--speculative-draft-model-path"
        self.check(model, {"NGRAM": ([], 1.1), "STANDALONE": ([draft, path(model)], 3.5),
                           "EAGLE3": ([draft, path("demo-gptoss-eagle3")], LEAST_ACCEPTED)})

    def test_dsv3(self):
        self.check("demo-dsv3-nvfp4", {"EAGLE": ([], LEAST_ACCEPTED)})


if __name__ == "__main__":
    if ON_GPU:
        exit_without_gpu(BINARY, path("demo-gptoss-mxfp4"))
    unittest.main(argv=sys.argv[:1], verbosity=2)
