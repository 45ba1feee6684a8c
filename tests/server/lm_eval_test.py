"""The requests of lm_eval's local-completions on the demo checkpoint: loglikelihood compared with the
reference logits, and generate_until."""
import concurrent.futures
import json
import os
import re
import sys
import unittest
import urllib.request

import numpy as np
from safetensors.numpy import load_file

from serve_process import Serve

BINARY, MODEL = sys.argv[1:3]
REFERENCE = load_file(os.path.join(MODEL, "reference_logits.safetensors"))
PROMPTS = [REFERENCE[f"prompt_{j}.input_ids"].tolist() for j in (0, 1)]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)


def loglikelihood(prompt, max_tokens=1):
    return {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234,
            "echo": True}


def score(choice, context_length):
    """Reads a response like lm_eval: returns the continuation's log-probability and whether it is greedy."""
    values = choice["logprobs"]["token_logprobs"][context_length:-1]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context_length:-1]]
    return sum(values), values == best


class LmEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.serves = {}
        for name, flags in {"whole": (), "float32": ("--dtype", "float32"),
                            "chunks": ("--max-running-requests", "3", "--chunked-prefill-size", "40"),
                            "few pages": ("--max-total-tokens", "512", "--schedule-conservativeness", "0")}.items():
            cls.serves[name] = Serve(BINARY, MODEL, "--served-model-name", "demo", "--context-length", "512",
                                     *flags).__enter__()

    @classmethod
    def tearDownClass(cls):
        for name, serve in cls.serves.items():
            serve.__exit__()
            assert serve.exit_code == 0, (name, serve.exit_code)

    def post(self, body, path="/v1/completions", serve="whole"):
        request = urllib.request.Request(self.serves[serve].url + path, json.dumps(body).encode(),
                                         {"Authorization": "Bearer "})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def choices(self, body, **where):
        return sorted(self.post(body, **where)["choices"], key=lambda choice: choice["index"])

    def test_loglikelihood_is_that_of_the_reference_logits(self):
        for j, choice in enumerate(self.choices(loglikelihood(PROMPTS), serve="float32")):
            ids = np.array(PROMPTS[j])
            expected = log_softmax(REFERENCE[f"prompt_{j}.logits_w4a16"])[:-1]
            chosen = expected[np.arange(len(ids) - 1), ids[1:]]
            got = choice["logprobs"]["token_logprobs"]
            self.assertIsNone(got[0])
            self.assertEqual(len(got), len(ids) + 1)  # plus one output token
            np.testing.assert_allclose(got[1:-1], chosen, atol=2e-4)
            best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:-1]]
            np.testing.assert_allclose(best, expected.max(1), atol=2e-4)
            for context_length in (1, len(ids) // 2, len(ids) - 1):
                total, is_greedy = score(choice, context_length)
                self.assertAlmostEqual(total, chosen[context_length - 1:].sum(), delta=2e-3)
                self.assertEqual(is_greedy, (expected.argmax(1) == ids[1:])[context_length - 1:].all())
            self.assertTrue(choice["text"].startswith("".join(choice["logprobs"]["tokens"][:-1])))

    def test_texts_are_scored_as_their_ids(self):
        texts = [self.post({"tokens": ids, "skip_special_tokens": False}, path="/detokenize")["text"] for ids in PROMPTS]
        by_ids, by_texts = (self.choices(loglikelihood(prompt)) for prompt in (PROMPTS, texts))
        self.assertEqual([choice["logprobs"] for choice in by_texts], [choice["logprobs"] for choice in by_ids])
        for text, choice in zip(texts, by_texts):
            self.assertTrue(choice["text"].startswith(text))
        self.assertEqual(self.choices(loglikelihood(texts[0]))[0]["logprobs"], by_ids[0]["logprobs"])

    def test_no_answer_at_all(self):
        for whole, choice in zip(self.choices(loglikelihood(PROMPTS)), self.choices(loglikelihood(PROMPTS, max_tokens=0))):
            self.assertEqual(choice["logprobs"]["token_logprobs"], whole["logprobs"]["token_logprobs"][:-1])
            self.assertEqual(choice["finish_reason"], "length")

    def test_chunks_retraction_and_earlier_requests_change_no_bit(self):
        prompts = [ids[:length] for length in (300, 67, 41, 2, 1) for ids in PROMPTS]
        expected = [self.choices(loglikelihood(prompt))[0]["logprobs"] for prompt in prompts]
        for serve in ("whole", "chunks", "few pages"):
            with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
                several = list(pool.map(lambda prompt: self.choices(loglikelihood(prompt), serve=serve)[0]["logprobs"], prompts))
            self.assertEqual(several, expected, serve)

    def test_generate_until(self):
        with open(os.path.join(os.path.dirname(MODEL), "evals", "gsm8k_form.jsonl")) as lines:
            items = [json.loads(next(lines)) for _ in range(8)]
        right = 0
        for item in items:
            prompt = f"<|im_start|>user\n{item['question']}<|im_end|>\n<|im_start|>assistant\n"
            body = {"prompt": [self.post({"prompt": prompt}, path="/tokenize")["tokens"]], "model": "demo", "max_tokens": 200,
                    "temperature": 0, "stop": ["<|im_end|>", "\nuser"], "seed": 1234}
            choice, = self.choices(body)
            self.assertNotIn("<|im_end|>", choice["text"])
            found = re.search(r"#### (-?[0-9]+)", choice["text"])
            right += found is not None and found.group(1) == item["answer"].split("#### ")[1]
        self.assertGreaterEqual(right, 7)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
